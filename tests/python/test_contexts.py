"""The command line against a server elsewhere: `--url`, `login`, contexts, and what a refused token says."""

from __future__ import annotations

import json
import os
import stat
import subprocess

import pytest

from harness import BIN, DEADLINE, free_port


class Client:
    """The command line on another machine: it shares nothing with the server but the network."""

    def __init__(self, home):
        self.home = home

    def __call__(self, *args: str, env: dict[str, str] | None = None, check: bool = True, **more) -> subprocess.CompletedProcess:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("OUBLIETTE_")}
        done = subprocess.run(
            [BIN / "oubliette", "--home", self.home, *args],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env={**clean, **(env or {})},
            **({"stdin": subprocess.DEVNULL} if "input" not in more else {}),
            **more,
        )
        assert not check or done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *args: str, **more):
        return json.loads(self(*args, "--json", **more).stdout)


@pytest.fixture
def client(tmp_path):
    return Client(tmp_path / "client")


def test_commands_act_on_the_server_that_was_logged_in_to(server, admin, project, client):
    server.put_agent("quick", admin, [[{"say": "over there"}]])
    said = client.json("login", server.url + "/", input=f"{admin}\n")
    name = server.url.removeprefix("http://")
    assert (said["name"], said["url"]) == (name, server.url)
    file = client.home / "contexts.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # A second login is a second context, and the one in use.
    client("login", server.url, "--name", "lab", env={"OUBLIETTE_TOKEN": admin})
    listed = client.json("context")
    assert [(c["name"], c["url"]) for c in listed["contexts"]] == [(name, server.url), ("lab", server.url)]
    assert listed["current"] == "lab" and admin not in client("context").stdout
    assert client.json("context", "use", name)["current"] == name

    assert project in [p["project_id"] for p in client.json("project", "list")["projects"]]
    turn = client.json("run", "--project", project, "--agent", "quick", "hi")
    assert turn["text"] == "over there"
    # Live events come over the network too.
    assert "over there" in client("run", "--project", project, "--agent", "quick", "hi").stdout
    assert "turn_completed" in client("session", "events", turn["session_id"]).stdout
    assert client("session", "debug", turn["session_id"], "--no-follow").stdout
    made = client.json("token", "create", "--name", "x", "--scope", "read")
    assert made["token"].startswith("oub_")
    assert client.json("doctor")["checks"]
    assert f"{server.url}/mcp" in client("mcp-config", "cursor").stdout
    # Nothing of a server was made here.
    assert not (client.home / "oubliette.db").exists()

    # What works on a home only says so.
    refused = client("tool", "test", "fs", check=False)
    assert refused.returncode == 1 and "home directory" in refused.stderr and "--context local" in refused.stderr
    assert client.json("--context", "local", "project", "list") == {"projects": []}
    client("context", "use", "local")
    assert client.json("project", "list") == {"projects": []}
    assert [c["name"] for c in client.json("context", "remove", name)["contexts"]] == ["lab"]
    missing = client("context", "use", "moon", check=False)
    assert missing.returncode == 1 and "oubliette login" in missing.stderr


def test_a_url_is_enough_for_one_command(server, admin, project, client):
    token = {"OUBLIETTE_TOKEN": admin}
    for args, env in ((["--url", server.url], token), ([], {"OUBLIETTE_URL": server.url, **token})):
        listed = client.json(*args, "project", "list", env=env)["projects"]
        assert project in [p["project_id"] for p in listed]
    bare = client("--url", server.url, "project", "list", check=False)
    assert bare.returncode == 1 and "OUBLIETTE_TOKEN" in bare.stderr
    assert not (client.home / "contexts.json").exists()


def test_a_revoked_token_is_said_to_be_refused(server, admin, client):
    made = server.api("token_create", admin, name="gone", scope="admin")
    client("login", server.url, input=made["token"])
    server.api("token_revoke", admin, token_id=made["token_id"])
    for command in (["project", "list"], ["run", "hi"], ["session", "list"]):
        refused = client(*command, check=False)
        assert refused.returncode == 1
        assert "revoked" in refused.stderr and f"oubliette login {server.url}" in refused.stderr
        assert made["token"] not in refused.stderr + refused.stdout
    body = json.loads(client("project", "list", "--json", check=False).stdout)
    assert body["error"]["code"] == "unauthenticated"
    # A login that is refused changes nothing.
    before = (client.home / "contexts.json").read_text()
    assert client("login", server.url, "--name", "again", input=made["token"], check=False).returncode == 1
    assert (client.home / "contexts.json").read_text() == before


@pytest.mark.parametrize(
    "url, said",
    [
        ("example.com", "a server's URL is like"),
        ("ftp://example.com", "a server's URL is like"),
        ("http://127.0.0.1:PORT", "cannot be reached"),
    ],
)
def test_a_wrong_url_is_explained(client, url, said):
    url = url.replace("PORT", str(free_port()))
    refused = client("login", url, input="oub_x", check=False)
    assert refused.returncode == 1 and said in refused.stderr
    empty = client("login", "http://127.0.0.1:1", input="", check=False)
    assert empty.returncode == 1 and "no token was given" in empty.stderr

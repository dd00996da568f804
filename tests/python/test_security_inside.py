"""What an agent does with a key never widens what its session may do, by whatever route the call comes."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from attack_support import TRUST, Attacker, refusal, unharmed
from harness import ToolFailed, running
from wire import LegacyMcp, ModernMcp, Relay

SECRET = "trusted-value-b7c1"


@pytest.fixture(scope="module")
def server():
    with running(TRUST + 'env = ["ATTACK_SECRET"]\n', {"ATTACK_SECRET": SECRET}) as server:
        yield server


@pytest.fixture
def listener():
    """A service on the host's loopback, where no sandbox may reach."""
    with Listener() as listener:
        yield listener


@pytest.fixture
def inside(server, admin):
    """A session in a project whose agents are given a key."""
    server.put_agent("other", admin, [[{"say": "other"}]])
    project = server.api("project_create", admin, name="keyed", api_key={"scope": "admin"})["project_id"]
    with Inside(server, admin, project) as inside:
        yield inside


class Listener:
    """Counts what reaches it, and keeps the headers."""

    def __init__(self) -> None:
        self.heard: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.heard.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
                self.send_error(404)

            do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


class Inside(Attacker):
    """An agent that has found its session's key."""

    def __init__(self, server, admin, project):
        super().__init__(server, admin, project)
        # Through a file: what the agent says is searched for keys, which are masked.
        self.run("open('/workspace/key', 'w').write(agent.environment('OUBLIETTE_API_KEY'))")
        self.key = (self.workspace / "key").read_text()

    def call(self, tool: str, arguments: dict, key: str | None = None, nested: int = 0) -> dict:
        """Calls one of Oubliette's own tools over the relay socket, through so many `tool_call`s of its own session."""
        for _ in range(nested):
            tool, arguments = "tool_call", {"session_id": self.session, "tool": f"oubliette_{tool}", "arguments": arguments}
        with Relay(self.details["relay_socket"]) as relay:
            return relay.call("oubliette_call_tool", tool=tool, arguments=arguments, api_key=key or self.key)

    def widening(self, listener: Listener) -> dict[str, dict]:
        """Calls that would give the session more than it has."""
        return {
            "workspace_create": {"project_id": self.project, "source": {"git": f"{listener.url}/x.git"}},
            "session_switch_agent": {"session_id": self.session, "agent": "other"},
            "project_update": {"project_id": self.project, "agent": "other"},
        }

    def check_not_widened(self, listener: Listener) -> None:
        assert listener.heard == [], "the server's network was used for an agent"
        assert self.details["agent"] == "hostile"
        assert not self.server.api("project_get", self.admin, project_id=self.project).get("agent")


def code_of(answer: dict) -> str | None:
    """The error code of an answer on the relay socket, however deep in results of `tool_call` it is; none for success."""
    if "error" in answer:
        return answer["error"]["data"]["code"]
    result = answer["result"]
    while isinstance(result, dict) and {"content", "isError"} <= result.keys():
        structured = result.get("structuredContent") or {}
        if result["isError"]:
            return structured["error"]["code"]
        result = structured
    return None


@pytest.mark.parametrize("tool", ["workspace_create", "session_switch_agent", "project_update"])
def test_a_call_through_tool_call_of_the_own_session_is_still_from_inside(server, admin, inside, listener, tool):
    """An agent wraps a forbidden call in `tool_call` on its own session; it is refused as the plain call is."""
    for nested in (0, 1, 3):
        answer = inside.call(tool, inside.widening(listener)[tool], nested=nested)
        assert code_of(answer) == "permission_denied", f"nested {nested} times: {answer}"
    inside.check_not_widened(listener)
    unharmed(server, admin)


@pytest.mark.parametrize("field", ["limits", "sandbox", "api_key", "env", "agent"])
def test_a_session_in_another_project_changes_nothing_of_the_one_above(server, admin, inside, field):
    """A child in another project, with a key for all projects, raises what bounds the session that started it."""
    changes = {"limits": {"max_sessions": 7}, "sandbox": {"pids": 99}, "api_key": {"scope": "write"}, "env": {"A": "b"}, "agent": "other"}
    elsewhere = server.api("project_create", admin, name="elsewhere")["project_id"]
    message = {"message": "agent.say('x')", "project_id": elsewhere, "wait": True}
    started = inside.call("session_message", message, key=admin)["result"]
    child = server.api("session_get", admin, session_id=started["session_id"])
    assert (child["project_id"], child["parent_id"]) == (elsewhere, inside.session), child
    before = server.api("project_get", admin, project_id=inside.project)
    with Relay(child["relay_socket"]) as relay:
        update = {"project_id": inside.project, field: changes[field]}
        answer = relay.call("oubliette_call_tool", tool="project_update", arguments=update, api_key=admin)
        assert code_of(answer) == "permission_denied", answer
        renamed = {"project_id": inside.project, "description": "still there"}
        answer = relay.call("oubliette_call_tool", tool="project_update", arguments=renamed, api_key=admin)
        assert code_of(answer) is None, answer
    after = server.api("project_get", admin, project_id=inside.project)
    assert {**before, "description": "", "updated_at": ""} == {**after, "description": "", "updated_at": ""}
    unharmed(server, admin)


@pytest.mark.parametrize("nested", [0, 1, 2])
def test_a_session_started_through_tool_call_is_a_child(server, admin, inside, nested):
    """An agent starts sessions through `tool_call` to have them outside its own tree; they are its children or refused."""
    before = {row["session_id"] for row in server.api("session_list", admin)["sessions"]}
    foreign = inside.call("session_message", {"message": "go", "project_id": inside.project, "agent": "other"}, nested=nested)
    assert code_of(foreign) == "not_allowed", foreign
    own = inside.call("session_message", {"message": "agent.say('x')", "project_id": inside.project}, nested=nested)
    new = [row for row in server.api("session_list", admin)["sessions"] if row["session_id"] not in before]
    assert new or code_of(own), own
    for row in new:
        assert row.get("parent_id") == inside.session and row["depth"] == 1, row
        server.api("session_end", admin, session_id=row["session_id"])


@pytest.mark.parametrize("nested", [0, 1, 2])
def test_the_audit_log_names_the_session_of_a_nested_call(server, admin, inside, nested):
    """An agent changes something through `tool_call`; the audit log says from inside which session."""
    name = f"made-{nested}"
    answer = inside.call("workspace_create", {"project_id": inside.project, "name": name}, nested=nested)
    assert code_of(answer) is None, answer
    made = server.api("workspace_list", admin, project_id=inside.project)["workspaces"]
    workspace = next(row["workspace_id"] for row in made if row["name"] == name)
    entries = server.api("audit_list", admin, action="workspace_create", project_id=inside.project)["entries"]
    newest = entries[0]
    assert newest["outcome"] == "ok" and newest.get("session_id") == inside.session, newest
    server.api("workspace_delete", admin, workspace_id=workspace)


@pytest.mark.parametrize("derived", [False, True], ids=["minted", "made-with-it"])
@pytest.mark.parametrize("door", ["rest", "mcp-legacy", "mcp-modern"])
def test_a_sessions_key_is_inside_at_every_door(server, admin, inside, listener, door, derived):
    """A session's key, or a token made with it, is used at the public endpoints; it may do no more than over the relay."""
    key = inside.key
    if derived:
        asked = {"name": "derived", "scope": "admin", "project_id": inside.project}
        made = inside.call("token_create", asked)
        if code_of(made):
            return  # refusing such tokens altogether is as good
        key = made["result"]["token"]
    if door == "rest":
        call = lambda tool, arguments: server.api(tool, key, **arguments)
    else:
        mcp = LegacyMcp(server, key) if door == "mcp-legacy" else ModernMcp(server, key)
        call = lambda tool, arguments: mcp.call(tool, **arguments)
    for tool, arguments in inside.widening(listener).items():
        assert refusal(lambda: call(tool, arguments)) == "permission_denied", tool
        nested = {"session_id": inside.session, "tool": f"oubliette_{tool}", "arguments": arguments}
        # The gate may answer a nested call with an error of its own or with a result that holds it.
        try:
            result = call("tool_call", nested)
        except ToolFailed as refused:
            assert refused.code == "permission_denied", refused
        else:
            assert code_of({"result": result}) == "permission_denied", result
    inside.check_not_widened(listener)


def opened(url: str) -> dict[str, dict]:
    """Catalog entries that reach a network, or hold a variable of the server's environment."""
    port = url.rsplit(":", 1)[1]
    stdio = {"kind": "mcp", "transport": "stdio", "command": "/usr/bin/python3"}
    return {
        "http": {"kind": "mcp", "transport": "http", "endpoint": f"{url}/mcp"},
        "ws": {"kind": "mcp", "transport": "ws", "endpoint": f"ws://127.0.0.1:{port}"},
        "tcp": {"kind": "mcp", "transport": "tcp", "endpoint": f"127.0.0.1:{port}"},
        "header": {
            "kind": "mcp", "transport": "http", "endpoint": f"{url}/mcp", "headers": {"X-Taken": "${env:ATTACK_SECRET}"},
        },
        "args": {**stdio, "args": ["-c", "${env:ATTACK_SECRET}"]},
        "env": {**stdio, "env": {"TAKEN": "${env:ATTACK_SECRET}"}},
        "proxy": {**stdio, "network": "proxy"},
    }


@pytest.mark.parametrize("kind", ["http", "ws", "tcp", "header", "args", "env", "proxy"])
def test_no_key_puts_a_catalog_entry_that_opens_the_network_or_the_environment(server, admin, inside, listener, kind):
    """An agent with an unbound admin key defines a tool server outside the sandbox, or one that is given a trusted variable;
    the definition is refused, so nothing is reached and nothing is read."""
    id, slug = f"opened-{kind}", f"opener-{kind}"
    arguments = {"id": id, "definition": {"id": id, **opened(listener.url)[kind]}}
    for nested in (0, 1):
        put = inside.call("catalog_put", arguments, key=admin, nested=nested)
        refused = code_of(put)
        if refused is None:
            lead_on(inside, admin, id, slug)
        assert refused == "permission_denied", f"nested {nested} times: {put}; the host was reached with {listener.heard}"
    assert listener.heard == []
    assert refusal(lambda: server.api("catalog_get", admin, id=id)) == "not_found"
    entries = server.api("audit_list", admin, action="catalog_put", session_id=inside.session)["entries"]
    assert [entry["outcome"] for entry in entries] == ["permission_denied"] * 2, entries


def lead_on(inside: Inside, admin: str, id: str, slug: str) -> None:
    """Shows how far an accepted entry leads: a session of an agent that uses it."""
    agent = {"name": slug, "prompt": "p", "model": "script:s.json", "tools": {"use": [id]}}
    files = {"s.json": '{"turns":[[{"say":"hi"}]]}'}
    inside.call("agent_put", {"slug": slug, "definition": agent, "files": files}, key=admin)
    message = {"message": "go", "project_id": inside.project, "agent": slug, "wait": True}
    inside.call("session_message", message, key=admin, nested=1)


def test_an_entry_that_opens_nothing_may_still_be_put(server, admin, inside):
    """Refusing what opens the host leaves an admin's key what is harmless."""
    entry = {"id": "harmless", "kind": "builtin", "builtinPolicy": {"name": "fs_read", "allowedPaths": ["."]}}
    put = inside.call("catalog_put", {"id": "harmless", "definition": entry}, key=admin)
    assert code_of(put) is None, put
    server.api("catalog_delete", admin, id="harmless")

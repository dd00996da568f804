"""The server's public interface: MCP, HTTP, login, tokens and scopes, projects, definitions, the program itself."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import socket
import stat
import subprocess

import httpx
import pytest

import harness
import stores
from harness import ToolFailed, running, wait_until


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# -- MCP ---------------------------------------------------------------------------------------------


async def test_a_client_of_either_lifecycle_lists_and_calls(server, admin, mode):
    async with server.mcp(admin, mode) as mcp:
        tools = await mcp.tools()
        assert {"project_create", "project_list", "token_create", "server_info"} <= tools.keys()
        assert tools["project_create"].input_schema["type"] == "object"
        made = await mcp.call("project_create", name=f"by {mode}")
        listed = await mcp.call("project_list", name_contains=f"by {mode}")
        assert [p["project_id"] for p in listed["projects"]] == [made["project_id"]]


async def test_results_are_objects_and_the_same_json_as_text(server, admin, mode):
    async with server.mcp(admin, mode) as mcp:
        result = await mcp.client.call_tool("server_info", {})
        assert json.loads(result.content[0].text) == result.structured_content


async def test_errors_carry_code_and_message(server, admin, mode):
    async with server.mcp(admin, mode) as mcp:
        with pytest.raises(ToolFailed) as failed:
            await mcp.call("project_get", project_id="proj_01ARZ3NDEKTSV4RRFFQ69G5FAV")
        assert failed.value.code == "not_found"
        with pytest.raises(ToolFailed) as failed:
            await mcp.call("project_create", name="x", nonsense=1)
        assert failed.value.code == "invalid_argument"
        assert "nonsense" in failed.value.message


async def test_an_unknown_tool_is_a_protocol_error(server, admin, mode):
    async with server.mcp(admin, mode) as mcp:
        with pytest.raises(Exception) as failed:
            await mcp.client.call_tool("no_such_tool", {})
        assert failed.value.error.code == -32602


async def test_tools_list_shows_just_what_the_token_may_call(server, mode):
    read, write = server.token("read"), server.token("write")
    async with server.mcp(read, mode) as mcp:
        names = (await mcp.tools()).keys()
        assert "project_list" in names and "project_create" not in names and "token_create" not in names
    async with server.mcp(write, mode) as mcp:
        names = (await mcp.tools()).keys()
        assert "project_create" in names and "token_create" not in names
        with pytest.raises(ToolFailed) as failed:
            await mcp.call("token_create", name="x", scope="read")
        assert failed.value.code == "permission_denied"


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25"])
def test_every_stateful_revision_is_spoken(server, admin, revision):
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    answer = mcp_post(server, admin, {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    assert answer.status_code == 200, answer.text
    assert answer.headers["mcp-session-id"]
    assert first_message(answer)["result"]["protocolVersion"] == revision


def mcp_post(server, token, body, **headers) -> httpx.Response:
    return harness.post(
        f"{server.url}/mcp",
        content=body if isinstance(body, (str, bytes)) else json.dumps(body),
        headers={
            **bearer(token),
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            **headers,
        },
    )


def first_message(answer: httpx.Response) -> dict:
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()
    data = [line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return json.loads(next(d for d in data if d))


def test_batches_and_broken_json_are_refused(server, admin):
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    batch = mcp_post(server, admin, [ping, ping])
    assert batch.status_code == 400 and batch.json()["error"]["code"] == -32600
    assert mcp_post(server, admin, '{"jsonrpc":').status_code == 400


def test_a_session_id_works_only_for_its_principal(server, admin):
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    opened = mcp_post(server, admin, {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    session = opened.headers["mcp-session-id"]
    other = server.token("admin")
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    headers = {"Mcp-Session-Id": session, "MCP-Protocol-Version": "2025-11-25"}
    assert mcp_post(server, admin, ping, **headers).status_code == 200
    assert mcp_post(server, other, ping, **headers).status_code == 404
    gone = harness.delete(f"{server.url}/mcp", headers={**bearer(other), **headers})
    assert gone.status_code == 404
    assert mcp_post(server, admin, ping, **headers).status_code == 200


# -- HTTP --------------------------------------------------------------------------------------------


def test_no_or_a_bad_token_is_401(server):
    for headers in ({}, bearer("oub_nonsense"), {"Authorization": "Basic eDp5"}):
        for method, path in (("POST", "/mcp"), ("POST", "/api/tools/project_list"), ("GET", "/metrics")):
            answer = harness.request(method, f"{server.url}{path}", headers=headers, json={})
            assert answer.status_code == 401, (path, headers)
            assert answer.headers["www-authenticate"].startswith("Bearer")


def test_health_needs_no_token_and_unknown_paths_are_json_404(server):
    assert harness.get(f"{server.url}/health").json()["status"] == "ok"
    assert harness.get(f"{server.url}/ready").status_code == 200
    for path in ("/nowhere", "/.well-known/oauth-authorization-server", "/api/nowhere"):
        answer = harness.get(f"{server.url}{path}")
        assert answer.status_code == 404 and "error" in answer.json(), path


def test_a_wrong_host_or_origin_is_403(server, admin):
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        answer = harness.post(f"{server.url}/api/tools/project_list", headers={**bearer(admin), **headers}, json={})
        assert answer.status_code == 403, headers
    assert harness.get(f"{server.url}/health", headers={"Host": "evil.example"}).status_code == 200


def test_a_body_over_4_mib_is_413_and_nothing_is_written(server, admin):
    big = json.dumps({"name": "big", "description": "x" * (5 << 20)})
    for path in ("/api/tools/project_create", "/mcp"):
        answer = harness.post(f"{server.url}{path}", headers={**bearer(admin), "Content-Type": "application/json"}, content=big)
        assert answer.status_code == 413, path
    assert server.api("project_list", admin, name_contains="big")["projects"] == []


def test_openapi_and_rest_come_from_the_same_definitions(server, admin):
    document = harness.get(f"{server.url}/api/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert "/api/tools/project_create" in document["paths"]
    assert "/api/tools/caller_tool_response" in document["paths"]


def test_metrics_are_prometheus_text(server, admin):
    answer = harness.get(f"{server.url}/metrics", headers=bearer(admin))
    assert answer.status_code == 200 and "# TYPE" in answer.text


def test_answers_carry_a_request_id(server):
    assert harness.get(f"{server.url}/health").headers["x-request-id"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": 5},
        {"name": ""},
        {"name": "x" * 100_000},
        {"name": "a\0b"},
        {"name": "ok", "env": {"A B": "x"}},
        {"name": "ok", "agent": "../../etc"},
        {"name": "ok", "limits": {"max_depth": -1}},
        {},
    ],
)
def test_bad_arguments_are_named(server, admin, arguments):
    with pytest.raises(ToolFailed) as failed:
        server.api("project_create", admin, **arguments)
    assert failed.value.code == "invalid_argument" and failed.value.status == 400


@pytest.mark.parametrize("bad", ["../x", "a/b", "x\0", "ｐroj", "oubliette", "session", "", "A"])
def test_path_tricks_in_ids_are_refused(server, admin, bad):
    definition = {"name": "x", "prompt": "y"}
    with pytest.raises(ToolFailed) as failed:
        server.api("agent_put", admin, slug=bad, definition=definition)
    assert failed.value.code == "invalid_argument"
    with pytest.raises(ToolFailed):
        server.api("project_get", admin, project_id=bad)


# -- the console's cookie ----------------------------------------------------------------------------


def test_the_cookie_is_for_api_only_and_dies_with_the_token(server, admin):
    made = server.api("token_create", admin, name="console", scope="write")
    with httpx.Client(base_url=server.url, timeout=harness.DEADLINE) as browser:
        refused = browser.post("/api/login", json={"token": "oub_wrong"})
        assert refused.status_code == 401
        assert browser.post("/api/login", json={"token": made["token"]}).status_code == 200
        cookie = browser.post("/api/login", json={"token": made["token"]}).headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/api" in cookie
        assert browser.post("/api/tools/project_list", json={}).status_code == 200
        assert browser.post("/api/tools/project_create", json={"name": "c"}).status_code == 403
        made_project = browser.post("/api/tools/project_create", json={"name": "c"}, headers={"X-Oubliette": "1"})
        assert made_project.status_code == 200
        assert browser.post("/mcp", json={}, cookies=dict(browser.cookies)).status_code == 401
        server.api("token_revoke", admin, token_id=made["token_id"])
        assert browser.post("/api/tools/project_list", json={}).status_code == 401


def test_failed_logins_are_rate_limited(server):
    codes = [harness.post(f"{server.url}/api/login", json={"token": "oub_x"}).status_code for _ in range(60)]
    assert codes[0] == 401 and 429 in codes


# -- tokens ------------------------------------------------------------------------------------------


def test_a_revoked_or_expired_token_is_dead_at_once(server, admin):
    made = server.api("token_create", admin, name="t", scope="read", expires_in="1h")
    assert made["token"].startswith("oub_") and len(made["token"]) >= 4 + 43
    server.api("project_list", made["token"])
    server.api("token_revoke", admin, token_id=made["token_id"])
    with pytest.raises(ToolFailed) as failed:
        server.api("project_list", made["token"])
    assert failed.value.code == "unauthenticated" and failed.value.status == 401
    short = server.api("token_create", admin, name="s", scope="read", expires_in="1ms")
    with pytest.raises(ToolFailed):
        wait_until(lambda: server.api("project_list", short["token"]) is None, "expiry")


def test_a_token_does_not_outlive_the_one_it_was_made_with(server, admin):
    maker = server.api("token_create", admin, name="maker", scope="admin", expires_in="1h")
    for asked in ({}, {"expires_in": "2h"}):
        made = server.api("token_create", maker["token"], name="made", scope="read", **asked)
        assert made["expires_at"] == maker["expires_at"], asked
    brief = server.api("token_create", maker["token"], name="brief", scope="read", expires_in="1m")
    assert brief["expires_at"] < maker["expires_at"]
    assert "expires_at" not in server.api("token_create", admin, name="lasting", scope="read")


def test_a_token_is_stored_only_as_a_hash(server, admin):
    made = server.api("token_create", admin, name="t", scope="read")
    secret = made["token"].removeprefix("oub_").encode()
    for file in server.home.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if file.is_file() and file.name != "admin.token":
                assert secret not in file.read_bytes(), file
    assert secret.decode() not in json.dumps(server.api("token_list", admin))
    assert secret.decode() not in server.log()


def test_a_projects_agent_and_key_can_be_taken_away(server, admin):
    server.api("agent_put", admin, slug="helper", definition={"name": "Helper", "prompt": "Help."})
    project = server.api("project_create", admin, name="p", agent="helper", api_key={"scope": "write"})["project_id"]
    kept = server.api("project_update", admin, project_id=project, description="the rest stays")
    assert kept["agent"] == "helper" and kept["api_key"] == {"scope": "write"}
    bare = server.api("project_update", admin, project_id=project, agent=None)
    assert not bare.get("agent") and bare["api_key"] == {"scope": "write"}
    server.cli("project", "update", "p", "--no-api-key")
    assert not server.api("project_get", admin, project_id=project).get("api_key")


def test_a_token_bound_to_a_project_sees_nothing_else(server, admin):
    mine = server.api("project_create", admin, name="mine")["project_id"]
    other = server.api("project_create", admin, name="other")["project_id"]
    bound = server.token("write", project=mine)
    assert [p["project_id"] for p in server.api("project_list", bound)["projects"]] == [mine]
    for tool in ("project_get", "project_delete"):
        with pytest.raises(ToolFailed) as failed:
            server.api(tool, bound, project_id=other)
        assert failed.value.code == "not_found"
    with pytest.raises(ToolFailed) as failed:
        server.api("project_create", bound, name="new")
    assert failed.value.code == "permission_denied"


def test_token_commands_work_with_the_server_running_or_stopped():
    with running() as server:
        token = server.token("read")
        server.api("project_list", token)
        assert server.stop() == 0
        stopped = server.token("write")
        server.start()
        server.api("project_list", token)
        server.api("project_create", stopped, name="x")
        listed = server.cli_json("token", "list")["tokens"]
        assert len(listed) == 2
        for row in listed:
            server.cli("token", "revoke", row["token_id"])
        with pytest.raises(ToolFailed):
            server.api("project_list", token)


# -- projects, workspaces, files ---------------------------------------------------------------------


def test_environment_values_are_masked(server, admin):
    made = server.api("project_create", admin, name="env", env={"SECRET_THING": "hunter2hunter2"})
    got = server.api("project_get", admin, project_id=made["project_id"])
    assert "SECRET_THING" in got["env"] and "hunter2" not in json.dumps([made, got])
    assert "hunter2" not in server.log()


def test_a_mask_that_keeps_nothing_is_refused_with_file_and_field(server, admin, tmp_path):
    """What `get` shows is put under another name: its secrets are not stored there, and `***` must not become their value."""
    rule = {"tool": "@shell/*", "when": {"properties": {"env": {"required": ["TOKEN"]}, "headers": {"minProperties": 1}}}}
    definition = {"name": "a", "prompt": "p", "env": {"KEY": "sesame"}, "tools": {"ask": [rule]}}
    server.api("agent_put", admin, slug="first", definition=definition)
    shown = server.cli_json("agent", "get", "first")["definition"]
    assert shown["env"] == {"KEY": "***"} and shown["tools"]["ask"] == [rule], "a condition is no secret"
    file = tmp_path / "agent.json"
    file.write_text(json.dumps(shown))
    said = server.cli("agent", "put", str(file), "--slug", "second", check=False)
    assert said.returncode == 1 and "agents/second/agent.json: env.KEY: ***" in said.stderr, said
    assert "second" not in {agent["slug"] for agent in server.api("agent_list", admin)["agents"]}
    server.cli("agent", "put", str(file), "--slug", "first")
    server.cli("library", "pull", str(tmp_path / "pulled"))
    assert json.loads((tmp_path / "pulled/agents/first/agent.json").read_text())["env"] == {"KEY": "sesame"}
    web = {"kind": "mcp", "transport": "http", "endpoint": "http://127.0.0.1:9/", "headers": {"X": "***"}}
    for tool, field, arguments in (
        ("catalog_put", "tools/web/tool.json: headers.X: ***", {"id": "web", "definition": web}),
        ("project_create", "env.KEY: ***", {"name": "p", "env": {"KEY": "***"}}),
    ):
        with pytest.raises(ToolFailed) as failed:
            server.api(tool, admin, **arguments)
        assert failed.value.code == "invalid_argument" and field in failed.value.message, failed.value


def test_code_gets_in_and_out(server, admin, project):
    workspaces = server.api("workspace_list", admin, project_id=project)["workspaces"]
    id = workspaces[0]["workspace_id"]
    with httpx.Client(base_url=server.url, headers=bearer(admin), timeout=harness.DEADLINE) as http:
        put = http.put(f"/api/workspaces/{id}/files/src/main.txt", content=b"hello\n")
        assert put.status_code in (200, 201, 204), put.text
        assert http.get(f"/api/workspaces/{id}/files/src/main.txt").content == b"hello\n"
        for trick in ("../../../oubliette.toml", "%2e%2e/%2e%2e/oubliette.db", "src/../../x", "/etc/passwd"):
            assert http.get(f"/api/workspaces/{id}/files/{trick}").status_code in (400, 404), trick
        diff = server.api("workspace_diff", admin, workspace_id=id)
        assert "+hello" in diff["diff"]
        archive = http.get(f"/api/workspaces/{id}/archive")
        assert archive.status_code == 200 and archive.content[:2] == b"\x1f\x8b"
        assert http.delete(f"/api/workspaces/{id}/files/src/main.txt").status_code in (200, 204)
        assert http.get(f"/api/workspaces/{id}/files/src/main.txt").status_code == 404


def test_the_default_workspace_cannot_be_deleted(server, admin, project):
    default = server.api("workspace_list", admin, project_id=project)["workspaces"][0]["workspace_id"]
    with pytest.raises(ToolFailed):
        server.api("workspace_delete", admin, workspace_id=default)
    extra = server.api("workspace_create", admin, project_id=project, name="extra")["workspace_id"]
    server.api("workspace_delete", admin, workspace_id=extra)


def test_lists_are_paged(server, admin):
    for i in range(5):
        server.api("project_create", admin, name=f"paged {i}")
    seen, cursor = [], None
    while True:
        more = {"cursor": cursor} if cursor else {}
        page = server.api("project_list", admin, name_contains="paged", limit=2, **more)
        assert len(page["projects"]) <= 2
        seen += [p["name"] for p in page["projects"]]
        cursor = page.get("next_cursor")
        if not cursor:
            break
    assert sorted(seen) == [f"paged {i}" for i in range(5)]
    with pytest.raises(ToolFailed) as failed:
        server.api("project_list", admin, cursor="rubbish")
    assert failed.value.code == "invalid_argument"


# -- definitions -------------------------------------------------------------------------------------


def test_a_broken_definition_is_refused_with_field_and_reason(server, admin):
    with pytest.raises(ToolFailed) as failed:
        server.api("agent_put", admin, slug="broken", definition={"name": "x", "prompt": "y", "tools": {"use": ["Nope"]}})
    assert failed.value.code == "invalid_argument" and "tools.use[0]" in failed.value.message
    with pytest.raises(ToolFailed) as failed:
        server.api("agent_put", admin, slug="broken", definition={"name": "x", "prompt": "y", "tools": {"use": ["absent"]}})
    assert "absent" in failed.value.message
    assert not (server.home / "agents" / "broken").exists()


@pytest.mark.skipif(stores.ON_POSTGRES, reason="definitions are in the database: test_library.py")
def test_a_hand_edit_is_seen_and_a_broken_one_keeps_the_last_good(server, admin):
    folder = server.home / "agents" / "by-hand"
    folder.mkdir(parents=True)
    file = folder / "agent.json"
    file.write_text(json.dumps({"name": "First", "prompt": "p"}))

    def agent():
        try:
            return server.api("agent_get", admin, slug="by-hand")
        except ToolFailed:
            return None

    wait_until(lambda: (agent() or {}).get("definition", {}).get("name") == "First", "the new agent")
    file.write_text('{"name": "Second", "prompt"')
    broken = wait_until(lambda: agent().get("error") and agent(), "the broken edit to be told")
    assert broken["definition"]["name"] == "First"
    assert "agent.json" in broken["error"]
    file.write_text(json.dumps({"name": "Third", "prompt": "p"}))
    wait_until(lambda: agent()["definition"]["name"] == "Third", "the mended agent")
    assert not agent().get("error")


# -- the program -------------------------------------------------------------------------------------


def test_a_port_in_use_says_what_to_do():
    with running() as server:
        other = harness.Server(server.home.parent / "h2")
        done = subprocess.run(
            [harness.BIN / "oubliette", "--home", other.home, "serve", "--listen", f"127.0.0.1:{server.port}"],
            capture_output=True, text=True, timeout=harness.DEADLINE,
        )
        assert done.returncode == 1 and "--listen" in done.stderr


def test_another_than_loopback_needs_tls_or_insecure(tmp_path):
    done = subprocess.run(
        [harness.BIN / "oubliette", "--home", tmp_path / "h", "serve", "--listen", f"0.0.0.0:{harness.free_port()}"],
        capture_output=True, text=True, timeout=harness.DEADLINE,
    )
    assert done.returncode != 0 and "--insecure" in done.stderr


def test_a_damaged_database_is_told_and_left_alone(tmp_path):
    home = tmp_path / "h"
    home.mkdir()
    (home / "oubliette.db").write_bytes(b"this is not a database" * 1000)
    done = subprocess.run(
        [harness.BIN / "oubliette", "--home", home, "serve", "--listen", f"127.0.0.1:{harness.free_port()}"],
        capture_output=True, text=True, timeout=harness.DEADLINE,
    )
    assert done.returncode == 1 and "oubliette.db" in done.stderr
    assert (home / "oubliette.db").read_bytes().startswith(b"this is not")


def test_a_broken_config_names_file_and_field(tmp_path):
    home = tmp_path / "h"
    home.mkdir()
    (home / "oubliette.toml").write_text("[server]\nlissten = 'x'\n")
    done = subprocess.run([harness.BIN / "oubliette", "--home", home, "serve"], capture_output=True, text=True, timeout=harness.DEADLINE)
    assert done.returncode == 1 and "oubliette.toml" in done.stderr and "lissten" in done.stderr


def test_sigterm_exits_0():
    with running() as server:
        server.token("read")
        assert server.stop() == 0


def test_up_makes_a_home_a_token_and_a_config_to_paste(tmp_path):
    home, port = tmp_path / "home", harness.free_port()
    process = subprocess.Popen(
        [harness.BIN / "oubliette", "--home", home, "up", "--listen", f"127.0.0.1:{port}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    try:
        wait_until(lambda: up(port), "the server")
        token_file = home / "admin.token"
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        token = token_file.read_text().strip()
        answer = harness.post(f"http://127.0.0.1:{port}/api/tools/project_list", json={}, headers=bearer(token))
        assert len(answer.json()["projects"]) >= 1
        agents = harness.post(f"http://127.0.0.1:{port}/api/tools/agent_list", json={}, headers=bearer(token))
        assert len(agents.json()["agents"]) >= 1
    finally:
        process.terminate()
        output = process.communicate(timeout=harness.DEADLINE)[0]
    assert f"http://127.0.0.1:{port}" in output and "mcpServers" in output and token in output
    again = subprocess.Popen(
        [harness.BIN / "oubliette", "--home", home, "up", "--listen", f"127.0.0.1:{port}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    try:
        wait_until(lambda: up(port), "the server")
    finally:
        again.terminate()
        output = again.communicate(timeout=harness.DEADLINE)[0]
    assert "mcpServers" in output and token not in output, "the token is shown once"


def up(port: int) -> bool:
    try:
        return harness.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_commands_answer_json_and_exit_codes(server):
    wrong = server.cli("token", "create", check=False)
    assert wrong.returncode == 2
    failed = server.cli("token", "revoke", "tok_01ARZ3NDEKTSV4RRFFQ69G5FAV", "--json", check=False)
    assert failed.returncode == 1
    assert json.loads(failed.stdout or failed.stderr)["error"]["code"] == "not_found"


def test_the_server_lists_itself(server, admin, project):
    [known] = server.api("server_list", admin)["servers"]
    info = server.api("server_info", admin)
    assert known["server_id"].startswith("srv_") and known["address"] == server.url and known["version"] == info["version"]
    assert datetime.datetime.fromisoformat(known["since"]) <= datetime.datetime.fromisoformat(known["last_seen"])
    # A token that sees one project learns nothing about how busy the others are.
    server.put_agent("counted", admin, [[{"say": "hi"}]])
    server.api("session_message", admin, message="hi", project_id=project, agent="counted", wait=True)
    other = server.api("project_create", admin, name="empty")["project_id"]
    counts = [server.api("server_list", token)["servers"][0]["sessions"] for token in (admin, server.token("read", project), server.token("read", other))]
    assert counts == [known["sessions"] + 1, 1, 0]
    # At the command line.
    shown = server.cli("server", "list").stdout
    assert known["server_id"] in shown and server.url in shown
    assert server.cli_json("server", "list")["servers"][0]["server_id"] == known["server_id"]

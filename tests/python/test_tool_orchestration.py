"""tool-orchestration: every requirement and scenario, against real MCP servers over real transports."""

from __future__ import annotations

import json
import os
import pathlib
import signal

import pytest

import servers
from caller import call
from harness import ToolFailed, processes_with, running, wait_until

BUILTINS = {
    "reader": {"name": "fs_read", "allowedPaths": ["notes/"]},
    "writer": {"name": "fs_write", "allowedPaths": ["out/"]},
    "shell": {"name": "shell_exec", "allowedCommands": ["ls", "echo hello", "env"], "allowedEnv": ["COLOR"], "timeoutMs": 60000},
    "brief": {"name": "shell_exec", "allowedCommands": ["sleep"], "timeoutMs": 1000},
}


@pytest.fixture(scope="module")
def server():
    with running(servers.TRUST) as server:
        admin = server.token("admin")
        for id, policy in BUILTINS.items():
            server.put_tool(id, admin, kind="builtin", builtinPolicy=policy)
        server.put_tool("notes", admin, **servers.python_server())
        server.put_tool("everything", admin, **servers.everything())
        server.put_tool("files", admin, **servers.filesystem("/workspace"))
        yield server


def start(server, admin, project, agent, turns=None, wait=True, **definition):
    server.put_agent(agent, admin, turns or [[{"say": "ready"}]], **definition)
    return server.api("session_message", admin, message="go", project_id=project, agent=agent, wait=wait)["session_id"]


def results(server, admin, session_id):
    log = server.api("session_events", admin, session_id=session_id, max_events=1000)["events"]
    return [e for e in log if e["type"] == "tool_result"]


def debug(server, admin, session_id, *kinds):
    more = {"kinds": list(kinds)} if kinds else {}
    return server.api("debugger_events", admin, session_id=session_id, max_events=1000, **more)["events"]


def kinds_of(events):
    return [e["kind"] for e in events]


def tool(server, admin, session_id, name):
    rows = server.api("tool_list", admin, session_id=session_id)["tools"]
    return next((r for r in rows if name in (r["name"], r["canonical"])), None)


def light(server, admin, session_id, id):
    rows = server.api("tool_list", admin, session_id=session_id)["servers"]
    return next(r for r in rows if r["id"] == id)


def gate(server, token, session_id, name, **arguments):
    return server.api("tool_call", token, session_id=session_id, tool=name, arguments=arguments)


# -- Requirement: Dynamic Agent Switching ------------------------------------------------------------


def test_agent_switch_initiated(server, admin, project):
    session = start(server, admin, project, "one", tools={"use": ["notes"]})
    server.put_agent("two", admin, [[call("@reader/fs_read", path="notes/a.txt")]], tools={"use": ["reader"]})
    switched = server.api("session_switch_agent", admin, session_id=session, agent="two")
    assert switched["agent"] == "two" and switched["drained"] is True and switched["took_ms"] >= 0
    assert server.api("session_get", admin, session_id=session)["agent"] == "two"
    assert tool(server, admin, session, "@notes/add") is None
    assert tool(server, admin, session, "@reader/fs_read")["available"]
    kinds = kinds_of(debug(server, admin, session))
    order = ["switch_requested", "drain_started", "drain_finished", "teardown_started", "registry_cleared", "teardown_finished"]
    places = [kinds.index(k) for k in order]
    assert places == sorted(places)
    rest = kinds[places[-1]:]
    assert rest.index("build_started") < rest.index("memory_opened") < rest.index("build_finished")


def test_context_teardown(server, admin, project):
    session = start(server, admin, project, "one", tools={"use": ["notes"]})
    gate(server, admin, session, "@notes/add", text="x")
    server.put_agent("bare", admin, [[{"say": "bare"}]])
    server.api("session_switch_agent", admin, session_id=session, agent="bare")
    stopped = debug(server, admin, session, "tool_server_stopped")
    assert [e["server"] for e in stopped] == ["notes"]
    kinds = kinds_of(debug(server, admin, session))
    assert "registry_cleared" in kinds and "teardown_finished" in kinds
    with pytest.raises(ToolFailed) as failed:
        gate(server, admin, session, "@notes/add", text="x")
    assert failed.value.code == "not_allowed"


def test_context_build(server, admin, project):
    session = start(server, admin, project, "builder", tools={"use": ["notes", "reader"]})
    kinds = kinds_of(debug(server, admin, session))
    for kind in ("build_started", "tool_server_starting", "tool_server_ready", "tool_registered", "memory_opened", "build_finished"):
        assert kind in kinds, kind
    assert tool(server, admin, session, "@notes/add")["available"]


def test_switch_timeout(project, admin):
    with running(servers.TRUST + "[switch]\ndrain_timeout = '500ms'\n") as server:
        admin = server.token("admin")
        server.put_tool("notes", admin, **servers.python_server())
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("stuck", admin, [[{"say": "hi"}, call("@notes/slow", seconds=600)]], tools={"use": ["notes"]})
        server.put_agent("next", admin, [[{"say": "next"}]])
        session = server.api("session_message", admin, message="go", project_id=project, agent="stuck")["session_id"]
        with server.events(session, admin) as events:
            events.until("tool_call")
            switched = server.api("session_switch_agent", admin, session_id=session, agent="next")
            assert switched["drained"] is False
        assert len(debug(server, admin, session, "drain_timeout")) == 1
        assert server.api("session_message", admin, message="on", session_id=session, wait=True)["text"] == "next"


def test_a_bad_target_is_refused_and_nothing_is_torn_down(server, admin, project):
    session = start(server, admin, project, "one", tools={"use": ["notes"]})
    before = len(debug(server, admin, session, "teardown_started"))
    with pytest.raises(ToolFailed) as failed:
        server.api("session_switch_agent", admin, session_id=session, agent="no-such-agent")
    assert failed.value.code == "not_found"
    assert len(debug(server, admin, session, "teardown_started")) == before
    assert gate(server, admin, session, "@notes/add", text="still here")["isError"] is False


def test_a_target_that_cannot_start_brings_the_old_agent_back(server, admin, project):
    session = start(server, admin, project, "one", tools={"use": ["notes"]})
    server.put_agent("absent", admin, runtime={"kind": "acp", "command": ["/no/such/agent"]})
    with pytest.raises(ToolFailed) as failed:
        server.api("session_switch_agent", admin, session_id=session, agent="absent")
    assert failed.value.code == "unavailable"
    assert server.api("session_get", admin, session_id=session)["agent"] == "one"
    assert gate(server, admin, session, "@notes/add", text="back")["isError"] is False
    assert server.api("session_message", admin, message="on", session_id=session, wait=True)["text"] == "ready"


def test_switching_back_finds_the_first_agents_memory(server, admin, project):
    # The number of the script's next turn is in its memory: it continues there, not from the start.
    session = start(server, admin, project, "counter", [[{"say": "one"}], [{"say": "two"}], [{"say": "three"}]])
    server.put_agent("other", admin, [[{"say": "other first"}], [{"say": "other second"}]])
    server.api("session_switch_agent", admin, session_id=session, agent="other")
    assert server.api("session_message", admin, message="on", session_id=session, wait=True)["text"] == "other first"
    server.api("session_switch_agent", admin, session_id=session, agent="counter")
    assert server.api("session_message", admin, message="on", session_id=session, wait=True)["text"] == "two"


# -- Requirement: Tool Allow-List Enforcement --------------------------------------------------------


def test_allowed_tool_invoked(server, admin, project):
    session = start(
        server, admin, project, "allowed", [[call("@notes/add", text="hi")]], tools={"use": ["notes"], "allowed": ["@notes/add"]}
    )
    assert results(server, admin, session)[0]["ok"]
    logged = debug(server, admin, session, "tool_call")[-1]
    assert logged["canonical"] == "@notes/add" and logged["ok"] and logged["source"] == "catalog"
    assert logged["arguments"] == {"text": "hi"} and logged["duration_ms"] >= 0


def test_blocked_tool_invoked(server, admin, project):
    session = start(
        server, admin, project, "blocked",
        [[call("@notes/slow", seconds=0), call("notes_slow", seconds=0), call("@reader/fs_read", path="notes/x")]],
        tools={"use": ["notes"], "allowed": ["@notes/add"]},
    )
    for result in results(server, admin, session):
        assert not result["ok"] and "not_allowed" in json.dumps(result)
    blocked = debug(server, admin, session, "tool_blocked")
    assert [e["tool"] for e in blocked] == ["@notes/slow", "notes_slow", "@reader/fs_read"]
    assert "blocked" in json.dumps(results(server, admin, session)[0]), "the error names the agent"
    assert tool(server, admin, session, "@notes/slow")["allowed"] is False


def test_wildcard_allow_all(server, admin, project):
    session = start(server, admin, project, "wild", tools={"use": ["notes", "writer"], "allowed": ["*"]})
    for name in ("@notes/add", "@notes/slow", "@writer/fs_write"):
        assert tool(server, admin, session, name)["allowed"]


def test_denied_wins_over_every_source(server, admin, project):
    session = start(
        server, admin, project, "denied", [[call("notes_add", text="x"), call("session_message", message="x")]],
        tools={"use": ["notes"], "allowed": ["*"], "denied": ["@notes/add", "session_message"]},
    )
    assert [r["ok"] for r in results(server, admin, session)] == [False, False]


# -- Requirement: MCP Server Lifecycle ---------------------------------------------------------------


def test_stdio_mcp_server_spawned(server, admin, project):
    session = start(
        server, admin, project, "stdio",
        [[call("@notes/add", text="one"), call("everything_echo", message="hello"), call("@files/list_directory", path="/workspace")]],
        tools={"use": ["notes", "everything", "files"]},
    )
    texts = [json.dumps(r) for r in results(server, admin, session)]
    assert "noted: one" in texts[0] and "hello" in texts[1] and "notes.txt" in texts[2]
    assert {s["id"]: s["status"] for s in server.api("tool_list", admin, session_id=session)["servers"]} == {
        "notes": "green", "everything": "green", "files": "green",
    }


def test_ws_tcp_mcp_server_connected(server, admin, project):
    loop = servers.Loop()
    tcp, ws, plain = servers.Tcp(loop), servers.WebSocket(loop), servers.WebSocket(loop, None)
    server.put_tool("raw", admin, kind="mcp", transport="tcp", endpoint=f"127.0.0.1:{tcp.port}")
    server.put_tool("socket", admin, kind="mcp", transport="ws", endpoint=f"ws://127.0.0.1:{ws.port}")
    server.put_tool("plain", admin, kind="mcp", transport="ws", endpoint=f"ws://127.0.0.1:{plain.port}")
    session = start(
        server, admin, project, "wires", [[call(f"{id}_echo", text=id) for id in ("raw", "socket", "plain")]],
        tools={"use": ["raw", "socket", "plain"]},
    )
    assert [r["ok"] for r in results(server, admin, session)] == [True] * 3
    server.api("session_end", admin, session_id=session)
    wait_until(lambda: not tcp.connections and not ws.connections, "the connections to close")


def test_http_mcp_server_connected(server, admin, project):
    http = servers.Http()
    try:
        server.put_tool("web", admin, kind="mcp", transport="http", endpoint=f"http://127.0.0.1:{http.port}/mcp")
        session = start(server, admin, project, "http", [[call("web_echo", message="over http")]], tools={"use": ["web"]})
        assert "over http" in json.dumps(results(server, admin, session)[0])
    finally:
        http.close()


def test_mcp_server_fails_to_start(server, admin, project):
    server.put_tool("broken", admin, **servers.stdio("/bin/sh", ["-c", "echo cannot start >&2; exit 7"], []), restart={"maxAttempts": 0})
    server.put_tool("mute", admin, **{**servers.stdio("/bin/sleep", ["600"], []), "timeouts": {"startupMs": 300}}, restart={"maxAttempts": 0})
    session = start(server, admin, project, "partly", [[call("@notes/add", text="x")]], tools={"use": ["broken", "mute", "notes"]})
    assert results(server, admin, session)[0]["ok"], "the rest go on"
    row = light(server, admin, session, "broken")
    assert row["status"] == "red" and "cannot start" in row["error"]
    assert light(server, admin, session, "mute")["status"] == "red"
    assert "exit code 7" in row["error"] and "next_retry" not in row, "maxAttempts 0 is never"
    assert "within 300 ms" in light(server, admin, session, "mute")["error"]
    failed = {e["server"]: e for e in debug(server, admin, session, "tool_server_failed")}
    assert failed.keys() == {"broken", "mute"} and failed["broken"]["stderr"] == "cannot start"
    with pytest.raises(ToolFailed) as down:
        gate(server, admin, session, "@broken/anything")
    assert down.value.code in ("unavailable", "not_found", "not_allowed")


def test_mcp_health_check(server, admin, project):
    server.put_tool(
        "watched", admin, **servers.python_server(), healthCheck={"intervalMs": 100, "timeoutMs": 60000, "failures": 2},
    )
    session = start(server, admin, project, "watcher", tools={"use": ["watched"]})
    assert light(server, admin, session, "watched")["status"] == "green"
    with server.debugger(admin, session_id=session) as events:
        with pytest.raises(ToolFailed) as died:
            gate(server, admin, session, "@watched/die")
        assert "outcome unknown" in died.value.message
        assert events.until("health_changed", server="watched", to="red")
        events.until("health_changed", server="watched", to="green")
    assert gate(server, admin, session, "@watched/add", text="back")["isError"] is False


def test_a_killed_server_comes_back_by_itself(server, admin, project):
    session = start(server, admin, project, "crash", tools={"use": ["notes"]})
    for _ in range(3):
        with pytest.raises(ToolFailed):
            gate(server, admin, session, "@notes/die")
        wait_until(lambda: light(server, admin, session, "notes")["status"] == "green", "the server to come back")
        assert gate(server, admin, session, "@notes/add", text="x")["isError"] is False


def test_a_restart_can_be_asked_for(server, admin, project):
    session = start(server, admin, project, "again", tools={"use": ["notes"]})
    server.api("tool_server_restart", admin, session_id=session, server="notes")
    wait_until(lambda: light(server, admin, session, "notes")["status"] == "green", "the restarted server")
    assert gate(server, admin, session, "@notes/add", text="x")["isError"] is False


def test_a_servers_sandbox_holds_no_key_and_no_socket(server, admin, project):
    secret = server.token("read")
    project = server.api("project_create", admin, name="k", env={"OUBLIETTE_API_KEY": secret, "PROJECT_SECRET": "s3cr3t"})["project_id"]
    session = start(server, admin, project, "env", tools={"use": ["notes"]})
    seen = json.dumps(gate(server, admin, session, "@notes/environment"))
    assert secret not in seen and "s3cr3t" not in seen and "OUBLIETTE_SOCKET" not in seen


# -- Requirement: Tool Aliases -----------------------------------------------------------------------


def test_alias_resolved(server, admin, project):
    session = start(
        server, admin, project, "alias", [[call("note", text="a"), call("@notes/add", text="b"), call("notes_add", text="c")]],
        tools={"use": ["notes"], "aliases": {"note": "@notes/add"}},
    )
    assert [r["ok"] for r in results(server, admin, session)] == [True] * 3
    assert {e["canonical"] for e in debug(server, admin, session, "tool_call")} == {"@notes/add"}
    row = tool(server, admin, session, "@notes/add")
    assert row["name"] == "note" and "notes_add" in row["aliases"] + ["notes_add"]


def test_alias_in_allow_list(server, admin, project):
    session = start(
        server, admin, project, "alias-allowed", [[call("note", text="a"), call("@notes/add", text="b"), call("@notes/slow", seconds=0)]],
        tools={"use": ["notes"], "allowed": ["note"], "aliases": {"note": "@notes/add"}},
    )
    assert [r["ok"] for r in results(server, admin, session)] == [True, True, False]


def test_an_alias_to_nothing_is_unavailable_with_a_reason(server, admin, project):
    session = start(server, admin, project, "nowhere", tools={"use": ["notes"], "aliases": {"gone": "@notes/no_such"}})
    row = tool(server, admin, session, "gone")
    assert row["available"] is False and row["reason"]


@pytest.mark.parametrize(
    "tools, field",
    [
        ({"use": ["notes"], "aliases": {"a": "b", "b": "a"}}, "tools.aliases.a"),
        ({"use": ["notes"], "aliases": {"a": "a"}}, "tools.aliases.a"),
        ({"use": ["notes"], "aliases": {"a": "@nowhere/x"}}, "tools.aliases.a"),
        ({"use": ["notes"], "aliases": {"a": "@files/read_file"}}, "tools.aliases.a"),
        ({"use": ["notes"], "aliases": {"a": "@notes/*"}}, "tools.aliases.a"),
        ({"use": ["notes"], "aliases": {"": "@notes/add"}}, "tools.aliases."),
        ({"use": ["notes"], "aliases": {"@notes/slow": "@notes/add"}}, "tools.aliases.@notes/slow"),
        ({"use": ["notes"], "aliases": {"a" * 10000: "@notes/add"}}, "tools.aliases.aaaa"),
        ({"use": ["notes", "nowhere"]}, "tools.use[1]"),
        ({"use": ["notes", "notes"]}, "tools.use[1]"),
    ],
)
def test_an_agent_with_a_bad_alias_or_use_is_refused_by_field(server, admin, tools, field):
    server.put_agent("kept", admin, [[{"say": "kept"}]])
    with pytest.raises(ToolFailed) as failed:
        server.put_agent("kept", admin, [[{"say": "lost"}]], tools=tools)
    assert failed.value.code == "invalid_argument" and len(failed.value.message) < 400
    assert f"agents/kept/agent.json: {field}" in failed.value.message
    assert server.api("agent_get", admin, slug="kept")["definition"]["tools"]["use"] == [], "the last good one stays"


def test_two_targets_for_one_alias_are_refused_and_the_last_good_definition_stays(server, admin):
    server.put_agent("twofold", admin, [[{"say": "x"}]], tools={"use": ["notes"], "aliases": {"note": "@notes/add"}})
    path = server.home / "agents" / "twofold" / "agent.json"
    good = path.read_text()
    path.write_text(good.replace('"note": "@notes/add"', '"note": "@notes/add", "note": "@notes/slow"').replace(
        '"note":"@notes/add"', '"note":"@notes/add","note":"@notes/slow"'
    ))
    # The file may first be read half written, and refused for another reason.
    told = lambda: server.api("agent_get", admin, slug="twofold").get("error") or ""
    wait_until(lambda: "tools.aliases" in told() and "twice" in told(), "the refusal")
    assert server.api("agent_get", admin, slug="twofold")["definition"]["tools"]["aliases"] == {"note": "@notes/add"}


def test_an_alias_that_shadows_a_tool_is_told(server, admin, project):
    session = start(
        server, admin, project, "shadow",
        tools={"use": ["notes", "reader"], "aliases": {"note": "@notes/add", "notes_slow": "@notes/add", "reader_fs_read": "@notes/environment"}},
    )
    add = tool(server, admin, session, "@notes/add")
    assert add["name"] == "note" and add["aliases"] == ["notes_add"]
    assert "notes_slow means @notes/slow" in add["reason"]
    shadowed = tool(server, admin, session, "@reader/fs_read")
    assert shadowed["available"] is False and "taken by @notes/environment" in shadowed["reason"]
    gate(server, admin, session, "reader_fs_read")
    assert debug(server, admin, session, "tool_call")[-1]["canonical"] == "@notes/environment"


def test_names_that_are_nobodys_are_blocked_with_an_event(server, admin, project):
    session = start(server, admin, project, "names", tools={"use": ["notes"]})
    wanted = {
        "@reader/fs_read": "not_allowed", "reader_fs_read": "not_allowed", "@nowhere/x": "not_allowed",
        "nothing": "not_found", "n" * 10000: "not_found", "": "not_found",
    }
    for name, code in wanted.items():
        with pytest.raises(ToolFailed) as failed:
            gate(server, admin, session, name)
        assert failed.value.code == code and "names" in failed.value.message and len(failed.value.message) < 300, name[:20]
    assert len(debug(server, admin, session, "tool_blocked")) == len(wanted)


def test_odd_tools_are_shown_with_what_is_odd_and_cost_the_others_nothing(server, admin, project):
    script = str(servers.harness.ROOT / "tests" / "python" / "small_server.py")
    server.put_tool("odd", admin, **servers.stdio("/usr/bin/python3", ["-I", "-S", script, "--odd"], [str(servers.harness.ROOT / "tests")]))
    session = start(server, admin, project, "odd", tools={"use": ["odd"]})
    rows = [r for r in server.api("tool_list", admin, session_id=session)["tools"] if r.get("server") == "odd"]
    by_name = {}
    for row in rows:
        by_name.setdefault(row["canonical"], []).append(row)
    for name in ("liar", "nonsense", "deep", "wide"):
        (row,) = by_name[f"@odd/{name}"]
        assert row["available"] and row["inputSchema"] == {"type": "object"}
        assert "note: its schema is replaced by one that takes any object" in row["reason"], name
    first, second = by_name["@odd/echo"]
    assert first["available"] and not second["available"] and "lists the name twice" in second["reason"]
    (long,) = [row for row in rows if row["name"].startswith("odd_nnn")]
    assert not long["available"] and "longer than" in long["reason"] and len(json.dumps(long)) < 2000
    dotted, slashed = by_name["@odd/a.b"][0], by_name["@odd/a/b"][0]
    assert dotted["name"] == slashed["name"] == "odd_a_b"
    assert dotted["available"] and not slashed["available"] and "taken by @odd/a.b" in slashed["reason"]
    for name in ("echo", "liar", "deep", "wide", "a.b"):
        assert gate(server, admin, session, f"@odd/{name}", x=1)["isError"] is False


def test_denied_lent_tools_are_not_announced(server, admin, project):
    server.put_agent("unlent", admin, [[call("myapp_keep"), call("myapp_drop")]], tools={"denied": ["myapp_drop"]})
    context = {"caller_id": "myapp", "caller_tools": [{"name": "keep"}, {"name": "drop"}]}
    done = server.api("session_message", admin, message="go", project_id=project, agent="unlent", context=context)["session_id"]
    with server.events(done, admin, caller_id="myapp") as events:
        asked = events.until("caller_tool_request")
        assert asked["tool"] == "keep"
        server.api("caller_tool_response", admin, session_id=done, request_id=asked["request_id"], result=1)
        events.until("turn_completed")
    kept, dropped = results(server, admin, done)
    assert kept["ok"] and not dropped["ok"] and "not_allowed" in json.dumps(dropped)
    rows = {r["name"]: r["allowed"] for r in server.api("tool_list", admin, session_id=done)["tools"] if r["source"] == "caller"}
    assert rows == {"myapp_keep": True, "myapp_drop": False}


# -- Requirement: Built-In Tool Registration ---------------------------------------------------------


def workspace_of(server, admin, session):
    got = server.api("session_get", admin, session_id=session)
    return server.home / "projects" / got["project_id"] / "workspaces" / got["workspace_id"]


def test_fs_read_tool_registered(server, admin, project):
    session = start(server, admin, project, "reads", tools={"use": ["reader"]})
    root = workspace_of(server, admin, session)
    (root / "notes").mkdir()
    (root / "notes" / "a.txt").write_text("inside")
    (root / "secret.txt").write_text("outside")
    (root / "notes" / "link").symlink_to("../secret.txt")
    (root / "notes" / "abs").symlink_to("/etc/passwd")
    os.link(root / "secret.txt", root / "notes" / "hard")
    assert "inside" in json.dumps(gate(server, admin, session, "@reader/fs_read", path="notes/a.txt"))
    assert "inside" in json.dumps(gate(server, admin, session, "@reader/fs_read", path="/workspace/notes/a.txt"))
    for path in ("secret.txt", "notes/../secret.txt", "notes/link", "notes/abs", "notes/hard", "/etc/passwd", "notes/../../x", "/proc/self/environ"):
        with pytest.raises(ToolFailed):
            refused(gate(server, admin, session, "@reader/fs_read", path=path))


def refused(result):
    """Raises for a result with `isError`, so that the tool's own refusals count like the gate's."""
    if result["isError"]:
        raise ToolFailed("tool_error", json.dumps(result))
    return result


def test_fs_write_tool_registered(server, admin, project):
    session = start(server, admin, project, "writes", tools={"use": ["writer"]})
    root = workspace_of(server, admin, session)
    refused(gate(server, admin, session, "@writer/fs_write", path="out/deep/a.txt", content="made"))
    assert (root / "out" / "deep" / "a.txt").read_text() == "made"
    refused(gate(server, admin, session, "@writer/fs_write", path="out/deep/a.txt", content=" more", mode="append"))
    assert (root / "out" / "deep" / "a.txt").read_text() == "made more"
    (root / "out" / "way-out").symlink_to("..")
    for path in ("a.txt", "out/../a.txt", "/etc/x", "out/way-out/a.txt", "../a.txt"):
        with pytest.raises(ToolFailed):
            refused(gate(server, admin, session, "@writer/fs_write", path=path, content="x"))
    with pytest.raises(ToolFailed):
        refused(gate(server, admin, session, "@writer/fs_write", path="out/deep/a.txt", content="x", mode="create"))
    assert not (root / "a.txt").exists()


def test_shell_exec_tool_registered(server, admin, project):
    session = start(server, admin, project, "runs", tools={"use": ["shell", "brief"]})
    assert "hello" in json.dumps(refused(gate(server, admin, session, "@shell/shell_exec", argv=["echo", "hello"])))
    assert "COLOR=red" in json.dumps(refused(gate(server, admin, session, "@shell/shell_exec", argv=["env"], env={"COLOR": "red"})))
    for argv in (["echo", "goodbye"], ["cat", "x"], ["ls; id"], ["/bin/ls"], ["echo"], []):
        with pytest.raises(ToolFailed):
            refused(gate(server, admin, session, "@shell/shell_exec", argv=argv))
    with pytest.raises(ToolFailed):
        refused(gate(server, admin, session, "@shell/shell_exec", argv=["env"], env={"LD_PRELOAD": "x"}))
    with pytest.raises(ToolFailed) as slow:
        refused(gate(server, admin, session, "@brief/shell_exec", argv=["sleep", "600"]))
    assert "timeout" in slow.value.code + slow.value.message
    assert "; id" in json.dumps(refused(gate(server, admin, session, "@shell/shell_exec", argv=["echo", "hello", "; id"])))


# -- Requirement: Tool Discovery ---------------------------------------------------------------------


def test_mcp_capabilities_discovered(server, admin, project):
    session = start(server, admin, project, "discover", tools={"use": ["everything", "files"]})
    names = {r["canonical"] for r in server.api("tool_list", admin, session_id=session)["tools"]}
    assert {"@everything/echo", "@files/read_text_file", "@files/list_directory"} <= names
    registered = {e["canonical"] for e in debug(server, admin, session, "tool_registered")}
    assert names - {"session_message", "session_events", "project_list"} <= registered


def test_tool_metadata_exposed(server, admin, project):
    session = start(server, admin, project, "metadata", tools={"use": ["notes"]})
    row = tool(server, admin, session, "@notes/add")
    assert row["description"] == "Adds a note to the workspace."
    assert row["inputSchema"]["properties"]["text"]["type"] == "string"
    assert row["name"] == "notes_add" and row["source"] == "catalog" and row["server"] == "notes"
    by_agent = server.api("tool_list", admin, agent="metadata")
    assert {s["id"] for s in by_agent["servers"]} == {"notes"}


# -- hot reload --------------------------------------------------------------------------------------


def test_a_changed_tool_json_rebuilds_just_that_server(server, admin, project):
    server.put_tool("fresh", admin, **servers.python_server())
    session = start(server, admin, project, "hot", tools={"use": ["fresh", "notes"]})
    with server.debugger(admin, session_id=session, since=debug(server, admin, session)[-1]["index"]) as events:
        server.put_tool("fresh", admin, **servers.python_server(env={"CHANGED": "yes"}))
        events.until("tool_server_ready", server="fresh")
        assert not [e for e in events.seen if e.get("server") == "notes"]
    assert "CHANGED" in json.dumps(gate(server, admin, session, "@fresh/environment"))


# -- Edits while a session runs ----------------------------------------------------------------------


def since_of(server, admin, session_id, name="notes"):
    return [r["since"] for r in server.api("tool_list", admin, session_id=session_id)["servers"] if r["id"] == name]


def test_an_edited_allow_list_takes_effect_in_a_running_session(server, admin, project):
    session = start(server, admin, project, "edited", tools={"use": ["notes", "reader"], "allowed": ["@notes/add"]})
    with pytest.raises(ToolFailed, match="not_allowed"):
        gate(server, admin, session, "@notes/environment")
    since = since_of(server, admin, session)
    server.put_agent("edited", admin, [[{"say": "ready"}]], tools={"use": ["notes", "reader"], "allowed": ["@notes/environment"]})
    wait_until(lambda: tool(server, admin, session, "@notes/environment")["allowed"], "the edit in the running session")
    assert not tool(server, admin, session, "@notes/add")["allowed"]
    assert not gate(server, admin, session, "@notes/environment")["isError"]
    with pytest.raises(ToolFailed, match="not_allowed"):
        gate(server, admin, session, "@notes/add", text="x")
    assert since_of(server, admin, session) == since, "an edit of the rules touches no server"
    assert "teardown_started" not in kinds_of(debug(server, admin, session))


def test_an_edited_use_starts_and_stops_only_what_it_names(server, admin, project):
    session = start(server, admin, project, "user", tools={"use": ["notes", "files"]})
    since = since_of(server, admin, session)
    path = server.home / "agents" / "user" / "agent.json"
    definition = json.loads(path.read_text())
    definition["tools"] = {"use": ["notes", "everything"]}
    path.write_text(json.dumps(definition))
    ids = lambda: [r["id"] for r in server.api("tool_list", admin, session_id=session)["servers"] if r["status"] == "green"]
    wait_until(lambda: ids() == ["notes", "everything"], "the new server beside the old one")
    assert since_of(server, admin, session) == since
    # Removed servers are stopped while added ones start.
    stopped = wait_until(lambda: debug(server, admin, session, "tool_server_stopped"), "the old one to stop")
    assert [e["server"] for e in stopped] == ["files"]
    assert not gate(server, admin, session, "@everything/echo", message="hi")["isError"]

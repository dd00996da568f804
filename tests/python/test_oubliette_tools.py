"""oubliette-tools: every requirement and scenario, agent → oubliette-client → socket → server → action."""

from __future__ import annotations

import contextlib
import json
import pathlib

import httpx
import pytest

import harness
from caller import call
from harness import ToolFailed, processes_with, wait_until
from test_caller_tool_relay import Socket



def session_with(server, admin, script, env=None, api_key=None, name="keyed"):
    """Starts a session in a project whose environment has the key; returns project, session and tool results."""
    project = server.api("project_create", admin, name=name, env=env or {}, **({"api_key": api_key} if api_key else {}))
    server.put_agent("keyed", admin, [script])
    done = server.api("session_message", admin, message="go", project_id=project["project_id"], agent="keyed", wait=True)
    log = server.api("session_events", admin, session_id=done["session_id"], max_events=1000)["events"]
    results = [e for e in log if e["type"] == "tool_result"]
    return project["project_id"], done["session_id"], results


async def discover(server, admin, session_id, key):
    path = server.api("session_get", admin, session_id=session_id)["relay_socket"]
    socket = await Socket.open(path)
    id = await socket.request("oubliette_tools", api_key=key)
    return await socket.answer(id)


@pytest.fixture(scope="module")
def session(server, admin):
    return session_with(server, admin, [{"say": "here"}])[1]


# -- Requirement: Tool Discovery via Socket ----------------------------------------------------------


async def test_valid_admin_api_key_discovers_all_tools(server, admin, session):
    tools = {t["name"]: t for t in (await discover(server, admin, session, admin))["result"]["tools"]}
    assert {"project_create", "session_list", "token_create", "agent_put", "audit_list"} <= tools.keys()
    async with server.mcp(admin) as mcp:
        outside = await mcp.tools()
    assert tools.keys() == outside.keys()
    for name, tool in tools.items():
        assert tool["inputSchema"] == outside[name].input_schema


async def test_valid_read_only_api_key_discovers_limited_tools(server, admin, session):
    names = {t["name"] for t in (await discover(server, admin, session, server.token("read")))["result"]["tools"]}
    assert {"project_list", "project_get", "session_list"} <= names
    assert not {"project_create", "token_create", "session_message", "agent_put"} & names


async def test_invalid_api_key_fails_discovery(server, admin, session):
    error = (await discover(server, admin, session, "oub_nonsense"))["error"]
    assert error["code"] == -32001 and error["data"]["code"] == "unauthenticated"
    # The client continues without them.
    _, _, results = session_with(
        server, admin, [call("project_list"), call("oubliette_project_list")], env={"OUBLIETTE_API_KEY": "oub_nonsense"}
    )
    assert [r["ok"] for r in results] == [True, False]


# -- Requirement: Tool Execution via Socket ----------------------------------------------------------


async def test_droid_calls_project_list_with_valid_key(server, admin):
    key = server.token("read")
    project, _, results = session_with(server, admin, [call("oubliette_project_list")], env={"OUBLIETTE_API_KEY": key})
    assert results[0]["ok"] and project in json.dumps(results[0])


async def test_droid_calls_project_create_with_write_key(server, admin):
    key = server.token("write")
    _, _, results = session_with(
        server, admin, [call("oubliette_project_create", name="test-project")], env={"OUBLIETTE_API_KEY": key}
    )
    assert results[0]["ok"]
    made = server.api("project_list", admin, name_contains="test-project")["projects"]
    assert len(made) == 1 and made[0]["project_id"] in json.dumps(results[0])


async def test_droid_calls_token_create_with_insufficient_scope(server, admin):
    key = server.token("write")
    before = len(server.api("token_list", admin)["tokens"])
    _, session_id, results = session_with(
        server, admin, [call("oubliette_token_create", name="up", scope="admin")], env={"OUBLIETTE_API_KEY": key}
    )
    assert not results[0]["ok"] and "permission_denied" in json.dumps(results[0])
    assert len(server.api("token_list", admin)["tokens"]) == before
    path = server.api("session_get", admin, session_id=session_id)["relay_socket"]
    socket = await Socket.open(path)
    id = await socket.request("oubliette_call_tool", tool="token_create", arguments={"name": "x", "scope": "read"}, api_key=key)
    assert (await socket.answer(id))["error"]["code"] == -32002


async def test_tool_call_with_expired_key_fails(server, admin):
    made = server.api("token_create", admin, name="short", scope="write")
    project = server.api("project_create", admin, name="short", env={"OUBLIETTE_API_KEY": made["token"]})["project_id"]
    server.put_agent("twice", admin, [[call("oubliette_project_list")], [call("oubliette_project_list")]])
    first = server.api("session_message", admin, message="go", project_id=project, agent="twice", wait=True)
    server.api("token_revoke", admin, token_id=made["token_id"])
    server.api("session_message", admin, message="go", session_id=first["session_id"], wait=True)
    log = server.api("session_events", admin, session_id=first["session_id"], max_events=1000)["events"]
    good, bad = [e for e in log if e["type"] == "tool_result"]
    assert good["ok"] and not bad["ok"] and "unauthenticated" in json.dumps(bad)


# -- Requirement: Tool Naming Convention -------------------------------------------------------------


async def test_tools_use_oubliette_prefix(server, admin):
    key = server.token("write")
    _, _, results = session_with(
        server, admin, [call("oubliette_project_get", project_id="x"), call("project_get", project_id="x")],
        env={"OUBLIETTE_API_KEY": key},
    )
    prefixed, bare = (json.dumps(r) for r in results)
    assert "invalid_argument" in prefixed or "not_found" in prefixed
    assert "project id" in prefixed, "the prefixed name reached the action"
    assert "project id" not in bare


# -- Requirement: No API Key, No Tools ---------------------------------------------------------------


async def test_missing_api_key_skips_tool_registration(server, admin):
    _, session_id, results = session_with(server, admin, [call("oubliette_project_list"), call("project_list")])
    assert [r["ok"] for r in results] == [False, True]
    rows = server.api("tool_list", admin, session_id=session_id)["tools"]
    assert not [r for r in rows if r["name"].startswith("oubliette_")]
    assert {r["name"] for r in rows if r["source"] == "base"} == {"session_message", "session_events", "project_list"}


# -- keys --------------------------------------------------------------------------------------------


async def test_a_minted_key_lives_only_as_long_as_its_session(server, admin):
    project, session_id, results = session_with(
        server, admin, [call("oubliette_project_list"), call("oubliette_project_create", name="elsewhere")],
        api_key={"scope": "write"},
    )
    assert results[0]["ok"], results[0]
    assert not results[1]["ok"], "a key bound to its project cannot make another"
    minted = [t for t in server.api("token_list", admin)["tokens"] if t.get("session_id") == session_id]
    assert len(minted) == 1 and minted[0]["project_id"] == project
    server.api("session_end", admin, session_id=session_id)
    assert not [t for t in server.api("token_list", admin)["tokens"] if t.get("session_id") == session_id and not t.get("revoked_at")]


async def test_a_workspace_key_overrides_the_projects(server, admin):
    project = server.api("project_create", admin, name="o", env={"OUBLIETTE_API_KEY": server.token("read")})["project_id"]
    workspace = server.api("workspace_create", admin, project_id=project, name="w", env={"OUBLIETTE_API_KEY": server.token("write")})
    server.put_agent("keyed", admin, [[call("oubliette_project_create", name="made-by-workspace-key")]])
    done = server.api(
        "session_message", admin, message="go", project_id=project, agent="keyed", workspace_id=workspace["workspace_id"], wait=True
    )
    assert server.api("project_list", admin, name_contains="made-by-workspace-key")["projects"], done


async def test_the_key_is_never_shown(server, admin):
    key = server.token("write")
    project, session_id, _ = session_with(server, admin, [call("oubliette_project_list")], env={"OUBLIETTE_API_KEY": key})
    shown = [
        server.api("project_get", admin, project_id=project),
        server.api("session_get", admin, session_id=session_id),
        server.api("session_events", admin, session_id=session_id, max_events=1000),
        server.api("debugger_events", admin, session_id=session_id, max_events=1000),
        server.api("audit_list", admin),
    ]
    assert key not in json.dumps(shown) and key not in server.log()


# -- no way up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tool, arguments",
    [
        ("project_create", {"name": "x", "sandbox": {"driver": "local"}}),
        ("project_create", {"name": "x", "sandbox": {"image": "y"}}),
        ("project_create", {"name": "x", "sandbox": {"network": "host"}}),
        ("agent_put", {"slug": "keyed", "definition": {"name": "x", "prompt": "y"}}),
        ("session_switch_agent", {"session_id": "SELF", "agent": "keyed"}),
    ],
)
async def test_from_inside_nothing_widens_a_session(server, admin, tool, arguments):
    _, session_id, _ = session_with(server, admin, [{"say": "hi"}])
    arguments = {k: session_id if v == "SELF" else v for k, v in arguments.items()}
    path = server.api("session_get", admin, session_id=session_id)["relay_socket"]
    socket = await Socket.open(path)
    id = await socket.request("oubliette_call_tool", tool=tool, arguments=arguments, api_key=admin)
    assert (await socket.answer(id))["error"]["data"]["code"] == "permission_denied"


async def relay(server, admin, session_id, method, **params):
    """One request on a session's relay socket."""
    socket = await Socket.open(server.api("session_get", admin, session_id=session_id)["relay_socket"])
    return await socket.answer(await socket.request(method, **params))


def keys():
    """The keys given to agents, read from their environments, which only the host's owner can do."""
    for pid in processes_with("OUBLIETTE_API_KEY=oub_"):
        with contextlib.suppress(OSError):
            values = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            found = dict(value.split("=", 1) for value in values if "=" in value)
            if key := found.get("OUBLIETTE_API_KEY"):
                yield key


async def test_nothing_a_minted_key_makes_outlives_its_session(server, admin):
    project, session_id, _ = session_with(server, admin, [{"say": "hi"}], api_key={"scope": "admin"}, name="minted")
    listed = lambda: [t for t in server.api("token_list", admin)["tokens"] if t.get("session_id") == session_id]
    assert [t["project_id"] for t in listed()] == [project]
    works = lambda token: token and len(server.api("project_list", token)["projects"]) == 1
    key = next(k for k in keys() if try_or_none(lambda: works(k)))
    made = await relay(
        server, admin, session_id, "oubliette_call_tool", tool="token_create", api_key=key,
        arguments={"name": "longer", "scope": "admin", "project_id": project},
    )
    made = made["result"]["token"]
    assert works(made) and len(listed()) == 2
    for scope in ({"scope": "read"}, {"scope": "read", "project_id": server.api("project_create", admin, name="x")["project_id"]}):
        wider = await relay(
            server, admin, session_id, "oubliette_call_tool", tool="token_create", api_key=key, arguments={"name": "w", **scope}
        )
        assert wider["error"]["data"]["code"] in ("permission_denied", "not_found")
    server.api("session_end", admin, session_id=session_id)
    for token in (key, made):
        with pytest.raises(ToolFailed) as dead:
            server.api("project_list", token)
        assert dead.value.code == "unauthenticated"
    assert not listed()


def try_or_none(work):
    with contextlib.suppress(ToolFailed):
        return work()
    return None


async def test_a_key_revoked_between_discovery_and_call_fails_the_call(server, admin, session):
    made = server.api("token_create", admin, name="short", scope="read")
    found = await relay(server, admin, session, "oubliette_tools", api_key=made["token"])
    assert "project_list" in {t["name"] for t in found["result"]["tools"]}
    server.api("token_revoke", admin, token_id=made["token_id"])
    late = await relay(server, admin, session, "oubliette_call_tool", tool="project_list", arguments={}, api_key=made["token"])
    assert late["error"]["code"] == -32001 and late["error"]["data"]["code"] == "unauthenticated"


async def test_a_key_that_expires_between_discovery_and_call_fails_the_call(server, admin, session):
    # Long enough to be used before it expires on a busy machine.
    made = server.api("token_create", admin, name="brief", scope="read", expires_in="10s")
    found = await relay(server, admin, session, "oubliette_tools", api_key=made["token"])
    assert found["result"]["tools"]
    def dead():
        try:
            server.api("project_list", made["token"])
        except ToolFailed as failed:
            return failed.code == "unauthenticated"
    wait_until(dead, "the key to expire")
    late = await relay(server, admin, session, "oubliette_call_tool", tool="project_list", arguments={}, api_key=made["token"])
    assert late["error"]["code"] == -32001


async def test_recursion_through_the_key_counts_against_the_same_depth(server, admin):
    project = server.api("project_create", admin, name="deep", limits={"max_depth": 1})["project_id"]
    server.put_agent("deep", admin, [[{"say": "hi"}]])
    top = server.api("session_message", admin, message="go", project_id=project, agent="deep", wait=True)["session_id"]
    ask = {"message": "down", "project_id": project, "wait": True}
    below = await relay(server, admin, top, "oubliette_call_tool", tool="session_message", arguments=ask, api_key=admin)
    below = below["result"]["session_id"]
    row = server.api("session_get", admin, session_id=below)
    assert row["depth"] == 1 and row["parent_id"] == top
    # Neither the base tool nor the key can go deeper, nor can another project, whatever its own limit.
    wide = server.api("project_create", admin, name="wide", limits={"max_depth": 50})["project_id"]
    tries = [
        await relay(server, admin, below, "session_message", message="deeper"),
        await relay(server, admin, below, "oubliette_call_tool", tool="session_message", arguments=ask, api_key=admin),
        await relay(
            server, admin, below, "oubliette_call_tool", tool="session_message", arguments={**ask, "project_id": wide}, api_key=admin
        ),
    ]
    assert [t["error"]["data"]["code"] for t in tries] == ["limit_exceeded"] * 3
    assert not server.api("session_list", admin, project_id=wide)["sessions"]


async def test_a_child_in_another_project_is_held_to_its_parents_limits(server, admin):
    small = server.api("project_create", admin, name="small", sandbox={"pids": 77})["project_id"]
    large = server.api("project_create", admin, name="large", sandbox={"pids": 500})["project_id"]
    server.put_tool("limits", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["sh -c"], "timeoutMs": 60000})
    server.put_agent("bounded", admin, [[{"say": "hi"}]], tools={"use": ["limits"]})
    # A shell that cannot start one more process exits.
    line = "i=0; while [ $i -lt 120 ]; do sleep 600 >/dev/null 2>&1 & i=$((i+1)); done; echo made them all"

    def makes_120(session_id):
        arguments = {"argv": ["sh", "-c", line]}
        result = server.api("tool_call", admin, session_id=session_id, tool="@limits/shell_exec", arguments=arguments)
        return "made them all" in json.dumps(result)

    top = server.api("session_message", admin, message="go", project_id=small, agent="bounded", wait=True)["session_id"]
    ask = {"message": "go", "project_id": large, "wait": True}
    made = await relay(server, admin, top, "oubliette_call_tool", tool="session_message", arguments=ask, api_key=admin)
    free = server.api("session_message", admin, message="go", project_id=large, agent="bounded", wait=True)["session_id"]
    assert makes_120(free), "the project alone allows them"
    assert not makes_120(made["result"]["session_id"])


@pytest.mark.parametrize("pattern", ["oubliette_project_list", "oubliette_*", "*"])
async def test_denied_governs_oubliette_tools_by_their_listed_name(server, admin, pattern):
    key = server.token("read")
    project = server.api("project_create", admin, name="d", env={"OUBLIETTE_API_KEY": key})["project_id"]
    server.put_agent("forbidden", admin, [[call("oubliette_project_list")]], tools={"denied": [pattern]})
    done = server.api("session_message", admin, message="go", project_id=project, agent="forbidden", wait=True)["session_id"]
    log = server.api("session_events", admin, session_id=done, max_events=1000)["events"]
    result = next(e for e in log if e["type"] == "tool_result")
    assert not result["ok"] and "not_allowed" in json.dumps(result)
    found = await relay(server, admin, done, "oubliette_tools", api_key=key)
    assert "project_list" not in {t["name"] for t in found["result"]["tools"]}
    blocked = server.api("debugger_events", admin, session_id=done, kinds=["tool_blocked"])["events"]
    assert [e["tool"] for e in blocked] == ["project_list"] or "project_list" in blocked[0]["tool"]


async def test_a_denied_base_tool_is_not_allowed_and_its_namesake_by_key_is_another_tool(server, admin):
    key = server.token("read")
    project = server.api("project_create", admin, name="n", env={"OUBLIETTE_API_KEY": key})["project_id"]
    server.put_agent("nobase", admin, [[call("project_list"), call("oubliette_project_list")]], tools={"denied": ["project_list"]})
    done = server.api("session_message", admin, message="go", project_id=project, agent="nobase", wait=True)["session_id"]
    log = server.api("session_events", admin, session_id=done, max_events=1000)["events"]
    base, own = [e for e in log if e["type"] == "tool_result"]
    assert not base["ok"] and "not_allowed" in json.dumps(base) and "nobase" in json.dumps(base)
    assert own["ok"]


async def test_env_values_and_new_tokens_are_in_no_record(server, admin):
    key = server.token("admin")
    script = [
        call("oubliette_project_create", name="masked", env={"OUBLIETTE_API_KEY": key, "DATABASE": "sesame-street"}),
        call("oubliette_token_create", name="new", scope="read"),
        {"say": f"my key is {key}"},
    ]
    _, session_id, results = session_with(server, admin, script, env={"OUBLIETTE_API_KEY": key, "OTHER": "poppy-seed"})
    made = results[1]["result"]["structuredContent"]["token"]
    log = server.api("session_events", admin, session_id=session_id, max_events=1000)
    assert key not in json.dumps(log), "its own key is nobody's to read"
    seen = [
        server.api("debugger_events", admin, session_id=session_id, max_events=1000),
        server.api("audit_list", admin, limit=1000),
        server.api("project_list", admin),
        server.log(),
    ]
    for secret in (key, made, "sesame-street", "poppy-seed"):
        assert secret not in json.dumps(seen), secret[:8]
    for refused in ({"env": {"A": 5, "B": "sesame-street"}}, {"env": {"B D": "sesame-street"}}, {"env": {"B": "sesame-street\0"}}):
        with pytest.raises(ToolFailed) as failed:
            server.api("project_create", admin, name="x", **refused)
        assert failed.value.code == "invalid_argument" and "sesame" not in failed.value.message


async def test_tool_call_never_lends_the_sessions_key(server, admin):
    _, session_id, _ = session_with(server, admin, [{"say": "hi"}], env={"OUBLIETTE_API_KEY": admin})
    write = server.token("write")
    with pytest.raises(ToolFailed) as failed:
        server.api("tool_call", write, session_id=session_id, tool="oubliette_token_create", arguments={"name": "x", "scope": "admin"})
    assert failed.value.code == "permission_denied"


async def test_every_change_is_in_the_audit_log(server, admin):
    key = server.token("write")
    _, session_id, _ = session_with(server, admin, [call("oubliette_project_create", name="audited")], env={"OUBLIETTE_API_KEY": key})
    entries = server.api("audit_list", admin, limit=1000)["entries"]
    made = [e for e in entries if e["action"] == "project_create" and e.get("session_id") == session_id]
    assert len(made) == 1 and made[0]["outcome"] == "ok" and made[0]["token_id"].startswith("tok_")
    with pytest.raises(ToolFailed):
        server.api("audit_list", key)
    assert server.cli_json("audit")["entries"]


async def test_files_logins_and_tool_calls_are_in_the_audit_log(server, admin):
    token = server.api("token_create", admin, name="auditor", scope="write")
    _, session_id, _ = session_with(server, admin, [{"say": "hi"}], name="audit-more")
    row = server.api("session_get", admin, session_id=session_id)
    url, bearer = f"{server.url}/api/workspaces/{row['workspace_id']}/files/a.txt", {"Authorization": f"Bearer {token['token']}"}
    assert harness.put(url, content=b"x", headers=bearer).status_code == 200
    assert harness.delete(url, headers=bearer).status_code == 200
    server.api("tool_call", token["token"], session_id=session_id, tool="project_list", arguments={})
    with httpx.Client(base_url=server.url, timeout=harness.DEADLINE) as browser:
        assert browser.post("/api/login", json={"token": token["token"]}).status_code == 200
        assert browser.post("/api/logout").status_code == 200
        assert browser.post("/api/login", json={"token": "oub_nonsense"}).status_code == 401
    # Frequent entries are written shortly after the answer is sent.
    entries = lambda: [e for e in server.api("audit_list", admin, limit=200)["entries"] if e.get("token_id") == token["token_id"]]
    wanted = {"workspace_file_put", "workspace_file_delete", "tool_call", "login", "logout"}
    wait_until(lambda: wanted <= {e["action"] for e in entries()}, "the entries")
    assert {e["project_id"] for e in entries() if e["action"] == "tool_call"} == {row["project_id"]}
    logins = lambda: [e for e in server.api("audit_list", admin, limit=200)["entries"] if e["action"] == "login"]
    refused = wait_until(lambda: [e for e in logins() if e["outcome"] != "ok"], "the refused login")
    assert refused[0]["outcome"] == "unauthenticated" and "nonsense" not in json.dumps(refused)
    assert refused[0]["principal"] == "anonymous" and "token_id" not in refused[0]

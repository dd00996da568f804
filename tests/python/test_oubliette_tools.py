"""oubliette-tools: every requirement and scenario, agent → oubliette-client → socket → server → action."""

from __future__ import annotations

import json

import pytest

from caller import call
from harness import ToolFailed, wait_until
from test_caller_tool_relay import Socket




def session_with(server, admin, script, env=None, api_key=None, name="keyed"):
    """A session of an agent in a project whose environment holds the key; its tool results."""
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
    # And the client goes on without them.
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

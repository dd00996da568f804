"""A token does what its scope and project allow and nothing else, at whatever endpoint it is tried; a caller is only itself."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any, Callable

import pytest

import harness
from attack_support import refusal
from harness import Server, ToolFailed, running
from wire import LegacyMcp, ModernMcp, Relay, Request, call_tool

SECRET = "environment-value-2c7e"


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def place(server, admin):
    """A project with a session, and another project with one, whose token is the attacker's."""
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    made = server.api("project_create", admin, name="guarded", env={"VALUE": SECRET}, api_key={"scope": "admin"})
    project = made["project_id"]
    started = server.api("session_message", admin, message="go", project_id=project, agent="quiet", wait=True)
    session = server.api("session_get", admin, session_id=started["session_id"])
    workspace = server.api("workspace_create", admin, project_id=project, name="second")["workspace_id"]
    files = f"{server.url}/api/workspaces/{session['workspace_id']}/files"
    assert harness.put(f"{files}/kept", content=b"kept", headers=bearer(admin)).status_code == 200
    token = server.api("token_create", admin, name="acted on", scope="read", project_id=project)
    elsewhere = server.api("project_create", admin, name="elsewhere")["project_id"]
    return SimpleNamespace(
        project=project,
        session=session["session_id"],
        relay=session["relay_socket"],
        workspace=workspace,
        files=files,
        archive=files.removesuffix("files") + "archive",
        token=token["token_id"],
        elsewhere=elsewhere,
        read=server.token("read"),
        write=server.token("write"),
        other=server.token("write"),
        foreign=server.token("write", elsewhere),
        foreign_admin=server.token("admin", elsewhere),
    )


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


Arguments = Callable[[Any], dict[str, Any]]

NEEDS_MORE_THAN_READ: dict[str, Arguments] = {
    "project_create": lambda p: {"name": "made by a read token"},
    "project_update": lambda p: {"project_id": p.project, "name": "taken over"},
    "project_delete": lambda p: {"project_id": p.elsewhere},
    "workspace_create": lambda p: {"project_id": p.project, "name": "made"},
    "workspace_delete": lambda p: {"workspace_id": p.workspace},
    "session_message": lambda p: {"message": "go", "session_id": p.session},
    "session_cancel": lambda p: {"session_id": p.session},
    "session_queue_remove": lambda p: {"session_id": p.session, "turn": 99},
    "tool_explain": lambda p: {"agent": "quiet"},
    "catalog_test": lambda p: {"id": "reader"},
    "session_end": lambda p: {"session_id": p.session},
    "session_delete": lambda p: {"session_id": p.session},
    "session_switch_agent": lambda p: {"session_id": p.session, "agent": "quiet"},
    "caller_tool_response": lambda p: {"session_id": p.session, "request_id": "x", "result": 1},
    "tool_call": lambda p: {"session_id": p.session, "tool": "project_list", "arguments": {}},
    "tool_server_restart": lambda p: {"session_id": p.session, "server": "any"},
    "agent_put": lambda p: {"slug": "made", "definition": {"name": "made", "prompt": "p"}},
    "agent_delete": lambda p: {"slug": "quiet"},
    "catalog_put": lambda p: {"id": "made", "definition": {"id": "made", "kind": "mcp", "transport": "stdio", "command": "x"}},
    "catalog_delete": lambda p: {"id": "reader"},
    "token_create": lambda p: {"name": "more", "scope": "admin"},
    "token_list": lambda p: {},
    "token_revoke": lambda p: {"token_id": p.token},
    "audit_list": lambda p: {},
    "doctor": lambda p: {},
    "approval_decide": lambda p: {"approval_id": "appr_01M7GGQJQQAM2YCR1XDSFEHMR3", "decision": "allow"},
    "program_install": lambda p: {"package": "npm:left-pad@1.3.0"},
    "program_remove": lambda p: {"program_id": "npm-nothing-1.0.0-00000000"},
    "tool_add": lambda p: {"command": ["some-server"], "id": "added"},
    "library_list": lambda p: {},
    "library_read": lambda p: {"kind": "agent", "id": "nobody"},
    "library_push": lambda p: {"puts": []},
}


def test_every_action_a_read_token_may_not_perform_is_tried(server, admin, place):
    """An action that is new gets a row here before its scope is trusted."""

    def listed(token: str) -> set[str]:
        with ModernMcp(server, token).request("tools/list", None, {}) as request:
            return {tool["name"] for tool in request.json()["result"]["tools"]}

    assert listed(admin) - listed(place.read) == NEEDS_MORE_THAN_READ.keys()


@functools.cache
def login(url: str, token: str) -> str:
    answer = harness.post(f"{url}/api/login", json={"token": token})
    return answer.headers["Set-Cookie"].split(";")[0]


def by_cookie(server: Server, token: str, tool: str, arguments: dict) -> Any:
    return call_tool(server, None, tool, arguments, X_Oubliette="1", Cookie=login(server.url, token))


def over_relay(path: str, token: str, tool: str, arguments: dict) -> Any:
    with Relay(path) as relay:
        answer = relay.call("oubliette_call_tool", tool=tool, arguments=arguments, api_key=token)
    if "error" in answer:
        raise ToolFailed(answer["error"]["data"]["code"], answer["error"]["message"])
    return answer["result"]


def caller_at(door: str, server: Server, place: Any, token: str) -> Callable[[str, dict], Any]:
    """How a tool is called at a door with this token."""
    return {
        "rest": lambda tool, arguments: call_tool(server, token, tool, arguments),
        "cookie": lambda tool, arguments: by_cookie(server, token, tool, arguments),
        "mcp_legacy": lambda tool, arguments: LegacyMcp(server, token).call(tool, **arguments),
        "mcp_modern": lambda tool, arguments: ModernMcp(server, token).call(tool, **arguments),
        "relay": lambda tool, arguments: over_relay(place.relay, token, tool, arguments),
    }[door]


# -- a read token -------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["rest", "cookie", "mcp_legacy", "mcp_modern", "relay"])
@pytest.mark.parametrize("tool", NEEDS_MORE_THAN_READ)
def test_a_read_token_changes_nothing(server, admin, place, door, tool):
    """A read token asks for an action above its scope; it is refused at every door, before its arguments are looked at."""
    call = caller_at(door, server, place, place.read)
    assert refusal(lambda: call(tool, NEEDS_MORE_THAN_READ[tool](place))) == "permission_denied"
    assert refusal(lambda: call(tool, {"no such": "argument"})) == "permission_denied"


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
@pytest.mark.parametrize("path", ["kept", "new", "folder/new"])
def test_a_read_token_changes_no_file(server, admin, place, method, path):
    """A read token writes or deletes a file of a workspace; it is refused and the file is as it was."""
    answer = harness.request(method, f"{place.files}/{path}", content=b"changed", headers=bearer(place.read))
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "permission_denied"
    assert harness.get(f"{place.files}/kept", headers=bearer(admin)).content == b"kept"
    names = [entry["name"] for entry in harness.get(place.files, headers=bearer(admin)).json()["entries"]]
    assert names == ["kept"]


@pytest.mark.parametrize("tool", ["project_get", "project_list", "session_get", "workspace_list", "agent_get", "server_info"])
def test_a_read_token_learns_no_secret(server, admin, place, tool):
    """A read token reads everything it may; no environment value, key, token or socket path is in it."""
    arguments = {
        "project_get": {"project_id": place.project},
        "session_get": {"session_id": place.session},
        "workspace_list": {"project_id": place.project},
        "agent_get": {"slug": "quiet"},
    }.get(tool, {})
    text = json.dumps(server.api(tool, place.read, **arguments))
    for secret in (SECRET, place.relay, admin, "oub_"):
        assert secret not in text, f"{tool} shows {secret}"


# -- another project's token --------------------------------------------------------------------------


FOREIGN: dict[str, Arguments] = {
    **{name: NEEDS_MORE_THAN_READ[name] for name in (
        "project_update", "workspace_create", "workspace_delete", "session_message", "session_cancel", "session_end", "session_delete",
        "session_switch_agent", "caller_tool_response", "tool_call", "tool_server_restart",
    )},
    "project_get": lambda p: {"project_id": p.project},
    "project_delete": lambda p: {"project_id": p.project},
    "workspace_list": lambda p: {"project_id": p.project},
    "workspace_diff": lambda p: {"workspace_id": p.workspace},
    "session_get": lambda p: {"session_id": p.session},
    "session_events": lambda p: {"session_id": p.session},
    "session_queue_list": lambda p: {"session_id": p.session},
    "session_queue_remove": lambda p: {"session_id": p.session, "turn": 99},
    "figures_report": lambda p: {"project_id": p.project},
    "tool_list": lambda p: {"session_id": p.session},
    "debugger_events": lambda p: {"session_id": p.session},
}


@pytest.mark.parametrize("door", ["rest", "cookie", "mcp_legacy", "mcp_modern", "relay"])
@pytest.mark.parametrize("tool", FOREIGN)
def test_a_token_of_another_project_finds_nothing(server, place, door, tool):
    """A token bound to one project acts on another's session, workspace or project; it does not exist for it."""
    call = caller_at(door, server, place, place.foreign)
    refused = refusal(lambda: call(tool, FOREIGN[tool](place)))
    # On the session's own relay socket some actions are refused whatever the key.
    assert refused == "not_found" or (door == "relay" and refused == "permission_denied"), refused


@pytest.mark.parametrize("tool", ["project_list", "session_list", "debugger_events", "catalog_status", "figures_report"])
def test_lists_show_a_bound_token_its_own_project_only(server, place, tool):
    """A token bound to one project lists; nothing of another project is in the list."""
    text = json.dumps(server.api(tool, place.foreign))
    for id in (place.project, place.session, place.workspace):
        assert id not in text


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_token_of_another_project_reaches_no_file(server, admin, place, method):
    """A token bound to one project reads, writes or deletes another's file by its address; it does not exist for it."""
    for url in (f"{place.files}/kept", place.files, f"{place.files}/new"):
        answer = harness.request(method, url, content=b"x", headers=bearer(place.foreign))
        assert answer.status_code in (400, 404, 405), f"{url}: {answer.status_code}"
        assert b"kept" not in answer.content
    assert harness.get(place.archive, headers=bearer(place.foreign)).status_code == 404
    assert harness.get(f"{place.files}/kept", headers=bearer(admin)).content == b"kept"


def test_a_token_of_another_project_follows_no_events(server, place):
    """A token bound to one project opens another session's stream, by each way there is; it does not exist for it."""
    assert refusal(lambda: server.events(place.session, place.foreign)) == "not_found"
    assert refusal(lambda: server.debugger(place.foreign, session_id=place.session)) == "not_found"
    uri = f"oubliette://sessions/{place.session}/events"
    modern = ModernMcp(server, place.foreign)
    with modern.request("resources/read", uri, {"uri": uri}) as request:
        assert "error" in request.json()
    with modern.request("resources/list", None, {}) as request:
        assert place.session not in json.dumps(request.json())
    with modern.request("subscriptions/listen", None, {"notifications": {"resourceSubscriptions": [uri]}}) as request:
        # What was asked for may be repeated; the answer is an error, and no event was signalled before it.
        heard = list(request.frames())
        assert "error" in heard[-1] and not [frame for frame in heard if "updated" in frame.get("method", "")], heard


@pytest.mark.parametrize("tool", ["agent_put", "agent_delete", "catalog_put", "catalog_delete", "project_create"])
def test_an_admin_of_one_project_changes_nothing_of_the_server(server, place, tool):
    """An admin token bound to one project changes what all projects share; it is refused."""
    arguments = NEEDS_MORE_THAN_READ[tool](place)
    assert refusal(lambda: server.api(tool, place.foreign_admin, **arguments)) == "permission_denied"


def test_an_admin_of_one_project_makes_no_token_beyond_it(server, place):
    """An admin token bound to one project makes a token for all, or for another project, or ends another's; it is refused."""
    for arguments in ({"name": "n", "scope": "read"}, {"name": "n", "scope": "read", "project_id": place.project}):
        assert refusal(lambda: server.api("token_create", place.foreign_admin, **arguments)) in ("permission_denied", "not_found")
    assert refusal(lambda: server.api("token_revoke", place.foreign_admin, token_id=place.token)) == "not_found"
    assert place.token not in json.dumps(server.api("token_list", place.foreign_admin))


# -- a caller -----------------------------------------------------------------------------------------


@pytest.fixture
def lent(server, admin, place):
    """A session with a request that waits for the caller that declared the tool, and another caller's token."""
    step = {"call": {"tool": "myapp_notify", "arguments": {"text": "for myapp alone"}}}
    server.put_agent("asks", admin, [[step]])
    context = {"caller_id": "myapp", "caller_tools": [{"name": "notify"}]}
    started = server.api("session_message", place.write, message="go", project_id=place.project, agent="asks", context=context)
    session = started["session_id"]
    with server.events(session, place.write, caller_id="myapp") as events:
        request = events.until("caller_tool_request")["request_id"]
        yield SimpleNamespace(session=session, request=request, events=events, other=place.other)
        server.api("session_end", admin, session_id=session)


def test_a_caller_does_not_answer_for_another(server, place, lent):
    """A caller answers a request that waits for another; it is refused, and the right answer still counts."""
    answer = {"session_id": lent.session, "request_id": lent.request}
    forged = lambda: server.api("caller_tool_response", lent.other, **answer, result="forged")
    assert refusal(forged) == "permission_denied"
    assert server.api("caller_tool_response", place.write, **answer, result="true")["resolved"]
    assert lent.events.until("caller_tool_done", request_id=lent.request)["outcome"] == "answered"
    assert refusal(forged) in ("permission_denied", "not_found")


@pytest.mark.parametrize("tools", [[], [{"name": "notify"}], [{"name": "other"}]], ids=["withdraw", "replace", "add"])
def test_a_caller_does_not_take_anothers_name(server, place, lent, tools):
    """A caller declares tools under the name of another that is there, or withdraws that one's; it is refused."""
    context = {"caller_id": "myapp", "caller_tools": tools}
    declare = lambda: server.api("session_message", lent.other, message="x", session_id=lent.session, context=context)
    assert refusal(declare) == "conflict"
    tools = server.api("tool_list", place.write, session_id=lent.session)["tools"]
    assert [tool["name"] for tool in tools if tool["source"] == "caller"] == ["myapp_notify"]


@pytest.mark.parametrize(
    "context",
    [
        {"caller_id": "oubliette", "caller_tools": [{"name": "project_list"}]},
        {"caller_id": "Oubliette_x", "caller_tools": [{"name": "x"}]},
        {"caller_id": "../x", "caller_tools": [{"name": "x"}]},
        {"caller_id": "other", "caller_tools": [{"name": "x"}, {"name": "x"}]},
        {"caller_id": "other", "caller_tools": [{"name": "x/../y"}]},
        {"caller_id": "other", "caller_tools": [{"name": "x" * 60}]},
        {"caller_id": "session", "caller_tools": [{"name": "message"}]},
    ],
    ids=["our_own_name", "form", "path", "twice", "path_in_a_tool", "too_long", "a_base_tool"],
)
def test_a_caller_does_not_take_the_place_of_another_tool(server, place, lent, context):
    """A caller lends a tool under a name that is not its to give; the declaration is refused, or hides no other tool."""
    before = {tool["name"]: tool["source"] for tool in server.api("tool_list", lent.other, session_id=lent.session)["tools"]}
    declare = lambda: server.api("session_message", lent.other, message="x", session_id=lent.session, context=context)
    assert refusal(declare) in ("invalid_argument", "conflict")
    after = {tool["name"]: tool["source"] for tool in server.api("tool_list", lent.other, session_id=lent.session)["tools"]}
    assert after == before


def test_a_caller_does_not_call_anothers_tool(server, place, lent):
    """A caller calls the tool of another through the session; it is refused, and the other hears nothing."""
    call = {"session_id": lent.session, "tool": "myapp_notify", "arguments": {}}
    try:
        result = server.api("tool_call", lent.other, **call)
        assert result["isError"] and result["structuredContent"]["error"]["code"] == "permission_denied", result
    except ToolFailed as failed:
        assert failed.code == "permission_denied"
    log = server.api("session_events", place.write, session_id=lent.session, max_events=1000)["events"]
    assert [event["request_id"] for event in log if event["type"] == "caller_tool_request"] == [lent.request]


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_a_caller_does_not_use_anothers_mcp_session(server, place, lent, method):
    """A caller uses the id of another's MCP session, to call, to listen or to end it; for it there is none."""
    own = LegacyMcp(server, place.write)
    headers = {"Mcp_Session_Id": own.session, "MCP_Protocol_Version": "2025-11-25", "Accept": LegacyMcp.ACCEPT}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"} if method == "POST" else None
    with Request(server, method, "/mcp", lent.other, body, **headers) as request:
        assert request.response.status == 404
    assert own.call("server_info")["version"]


@pytest.mark.parametrize("tool", ["token_create", "catalog_put", "agent_put", "audit_list"])
def test_a_caller_does_not_borrow_the_sessions_key(server, place, lent, tool):
    """A write token calls Oubliette's own tools through a session whose key is an admin's; it stays a write token."""
    call = {"session_id": lent.session, "tool": f"oubliette_{tool}", "arguments": NEEDS_MORE_THAN_READ[tool](place)}
    try:
        result = server.api("tool_call", lent.other, **call)
        assert result["isError"] and result["structuredContent"]["error"]["code"] == "permission_denied", result
    except ToolFailed as failed:
        assert failed.code in ("permission_denied", "not_allowed", "not_found")


@pytest.mark.parametrize(
    "sandbox",
    [{"network": "host"}, {"network": "proxy"}, {"driver": "local"}, {"image": "x"}, {"memory_mb": 10**6}, {"pids": 10**6}],
    ids=["host_network", "proxy", "driver", "image", "memory", "processes"],
)
def test_a_write_token_opens_no_sandbox(server, place, sandbox):
    """A write token gives a project more than the server's defaults, in a new project or an old one; it is refused."""
    assert refusal(lambda: server.api("project_create", place.write, name="n", sandbox=sandbox)) == "permission_denied"
    update = {"project_id": place.project, "sandbox": sandbox}
    assert refusal(lambda: server.api("project_update", place.write, **update)) == "permission_denied"

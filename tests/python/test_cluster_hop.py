"""Several servers on one database: any of them takes any request, and passes on what the session's own server has to do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import json
import tarfile
import time

import httpx
import pytest
from mcp import types

import stores
from caller import Caller, call, lend
from cluster_support import KEY, Balancer, cluster
from harness import DEADLINE, LEGACY, MODERN, ToolFailed, get, post, put, running, wait_until
from wire import LegacyMcp, ModernMcp, Request

pytestmark = pytest.mark.skipif(not stores.ON_POSTGRES, reason="several servers share a PostgreSQL database")

WRITE = {"kind": "builtin", "builtinPolicy": {"name": "fs_write", "allowedPaths": ["."]}}
TOOL = "writer_fs_write"
ASK = "myapp_ask"
CONFIG = "[relay]\nreconnect_grace = '100ms'\n[workspaces]\ndir = 'ROOT/projects'\n"


@pytest.fixture(scope="module")
def servers():
    with cluster(3, CONFIG) as servers:
        yield servers


@pytest.fixture(scope="module")
def admin(servers):
    return servers[0].token("admin")


@pytest.fixture(scope="module")
def token(servers):
    return servers[1].token("write")


@pytest.fixture(scope="module")
def project(servers, admin):
    return servers[0].api("project_create", admin, name="test")["project_id"]


@pytest.fixture
def background():
    """Runs calls that wait."""
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        yield threads.submit


def held(server, admin, **kinds):
    """Waits until callers hold so many streams, polls and messages open at a server."""

    def as_asked():
        return all(server.metric(admin, "oubliette_callers_held", kind=k) == n for k, n in kinds.items())

    wait_until(as_asked, f"{kinds} to be held")


def start(servers, token, project, agent, turns, admin, **more):
    """Starts a session of an agent with this script at the first server."""
    servers.put_agent(agent, admin, turns)
    started = servers[0].api("session_message", token, message="go", project_id=project, agent=agent, **more)
    return started["session_id"]


def log_of(server, token, session):
    return server.api("session_events", token, session_id=session, max_events=1000)["events"]


def code_of(failing, *args, **kwargs):
    with pytest.raises(ToolFailed) as failed:
        failing(*args, **kwargs)
    return failed.value.code


# -- callers -----------------------------------------------------------------------------------------


def test_a_callers_stream_its_session_and_its_answer_are_at_three_servers(servers, admin, token, project):
    first, second, third = servers
    turns = [[call(ASK, n=1), {"say": "one"}], [call(ASK, n=2), {"say": "two"}]]
    session = start(servers, token, project, "lent", turns, admin, context=lend("ask"))
    with second.events(session, token, caller_id="myapp") as events:
        request = events.until("caller_tool_request")
        held(first, admin, stream=1)
        answer = {"session_id": session, "request_id": request["request_id"]}
        assert third.api("caller_tool_response", token, **answer, result="yes") == {"resolved": True}
        assert events.until("caller_tool_done")["outcome"] == "answered"
        assert events.until("turn_completed")["text"] == "one"
        # Errors pass unchanged, and each refusal is one.
        assert code_of(third.api, "caller_tool_response", token, **answer, result="again") == "conflict"
        assert code_of(third.api, "caller_tool_response", admin, **answer, result=1) in ("conflict", "permission_denied")
        third.api("session_message", token, session_id=session, message="again")
        request = events.until("caller_tool_request")
    # The stream was broken off at the second server: at the first the caller has left.
    held(first, admin, stream=0)
    with first.events(session, token, since=request["index"]) as events:
        assert events.until("caller_tool_done")["outcome"] == "disconnected"


def test_open_requests_are_delivered_again_at_any_server(servers, admin, token, project):
    first, second, third = servers
    session = start(servers, token, project, "again", [[call(ASK), {"say": "done"}]], admin, context=lend("ask"))
    with second.events(session, token, caller_id="myapp") as events:
        request = events.until("caller_tool_request")
        with third.events(session, token, since=request["index"], caller_id="myapp") as again:
            assert again.until("caller_tool_request") == request
            answer = {"session_id": session, "request_id": request["request_id"], "result": 1}
            second.api("caller_tool_response", token, **answer)
            again.until("turn_completed")


async def test_a_poll_at_another_server_is_presence_and_breaking_it_off_is_leaving(servers, admin, token, project):
    first, second, _ = servers
    session = start(servers, token, project, "polled", [[call(ASK), {"say": "done"}]], admin, context=lend("ask"))
    with first.events(session, token) as events:
        request = await asyncio.to_thread(events.until, "caller_tool_request")
        headers = {"Authorization": f"Bearer {token}"}
        query = {"session_id": session, "since_index": request["index"] + 1000, "wait_ms": 50_000}
        async with httpx.AsyncClient(timeout=DEADLINE) as http:
            polling = http.post(f"{second.url}/api/tools/session_events", json=query, headers=headers)
            polling = asyncio.create_task(polling)
            await asyncio.to_thread(held, first, admin, poll=1)
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
        await asyncio.to_thread(held, first, admin, poll=0)
        done = await asyncio.to_thread(events.until, "caller_tool_done")
        assert done["outcome"] == "disconnected"


def test_a_subscription_at_another_server_is_presence(servers, admin, token, project):
    first, second, _ = servers
    session = start(servers, token, project, "subscribed", [[call(ASK), {"say": "done"}]], admin, context=lend("ask"))
    with first.events(session, token) as events:
        events.until("caller_tool_request")
        listening = ModernMcp(second, token).listen(session)
        held(first, admin, stream=1)
        listening.close()
        held(first, admin, stream=0)
        assert events.until("caller_tool_done")["outcome"] == "disconnected"


# -- messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [LEGACY, MODERN])
async def test_a_message_is_waited_for_through_another_server(servers, admin, token, project, mode):
    session = start(servers, token, project, "waited", [[{"say": "one"}], [{"say": "two"}]], admin)
    heard = []

    async def hear(message):
        heard.append(message.data)

    async with servers[1].mcp(token, mode, logging_callback=hear) as mcp:
        done = await mcp.call("session_message", session_id=session, message="again", wait=True)
        assert done["text"] == "two" and done["session_id"] == session
        # At 2026-07-28 the events come on the answer, before it; before that on the stream of the MCP session.
        async with asyncio.timeout(DEADLINE):
            while not any(event["type"] == "turn_completed" and event["text"] == "two" for event in heard):
                assert mode == LEGACY
                await asyncio.sleep(0.02)
    assert {event["session_id"] for event in heard} == {session}


async def test_a_client_is_asked_about_approvals_of_a_session_at_another_server(servers, admin, project):
    servers.put_tool("writer", admin, **WRITE)
    servers.put_agent(
        "elicits",
        admin,
        [[{"say": "hi"}], [call(TOOL, path="a", content="x"), {"say": "done"}], [call(TOOL, path="b", content="x"), {"say": "done"}]],
        tools={"use": ["writer"], "ask": [TOOL]},
    )
    started = servers[0].api("session_message", admin, message="go", project_id=project, agent="elicits", wait=True)
    session, asked = started["session_id"], []

    async def answer(_, params):
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"decision": "allow"})

    for at, mode in ((1, LEGACY), (2, MODERN)):
        async with servers[at].mcp(admin, mode, elicitation_callback=answer) as mcp:
            done = await mcp.call("session_message", session_id=session, message="go on", wait=True)
            assert done["text"].endswith("done")
    assert len(asked) == 2
    log = log_of(servers[1], admin, session)
    assert [e["decision"] for e in log if e["type"] == "approval_decided"] == ["allowed", "allowed"]


def test_an_approval_is_decided_through_another_server(servers, admin, project):
    first, second, third = servers
    servers.put_tool("writer", admin, **WRITE)
    servers.put_agent(
        "asks", admin, [[call(TOOL, path="a", content="x"), {"say": "done"}]], tools={"use": ["writer"], "ask": [TOOL]}
    )
    session = first.api("session_message", admin, message="go", project_id=project, agent="asks")["session_id"]
    with second.events(session, admin) as events:
        approval = events.until("approval_requested")["approval_id"]
        assert second.api("session_get", admin, session_id=session)["pending_approvals"] == [approval]
        decided = third.api("approval_decide", admin, approval_id=approval, decision="allow", reason="fine")
        assert decided["status"] == "allowed" and decided["reason"] == "fine"
        assert events.until("approval_decided")["decision"] == "allowed"
        assert events.until("tool_result")["ok"]
        assert events.until("turn_completed")["text"] == "done"
    assert code_of(second.api, "approval_decide", admin, approval_id=approval, decision="deny") == "conflict"
    # Audited once, by the server that did it.
    entries = first.api("audit_list", admin, limit=1000)["entries"]
    assert len([e for e in entries if e["action"] == "approval_decide" and e["target"] == approval and e["outcome"] == "ok"]) == 1


def test_a_turn_is_cancelled_and_its_session_managed_through_other_servers(servers, admin, token, project):
    first, second, third = servers
    session = start(servers, token, project, "slow", [[call(ASK)], [{"say": "two"}]], admin, context=lend("ask"))
    with second.events(session, token, caller_id="myapp") as events:
        events.until("caller_tool_request")
        queued = second.api("session_message", token, session_id=session, message="later")
        listed = third.api("session_queue_list", token, session_id=session)["messages"]
        assert [message["turn"] for message in listed] == [queued["turn"]]
        third.api("session_queue_remove", token, session_id=session, turn=queued["turn"])
        assert third.api("session_cancel", token, session_id=session)["cancelled"]
        # In either order.
        ends = {}
        while ends.keys() < {"caller_tool_done", "turn_completed"}:
            event = events.next()
            if event["type"] in ("caller_tool_done", "turn_completed"):
                ends[event["type"]] = event
        assert ends["caller_tool_done"]["outcome"] == "cancelled"
        assert ends["turn_completed"]["stop_reason"] == "cancelled"
    tools = second.api("tool_list", token, session_id=session)["tools"]
    assert any(tool["name"] == ASK for tool in tools), "the first server knows the caller's tools"
    assert third.api("session_end", token, session_id=session)["status"] == "ended"
    assert second.api("session_get", token, session_id=session)["status"] == "ended"
    assert code_of(second.api, "session_message", token, session_id=session, message="x") == "conflict"
    assert third.api("session_delete", token, session_id=session)["deleted"]
    assert code_of(second.api, "session_get", token, session_id=session) == "not_found"


def test_a_tool_is_called_through_another_server_with_its_rules(servers, admin, token, project):
    servers.put_tool("writer", admin, **WRITE)
    servers.put_agent("writes", admin, [[{"say": "hi"}]], tools={"use": ["writer"], "denied": ["writer_none"]})
    first, second, _ = servers
    started = first.api("session_message", token, message="go", project_id=project, agent="writes", wait=True)
    session = started["session_id"]
    result = second.api("tool_call", token, session_id=session, tool=TOOL, arguments={"path": "f", "content": "x"})
    assert not result["isError"], result
    other = first.token("write", first.api("project_create", admin, name="other")["project_id"])
    assert code_of(second.api, "tool_call", other, session_id=session, tool=TOOL, arguments={}) == "not_found"
    read = first.token("read")
    assert code_of(second.api, "session_end", read, session_id=session) == "permission_denied"


def test_a_revoked_token_is_refused_by_the_server_a_call_is_passed_on_to(servers, admin, project):
    first, second, third = servers
    token = first.token("write")
    session = start(servers, token, project, "revoked", [[{"say": "hi"}]], admin)
    [row] = [t for t in first.api("token_list", admin, limit=1000)["tokens"] if t["token_id"] == token_id(first, token)]
    third.api("token_revoke", admin, token_id=row["token_id"])
    assert code_of(second.api, "session_cancel", token, session_id=session) == "unauthenticated"


def token_id(server, token):
    answer = post(f"{server.url}/api/login", json={"token": token}).json()
    return answer["token_id"]


# -- streams -----------------------------------------------------------------------------------------


def test_events_go_on_at_another_server_from_the_last_one_seen(servers, admin, token, project):
    first, second, third = servers
    session = start(servers, token, project, "followed", [[{"say": "one"}], [{"say": "two"}]], admin)
    with first.events(session, token) as events:
        seen = events.until("turn_completed")
    headers = {"Authorization": f"Bearer {token}", "Last-Event-ID": str(seen["index"])}
    for server in (second, third):
        with httpx.stream("GET", f"{server.url}/api/sessions/{session}/events", headers=headers, timeout=DEADLINE) as stream:
            lines = stream.iter_lines()
            if server is second:
                third.api("session_message", token, session_id=session, message="again")
            events = (json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:"))
            heard = []
            for event in events:
                heard.append(event)
                if event["type"] == "turn_completed":
                    break
        assert [e["index"] for e in heard] == list(range(seen["index"] + 1, seen["index"] + 1 + len(heard)))
        assert heard[-1]["text"] == "two"


async def test_a_stateful_mcp_session_is_good_at_every_server(servers, admin, token, project):
    servers.put_agent("balanced", admin, [[{"say": "hi"}], [call(ASK, n=1), {"say": "one"}], [call(ASK, n=2), {"say": "two"}]])
    # The balancer gives the MCP session to the first server.
    owner = servers[1]
    started = owner.api("session_message", token, message="hello", project_id=project, agent="balanced", wait=True)
    holder: list[Caller] = []

    async def heard(message):
        await holder[0].heard(message.data)

    with Balancer(servers) as balancer:
        async with balancer.mcp(token, LEGACY, logging_callback=heard) as mcp:
            caller = Caller(mcp, LEGACY)
            caller.session_id = started["session_id"]
            holder.append(caller)
            for turn, text in ((1, "one"), (2, "two")):
                await mcp.call("session_message", session_id=caller.session_id, message="go", context=lend("ask"))
                request = await caller.until("caller_tool_request", arguments={"n": turn})
                await asyncio.to_thread(held, owner, admin, stream=1)
                await caller.respond(request, result=turn)
                await caller.until("turn_completed", text=text)
            assert "session_message" in await mcp.tools()
        # Whoever closes its MCP session has left, wherever the session runs.
        await asyncio.to_thread(held, owner, admin, stream=0)
        assert len(set(balancer.connections)) == 3, "every server had requests of the one MCP session"
    missing = {"Authorization": f"Bearer {token}", "Mcp-Session-Id": "srv_01ARZ3NDEKTSV4RRFFQ69G5FAV.x", "Accept": "text/event-stream"}
    assert get(f"{servers[0].url}/mcp", headers=missing).status_code == 404


def test_a_resumed_mcp_stream_gets_open_requests_of_another_server_again(servers, admin, token, project):
    first, second, third = servers
    session = start(servers, token, project, "resumes", [[{"say": "hi"}], [call(ASK), {"say": "done"}]], admin)
    with first.events(session, token) as events:
        events.until("turn_completed")
    mcp = LegacyMcp(second, token)
    mcp.call("session_message", session_id=session, message="go", context=lend("ask"))
    with mcp.stream() as stream:
        request = next_request(stream)
        held(first, admin, stream=1)
        # The MCP session is at the second server, the session at the first, and the client reconnects at the third.
        mcp.server = third
        headers = {**mcp._headers(), "Accept": "text/event-stream", "Last_Event_ID": f"e0.{request['index']}"}
        with Request(third, "GET", "/mcp", token, **headers) as resumed:
            assert resumed.response.status == 200
            assert next_request(resumed) == request
    held(first, admin, stream=0)
    mcp.delete()


def next_request(stream):
    """The next request to a caller's tool on an MCP stream."""
    for message in stream.frames():
        data = message.get("params", {}).get("data", {})
        if data.get("type") == "caller_tool_request":
            return data
    raise AssertionError("the stream ended")


def test_files_and_archives_of_a_workspace_are_at_every_server(servers, admin, token, project):
    first, second, third = servers
    servers.put_tool("writer", admin, **WRITE)
    servers.put_agent("files", admin, [[call(TOOL, path="of-agent.txt", content="hello"), {"say": "done"}]], tools={"use": ["writer"]})
    started = first.api("session_message", token, message="go", project_id=project, agent="files", wait=True)
    workspace = first.api("session_get", token, session_id=started["session_id"])["workspace_id"]
    headers = {"Authorization": f"Bearer {token}"}
    files = f"/api/workspaces/{workspace}/files"
    assert get(f"{second.url}{files}/of-agent.txt", headers=headers).text == "hello"
    assert put(f"{third.url}{files}/of-client.txt", headers=headers, content=b"x").status_code < 300
    assert get(f"{first.url}{files}/of-client.txt", headers=headers).text == "x"
    archive = get(f"{second.url}/api/workspaces/{workspace}/archive", headers=headers).content
    names = tarfile.open(fileobj=io.BytesIO(archive)).getnames()
    assert any(name.endswith("of-agent.txt") for name in names) and any(name.endswith("of-client.txt") for name in names)


# -- between servers ---------------------------------------------------------------------------------


def test_requests_between_servers_need_the_cluster_key(servers):
    first = servers[0]
    for headers in (
        {},
        {"X-Oubliette-Cluster": "nonsense"},
        {"X-Oubliette-Cluster": ";".join(["v1", "srv_01ARZ3NDEKTSV4RRFFQ69G5FAV", "srv_01ARZ3NDEKTSV4RRFFQ69G5FAV", "-", "0" * 32, "0" * 64, "0" * 64])},
        {"Authorization": f"Bearer {KEY}"},
    ):
        for path in ("challenge", "actions/project_list", "presence", "mcp", "caller-stream", "nothing"):
            answer = post(f"{first.url}/internal/{path}", headers=headers, content=b"{}")
            assert answer.status_code in (403, 429), (path, headers, answer.text)
            assert "x-oubliette-challenge" not in answer.headers
    assert "a request to /internal was refused" in first.log()
    assert not any(KEY in member.log() for member in servers)


def test_without_a_cluster_there_is_no_such_path():
    with running() as server:
        for method in (get, post):
            answer = method(f"{server.url}/internal/challenge")
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_commands_work_at_every_server(servers, admin, token, project):
    session = start(servers, token, project, "commanded", [[{"say": "one"}], [{"say": "two"}]], admin)
    with servers[0].events(session, token) as events:
        events.until("turn_completed")
    shown = servers[1].cli_json("session", "get", session)
    assert shown["session_id"] == session
    servers[2].cli("session", "end", session)
    assert servers[1].cli_json("session", "get", session)["status"] == "ended"


def test_requests_for_a_server_that_was_killed_wait_for_the_takeover():
    with cluster(2, CONFIG) as servers:
        first, second = servers
        admin = first.token("admin")
        project = first.api("project_create", admin, name="test")["project_id"]
        session = start(servers, admin, project, "killed", [[{"say": "one"}], [{"say": "two"}]], admin)
        with second.events(session, admin) as events:
            events.until("turn_completed")
        first.kill()
        # What the database has is answered at once.
        assert second.api("session_get", admin, session_id=session)["session_id"] == session
        done = second.api("session_message", admin, session_id=session, message="again", wait=True)
        assert done["text"] == "two"


def test_every_server_lists_all(servers, admin, token, project):
    first, second, _ = servers
    start(servers, token, project, "listed", [[{"say": "hi"}]], admin)
    listed = second.api("server_list", token)["servers"]
    assert {row["address"] for row in listed} == {member.url for member in servers}
    assert next(row for row in listed if row["address"] == first.url)["sessions"] >= 1
    other = first.token("read", first.api("project_create", admin, name="empty")["project_id"])
    assert {row["sessions"] for row in second.api("server_list", other)["servers"]} == {0}


def test_a_frozen_server_does_not_hold_up_requests(background):
    with cluster(2, CONFIG) as servers:
        first, second = servers
        admin = first.token("admin")
        project = first.api("project_create", admin, name="test")["project_id"]
        session = start(servers, admin, project, "frozen", [[call(ASK)]], admin, context=lend("ask"))
        with second.events(session, admin, caller_id="myapp") as events:
            events.until("caller_tool_request")
            waiting = background(second.api, "session_message", admin, session_id=session, message="x", wait=True)
            held(first, admin, wait=1)
            first.freeze()
            began = time.monotonic()
            # What the database has is answered at once, or a moment later; what it has not ends too.
            assert second.api("session_get", admin, session_id=session)["session_id"] == session
            assert second.api("project_list", admin)["projects"]
            changed = background(second.api, "session_cancel", admin, session_id=session)
            with pytest.raises(ToolFailed) as failed:
                waiting.result(60)
            assert failed.value.code in ("unavailable", "conflict"), failed.value
            with contextlib.suppress(ToolFailed):
                changed.result(60)
            assert time.monotonic() - began < 40
            first.thaw()

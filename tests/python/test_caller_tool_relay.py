"""caller-tool-relay: every requirement and scenario, through the real server, sandbox, client and SDK."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from caller import call, calling, lend
from harness import DEADLINE, LEGACY, MODERN, ToolFailed, running, wait_until

SCHEMA = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
NOTIFY = {"name": "send_notification", "description": "Send notification", "inputSchema": SCHEMA}


@pytest.fixture(scope="module")
def caller_token(server):
    return server.token("write")


class ShortTimeoutServer:
    """A server with a caller timeout of two seconds, for tests of calls that are never answered.
    `test_the_default_timeout…` checks the default of a minute."""

    def __init__(self, server):
        self.server, self.admin, self.token = server, server.token("admin"), server.token("write")
        self.project = server.api("project_create", self.admin, name="test")["project_id"]


@pytest.fixture(scope="module")
def short_timeout():
    with running("[relay]\ncaller_timeout = '2s'\n") as server:
        yield ShortTimeoutServer(server)


def result_of(event):
    return event["result"]


# -- REQ-CTR-001: Agent can call caller tools as native MCP tools ------------------------------------


async def test_req_ctr_001_agent_calls_caller_tool_successfully(server, admin, caller_token, project, mode):
    server.put_agent("notify", admin, [[call("myapp_send_notification", message="hello"), {"say": "sent"}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="notify", context=lend(NOTIFY))
        request = await caller.until("caller_tool_request")
        assert await caller.respond(request, result={"status": "sent"}) == {"resolved": True}
        result = await caller.until("tool_result")
        assert result["ok"] and "sent" in json.dumps(result)
        done = await caller.until("caller_tool_done")
        assert done["request_id"] == request["request_id"] and done["outcome"] == "answered"
        turn = await caller.until("turn_completed")
        assert turn["text"] == "sent"


async def test_req_ctr_001_caller_tool_request_times_out(short_timeout, mode):
    short_timeout.server.put_agent("slow", short_timeout.admin, [[call("myapp_slow_tool")]])
    async with calling(short_timeout.server, short_timeout.token, mode) as caller:
        await caller.start(project_id=short_timeout.project, agent="slow", context=lend("slow_tool"))
        request = await caller.until("caller_tool_request")
        result = await caller.until("tool_result")
        assert not result["ok"] and "timeout" in json.dumps(result)
        assert (await caller.until("caller_tool_done"))["outcome"] == "timeout"
        with pytest.raises(ToolFailed) as late:
            await caller.respond(request, result=1)
        assert late.value.code == "not_found"


async def test_req_ctr_001_caller_disconnected_before_response(server, admin, caller_token, project, mode):
    server.put_agent("gone", admin, [[call("myapp_send_notification", message="x")]])
    await listening(server, admin, mode, 0)
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="gone", context=lend(NOTIFY))
        await caller.until("caller_tool_request")
        await listening(server, admin, mode)
        session = caller.session_id
    with server.events(session, admin) as events:
        result = events.until("tool_result")
        assert not result["ok"] and "caller_disconnected" in json.dumps(result)
        events.until("turn_completed")
        assert any(e.get("outcome") == "disconnected" for e in events.seen)


async def listening(server, admin, mode, count=1):
    """Waits until the caller's stream or poll is open. (An answered poll counts as present for 30 s, and cannot be
    broken off any more.)"""
    kind = "stream" if mode == LEGACY else "poll"
    held = lambda: server.metric(admin, "oubliette_callers_held", kind=kind) == count  # noqa: E731
    await asyncio.to_thread(wait_until, held, f"{count} {kind}(s) to be open")


def test_the_default_timeout_is_a_minute(server):
    with running() as fresh:
        info = fresh.api("server_info", fresh.token("read"))
        assert info["limits"]["caller_timeout"] in ("60s", "1m", 60_000)


# -- REQ-CTR-002: Dynamic tool registration from caller declaration ----------------------------------


async def test_req_ctr_002_caller_declares_tools_at_session_start(server, admin, caller_token, project, mode):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="quiet", context=lend(NOTIFY))
        await caller.until("turn_completed")
        row = tool_row(server, admin, caller.session_id, "myapp_send_notification")
        assert row["source"] == "caller" and row["allowed"] and row["available"]
        assert row["description"] == "Send notification"


async def test_req_ctr_002_tools_include_input_schema(server, admin, caller_token, project, mode):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="quiet", context=lend(NOTIFY, "bare"))
        await caller.until("turn_completed")
        assert tool_row(server, admin, caller.session_id, "myapp_send_notification")["inputSchema"] == SCHEMA
        assert tool_row(server, admin, caller.session_id, "myapp_bare")["inputSchema"] == {"type": "object"}


def tool_row(server, token, session_id, name):
    rows = server.api("tool_list", token, session_id=session_id)["tools"]
    return next((r for r in rows if r["name"] == name), None)


async def test_arguments_are_checked_before_the_caller_hears(server, admin, caller_token, project, mode):
    server.put_agent("wrong", admin, [[call("myapp_send_notification", message=5)]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="wrong", context=lend(NOTIFY))
        result = await caller.until("tool_result")
        assert not result["ok"]
        await caller.until("turn_completed")
        assert all(e["type"] != "caller_tool_request" for e in await caller.log())


# -- REQ-CTR-003: SSE event for tool requests --------------------------------------------------------


async def test_req_ctr_003_tool_request_event_format(server, admin, caller_token, project, mode):
    server.put_agent("hi", admin, [[{"parallel": [
        {"tool": "myapp_send_notification", "arguments": {"message": "hi"}},
        {"tool": "myapp_send_notification", "arguments": {"message": "hi"}},
    ]}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="hi", context=lend(NOTIFY))
        first = await caller.until("caller_tool_request")
        requests = [first, await caller.other("caller_tool_request", first)]
        uuid4 = re.compile(r"^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$")
        for request in requests:
            assert request["type"] == "caller_tool_request"
            assert uuid4.match(request["request_id"])
            assert request["caller_id"] == "myapp"
            assert request["tool"] == "send_notification"
            assert request["arguments"] == {"message": "hi"}
        assert requests[0]["request_id"] != requests[1]["request_id"]
        for request in reversed(requests):
            await caller.respond(request, result=request["request_id"])
        await caller.until("turn_completed")


# -- REQ-CTR-004: MCP method for tool responses ------------------------------------------------------


async def test_req_ctr_004_successful_tool_response(server, admin, caller_token, project, mode):
    server.put_agent("ask", admin, [[call("myapp_ask")]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="ask", context=lend("ask"))
        request = await caller.until("caller_tool_request")
        assert await caller.respond(request, result={"status": "sent"}, error=None) == {"resolved": True}
        result = await caller.until("tool_result")
        assert result["ok"] and '"status"' in json.dumps(result)


async def test_req_ctr_004_tool_execution_error_response(server, admin, caller_token, project, mode):
    server.put_agent("ask", admin, [[call("myapp_ask")]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="ask", context=lend("ask"))
        request = await caller.until("caller_tool_request")
        await caller.respond(request, result=None, error="recipient not found")
        result = await caller.until("tool_result")
        assert not result["ok"] and "recipient not found" in json.dumps(result)
        assert (await caller.until("caller_tool_done"))["outcome"] == "error"


async def test_both_result_and_error_are_refused_and_neither_is_a_null_result(server, admin, caller_token, project, mode):
    server.put_agent("ask", admin, [[call("myapp_ask")]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="ask", context=lend("ask"))
        request = await caller.until("caller_tool_request")
        with pytest.raises(ToolFailed) as both:
            await caller.respond(request, result=1, error="x")
        assert both.value.code == "invalid_argument"
        await caller.respond(request)
        assert (await caller.until("tool_result"))["ok"]


# -- security of the design --------------------------------------------------------------------------


async def test_only_the_declaring_principal_may_answer(server, admin, caller_token, project, mode):
    server.put_agent("ask", admin, [[call("myapp_ask")]])
    stranger = server.token("write")
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="ask", context=lend("ask"))
        request = await caller.until("caller_tool_request")
        answer = {"session_id": caller.session_id, "request_id": request["request_id"], "result": "forged"}
        with pytest.raises(ToolFailed) as foreign:
            server.api("caller_tool_response", stranger, **answer)
        assert foreign.value.code == "permission_denied"
        # For a token of another project the session does not exist; the attempt is recorded all the same.
        elsewhere = server.api("project_create", admin, name="elsewhere")["project_id"]
        with pytest.raises(ToolFailed) as hidden:
            server.api("caller_tool_response", server.token("write", project=elsewhere), **answer)
        assert hidden.value.code == "not_found"
        await caller.respond(request, result="true")
        result = await caller.until("tool_result")
        assert "forged" not in json.dumps(result)
        with pytest.raises(ToolFailed) as repeated:
            await caller.respond(request, result="again")
        assert repeated.value.code == "conflict"
        with pytest.raises(ToolFailed) as unknown:
            await caller.respond({"request_id": "6f1c1a52-9b39-4d6e-8a53-111111111111"}, result=1)
        assert unknown.value.code == "not_found"
        refused = server.api("debugger_events", admin, session_id=caller.session_id, kinds=["answer_refused"])
        assert len(refused["events"]) == 4


async def test_declarations_are_checked_whole(server, admin, caller_token, project):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    for context in (
        lend("ok", "ok"),
        lend("ok", caller_id="oubliette"),
        lend("ok", caller_id="my_app"),
        lend("has space"),
        lend("x" * 64),
        lend({"name": "t", "inputSchema": {"type": "string"}}),
        lend({"name": "t", "inputSchema": {"type": "object", "properties": 1}}),
    ):
        with pytest.raises(ToolFailed) as bad:
            server.api("session_message", caller_token, message="x", project_id=project, agent="quiet", context=context)
        assert bad.value.code == "invalid_argument", context
    assert server.api("session_list", admin, project_id=project)["sessions"] == []


async def test_a_caller_id_belongs_to_its_first_principal(server, admin, caller_token, project, mode):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    stranger = server.token("write")
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="quiet", context=lend("a"))
        await caller.until("turn_completed")
        with pytest.raises(ToolFailed) as taken:
            server.api("session_message", stranger, session_id=caller.session_id, message="x", context=lend("b"))
        assert taken.value.code == "conflict"
        server.api("session_message", stranger, session_id=caller.session_id, message="x", context=lend("b", caller_id="other"), wait=True)
        names = {r["name"] for r in server.api("tool_list", admin, session_id=caller.session_id)["tools"]}
        assert {"myapp_a", "other_b"} <= names


async def test_redeclaring_replaces_and_an_empty_list_withdraws(server, admin, caller_token, project, mode):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="quiet", context=lend("a"))
        await caller.until("turn_completed", turn=1)
        await caller.mcp.call("session_message", session_id=caller.session_id, message="x", context=lend("b"), wait=True)
        assert tool_row(server, admin, caller.session_id, "myapp_a") is None
        assert tool_row(server, admin, caller.session_id, "myapp_b")
        await caller.mcp.call("session_message", session_id=caller.session_id, message="x", context=lend(), wait=True)
        assert tool_row(server, admin, caller.session_id, "myapp_b") is None


# -- REQ-CTR-005: Socket protocol for caller_tool ----------------------------------------------------


class Socket:
    """A raw client of the relay socket."""

    def __init__(self, reader, writer):
        self.reader, self.writer, self.id = reader, writer, 0

    @classmethod
    async def open(cls, path):
        return cls(*await asyncio.open_unix_connection(path, limit=32 << 20))

    async def send(self, frame):
        self.writer.write((frame if isinstance(frame, str) else json.dumps(frame)).encode() + b"\n")
        await self.writer.drain()

    async def read(self):
        return json.loads(await asyncio.wait_for(self.reader.readline(), DEADLINE))

    async def answer(self, id):
        while True:
            frame = await self.read()
            if "method" not in frame and frame.get("id") == id:
                return frame

    async def request(self, method, **params):
        self.id += 1
        await self.send({"jsonrpc": "2.0", "id": self.id, "method": method, "params": params})
        return self.id


async def test_req_ctr_005_socket_request_and_response(server, admin, caller_token, project, mode):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="quiet", context=lend(NOTIFY, "x"))
        await caller.until("turn_completed")
        path = server.api("session_get", admin, session_id=caller.session_id)["relay_socket"]
        assert len(path.encode()) <= 107
        socket = await Socket.open(path)
        config = await socket.read()
        assert config["jsonrpc"] == "2.0" and config["method"] == config["type"] == "caller_tools_config"
        assert config["params"]["caller_id"] == "myapp"
        assert {t["name"] for t in config["params"]["tools"]} == {"send_notification", "x"}
        id = await socket.request("caller_tool", tool="x", arguments={})
        request = await caller.until("caller_tool_request", tool="x")
        await caller.respond(request, result={"value": [1, 2]})
        assert (await socket.answer(id))["result"] == {"value": [1, 2]}
        # A bad line gets an error answer and the connection stays open.
        await socket.send("this is not json")
        assert (await socket.read())["error"]["code"] == -32700
        id = await socket.request("no_such_method")
        assert (await socket.answer(id))["error"]["code"] == -32601
        id = await socket.request("caller_tool", tool="undeclared", arguments={})
        assert "error" in await socket.answer(id)


async def test_req_ctr_005_socket_request_times_out(short_timeout, mode):
    short_timeout.server.put_agent("quiet", short_timeout.admin, [[{"say": "hi"}]])
    async with calling(short_timeout.server, short_timeout.token, mode) as caller:
        await caller.start(project_id=short_timeout.project, agent="quiet", context=lend("x"))
        await caller.until("turn_completed")
        path = short_timeout.server.api("session_get", short_timeout.admin, session_id=caller.session_id)["relay_socket"]
        socket = await Socket.open(path)
        id = await socket.request("caller_tool", tool="x", arguments={})
        error = (await socket.answer(id))["error"]
        assert error["code"] == -32004 and error["data"]["code"] == "timeout"


async def test_cancel_on_the_socket_cancels_the_request(server, admin, caller_token, project, mode):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="quiet", context=lend("x"))
        await caller.until("turn_completed")
        path = server.api("session_get", admin, session_id=caller.session_id)["relay_socket"]
        socket = await Socket.open(path)
        id = await socket.request("caller_tool", tool="x", arguments={})
        request = await caller.until("caller_tool_request")
        await socket.send({"jsonrpc": "2.0", "method": "cancel", "params": {"id": id}})
        done = await caller.until("caller_tool_done", request_id=request["request_id"])
        assert done["outcome"] == "cancelled"


async def test_answers_come_as_they_are_ready(server, admin, caller_token, project, mode):
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="quiet", context=lend("x"))
        await caller.until("turn_completed")
        path = server.api("session_get", admin, session_id=caller.session_id)["relay_socket"]
        socket = await Socket.open(path)
        first = await socket.request("caller_tool", tool="x", arguments={"n": 1})
        second = await socket.request("caller_tool", tool="x", arguments={"n": 2})
        one = await caller.until("caller_tool_request", arguments={"n": 1})
        two = await caller.until("caller_tool_request", arguments={"n": 2})
        await caller.respond(two, result="two")
        assert (await socket.answer(second))["result"] == "two"
        await caller.respond(one, result="one")
        assert (await socket.answer(first))["result"] == "one"


# -- presence ----------------------------------------------------------------------------------------


async def test_a_call_while_no_caller_is_present_fails_at_once(server, admin, caller_token, project):
    server.put_agent("late", admin, [[{"say": "hi"}], [call("myapp_x")]])
    async with calling(server, caller_token, LEGACY) as caller:
        await caller.start(project_id=project, agent="late", context=lend("x"))
        await caller.until("turn_completed")
        session = caller.session_id
    done = server.api("session_message", admin, session_id=session, message="again", wait=True)
    with server.events(session, admin) as events:
        result = events.until("tool_result")
        assert not result["ok"] and "caller_disconnected" in json.dumps(result)
    assert done["turn"] == 2


async def test_requests_survive_a_reconnect_within_the_grace(admin):
    with running("[relay]\nreconnect_grace = '20s'\n") as server:
        admin, token = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("ask", admin, [[call("myapp_ask")]])
        started = server.api("session_message", token, message="go", project_id=project, agent="ask", context=lend("ask"))
        session = started["session_id"]
        with server.events(session, token, caller_id="myapp") as events:
            request = events.until("caller_tool_request")
            index = request["index"]
        # After a reconnect the same request is delivered again, and answered once.
        with server.events(session, token, since=index - 1, caller_id="myapp") as events:
            again = events.until("caller_tool_request")
            assert again["request_id"] == request["request_id"]
            server.api("caller_tool_response", token, session_id=session, request_id=again["request_id"], result="back")
            assert events.until("tool_result")["ok"]


async def test_pending_requests_end_when_the_server_is_killed():
    with running() as server:
        admin, token = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("ask", admin, [[call("myapp_ask")]])
        started = server.api("session_message", token, message="go", project_id=project, agent="ask", context=lend("ask"))
        session = started["session_id"]
        with server.events(session, token, caller_id="myapp") as events:
            request = events.until("caller_tool_request")
        server.kill()
        server.start()
        log = server.api("session_events", admin, session_id=session, max_events=1000)["events"]
        assert [e["index"] for e in log] == list(range(len(log)))
        done = [e for e in log if e["type"] == "caller_tool_done" and e["request_id"] == request["request_id"]]
        assert len(done) == 1 and done[0]["outcome"] in ("disconnected", "cancelled")
        with pytest.raises(ToolFailed) as late:
            server.api("caller_tool_response", token, session_id=session, request_id=request["request_id"], result=1)
        assert late.value.code == "not_found"


# -- the new lifecycle's own streams -----------------------------------------------------------------


async def test_modern_streams_carry_the_events_when_asked(server, admin, caller_token, project):
    server.put_agent("ask", admin, [[call("myapp_ask"), {"say": "done"}]])
    heard = []

    async def listen(message):
        heard.append(message.data)
        if message.data["type"] == "caller_tool_request":
            asyncio.get_running_loop().create_task(answer(message.data))

    async def answer(event):
        async with server.mcp(caller_token, MODERN) as other:
            await other.call("caller_tool_response", session_id=event["session_id"], request_id=event["request_id"], result="ok")

    async with server.mcp(caller_token, MODERN, logging_callback=listen) as mcp:
        done = await mcp.call("session_message", message="go", project_id=project, agent="ask", context=lend("ask"), wait=True)
        assert done["text"] == "done"
    types = [e["type"] for e in heard]
    assert "caller_tool_request" in types and "turn_completed" in types
    assert not {"delta", "thought", "plan", "usage"} & set(types)


# -- results keep their shape ------------------------------------------------------------------------


async def test_mcp_content_from_the_caller_keeps_its_shape(server, admin, caller_token, project, mode):
    server.put_agent("ask", admin, [[call("myapp_ask")]])
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    async with calling(server, caller_token, mode) as caller:
        await caller.start(project_id=project, agent="ask", context=lend("ask"))
        request = await caller.until("caller_tool_request")
        content = [{"type": "image", "data": pixel, "mimeType": "image/png"}, {"type": "text", "text": "a pixel"}]
        await caller.respond(request, result={"content": content, "structuredContent": {"pixels": 1}})
        result = json.dumps(await caller.until("tool_result"))
        assert pixel in result and '"pixels"' in result

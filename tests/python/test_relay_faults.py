"""The caller relay in difficult cases: caller presence, invalid lines on the relay socket, restarts.

Every test uses the real server. The agent's side is a raw relay socket or `oubliette-client` on stdio; the caller's
side is made of single HTTP requests, so that a test knows exactly when a stream or a poll is open.
"""

from __future__ import annotations

import contextlib
import json

import pytest

from caller import call, lend
from harness import Events, Server, ToolFailed, running, wait_until
from wire import Client, LegacyMcp, Link, ModernMcp, Relay, Request, poll

CONFIG = "[relay]\nreconnect_grace = '1ms'\n"
"""Practically no grace period, so that an absent caller is noticed at once."""

SOON = 20
"""Within how many seconds a leaving caller must be noticed. It is below 30, the time an answered poll counts as presence,
so that a test cannot pass because that time is over."""


@pytest.fixture(scope="module")
def server():
    with running(CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def token(server):
    return server.token("write")


@pytest.fixture(autouse=True)
def alone(server, admin):
    """Waits until the streams and polls of the previous test are closed."""
    for kind in ("stream", "poll"):
        wait_until(lambda: server.metric(admin, "oubliette_callers_held", kind=kind) == 0, f"the last {kind} to end")


class RelaySession:
    """One idle session with a tool `x` lent by `myapp`; its events are read with an admin token, which is no caller."""

    def __init__(self, server: Server, admin: str, token: str, project: str, turns: list | None = None, by=None):
        server.put_agent("quiet", admin, turns or [[{"say": "hi"}]])
        self.server, self.admin, self.token = server, admin, token
        start = {"message": "go", "project_id": project, "agent": "quiet", "context": lend("x")}
        started = by(**start) if by else server.api("session_message", token, **start)
        self.session = started["session_id"]
        self.log: Events = server.events(self.session, admin)
        self.log.until("turn_completed")
        self.idle = self.log.until("status", status="idle")
        self.path = server.api("session_get", admin, session_id=self.session)["relay_socket"]
        self.relay = Relay(self.path)
        self.calls = 0

    def __enter__(self) -> "RelaySession":
        return self

    def __exit__(self, *_) -> None:
        self.log.close()
        self.relay.close()
        with contextlib.suppress(ToolFailed):
            self.server.api("session_end", self.admin, session_id=self.session)

    def held(self, **kinds: int) -> None:
        """Waits until callers have this many streams or polls open."""
        for kind, count in kinds.items():
            wait_until(
                lambda: self.server.metric(self.admin, "oubliette_callers_held", kind=kind) == count,
                f"{count} {kind}(s) to be held open",
            )

    def ask(self) -> tuple[int, dict]:
        """Makes a call as the agent; returns its id and its request event."""
        self.calls += 1
        arguments = {"n": self.calls}
        id = self.relay.request("caller_tool", tool="x", arguments=arguments)
        return id, self.log.until("caller_tool_request", arguments=arguments)

    def respond(self, request: dict, **answer) -> None:
        arguments = {"session_id": self.session, "request_id": request["request_id"], **answer}
        self.server.api("caller_tool_response", self.token, **arguments)

    def present(self) -> None:
        """Checks that the caller counts as present: a call waits for its answer."""
        id, request = self.ask()
        self.respond(request, result="here")
        assert self.relay.answer(id)["result"] == "here"

    def absent(self) -> None:
        """Checks that the caller counts as absent: a call fails with `caller_disconnected`."""
        self.lost(*self.ask())

    def lost(self, id: int, request: dict) -> None:
        """Checks that an open call ends because the caller left, not because of a timeout."""
        done = self.log.until("caller_tool_done", SOON, request_id=request["request_id"])
        assert done["outcome"] == "disconnected"
        error = self.relay.answer(id)["error"]
        assert error["code"] == -32005 and error["data"]["code"] == "caller_disconnected", error

    def leave(self) -> None:
        """Makes the caller absent: it opens a stream and closes it, which counts as leaving."""
        stream = Request(self.server, "GET", f"/api/sessions/{self.session}/events?caller_id=myapp", self.token)
        assert stream.response.status == 200
        stream.close()
        self.held(stream=0)
        self.absent()


@pytest.fixture
def relay_session(server, admin, token, project):
    with RelaySession(server, admin, token, project) as relay_session:
        yield relay_session


# -- presence: streams -------------------------------------------------------------------------------


def test_declaring_counts_like_an_answered_poll(relay_session):
    relay_session.present()


def test_a_legacy_stream_broken_off_is_leaving(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    stream = mcp.stream()
    with RelaySession(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as relay_session:
        relay_session.present()
        open_call = relay_session.ask()
        stream.close()
        relay_session.lost(*open_call)
        relay_session.absent()
        # A caller that reconnects is present again.
        with mcp.stream():
            relay_session.present()


def test_deleting_the_mcp_session_is_leaving(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    with mcp.stream(), RelaySession(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as relay_session:
        open_call = relay_session.ask()
        mcp.delete()
        relay_session.lost(*open_call)
        relay_session.absent()


def test_deleting_an_mcp_session_without_a_stream_is_leaving_too(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    with RelaySession(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as relay_session:
        relay_session.present()
        mcp.delete()
        relay_session.absent()


def test_another_mcp_session_of_the_same_principal_does_not_count(server, admin, token, project):
    mine, other = LegacyMcp(server, token), LegacyMcp(server, token)
    stream = mine.stream()
    with RelaySession(server, admin, token, project, by=lambda **a: mine.call("session_message", **a)) as relay_session:
        stream.close()
        relay_session.held(stream=0)
        relay_session.absent()
        with other.stream():
            relay_session.held(stream=1)
            relay_session.absent()
            # Neither does its poll, nor a poll without any MCP session.
            other.call("session_events", session_id=relay_session.session)
            server.api("session_events", token, session_id=relay_session.session)
            relay_session.absent()
        mine.call("session_events", session_id=relay_session.session)
        relay_session.present()


def test_an_api_stream_counts_only_with_its_caller_id(relay_session, server):
    relay_session.leave()
    path = f"/api/sessions/{relay_session.session}/events"
    with Request(server, "GET", path, relay_session.token) as plain:
        assert plain.response.status == 200
        relay_session.absent()
    with Request(server, "GET", f"{path}?caller_id=other", relay_session.token) as other:
        assert other.response.status == 200
        relay_session.absent()
    with Request(server, "GET", f"{path}?caller_id=myapp", server.token("write")) as foreign:
        assert foreign.response.status == 200
        relay_session.absent()
    stream = Request(server, "GET", f"{path}?caller_id=myapp", relay_session.token)
    assert stream.response.status == 200
    relay_session.present()
    open_call = relay_session.ask()
    stream.close()
    relay_session.lost(*open_call)


def test_a_second_stream_keeps_the_caller_present(relay_session, server):
    path = f"/api/sessions/{relay_session.session}/events?caller_id=myapp"
    first, second = (Request(server, "GET", path, relay_session.token) for _ in range(2))
    assert first.response.status == second.response.status == 200
    first.close()
    relay_session.held(stream=1)
    relay_session.present()
    second.close()
    relay_session.held(stream=0)
    relay_session.absent()


def test_a_caller_that_comes_back_is_told_what_still_waits_for_it(relay_session, server):
    path = f"/api/sessions/{relay_session.session}/events"
    (_, first), (id, answered), (_, second) = relay_session.ask(), relay_session.ask(), relay_session.ask()
    relay_session.respond(answered, result="done")
    assert relay_session.relay.answer(id)["result"] == "done"
    relay_session.log.until("caller_tool_done")
    last = relay_session.log.seen[-1]["index"]

    def told(stream: Request, count: int) -> list[tuple[str, int]]:
        """Type and index of the next events; checks that the SSE id is the index."""
        lines, heard = iter(stream.response), []
        for line in lines:
            if line.startswith(b"id:"):
                at = int(line[3:])
            elif line.startswith(b"data:"):
                event = json.loads(line[5:])
                assert at == event["index"]
                heard.append((event["type"], at))
                if len(heard) == count:
                    return heard

    mine = f"{path}?caller_id=myapp"
    opened = [
        Request(server, "GET", f"{mine}&since_index={last}", relay_session.token),
        Request(server, "GET", mine, relay_session.token, Last_Event_ID=str(last)),
        # Neither of these streams is the caller's.
        Request(server, "GET", f"{path}?since_index={last}", relay_session.token),
        Request(server, "GET", f"{mine}&since_index={last}", server.token("write")),
        # This stream gets them at their place in the log.
        Request(server, "GET", f"{mine}&since_index={first['index'] - 1}", relay_session.token),
    ]
    with contextlib.ExitStack() as streams:
        for stream in opened:
            streams.enter_context(stream)
            assert stream.response.status == 200
        _, third = relay_session.ask()
        requests = [("caller_tool_request", event["index"]) for event in (first, second, third)]
        assert told(opened[0], 3) == told(opened[1], 3) == requests
        assert told(opened[2], 1) == told(opened[3], 1) == requests[2:]
        whole = told(opened[4], third["index"] - first["index"] + 1)
        assert [index for _, index in whole] == list(range(first["index"], third["index"] + 1))


def test_a_modern_subscription_counts_while_it_is_open(relay_session, server):
    relay_session.leave()
    listening = ModernMcp(server, relay_session.token).listen(relay_session.session)
    relay_session.held(stream=1)
    relay_session.present()
    open_call = relay_session.ask()
    listening.close()
    relay_session.lost(*open_call)
    relay_session.absent()


# -- presence: polls ---------------------------------------------------------------------------------


def begin_poll(how: str, relay_session: RelaySession, since: int) -> Request:
    arguments = {"session_id": relay_session.session, "since_index": since, "wait_ms": 50_000}
    if how == "api":
        return poll(relay_session.server, relay_session.token, relay_session.session, since)
    return ModernMcp(relay_session.server, relay_session.token).begin("session_events", **arguments)


@pytest.mark.parametrize("how", ["api", "modern"])
def test_a_poll_broken_off_is_leaving_at_once(relay_session, how):
    open_call = relay_session.ask()
    waiting = begin_poll(how, relay_session, open_call[1]["index"])
    relay_session.held(poll=1)
    waiting.close()
    relay_session.lost(*open_call)
    relay_session.absent()


def test_a_legacy_poll_broken_off_is_leaving_at_once(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    with RelaySession(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as relay_session:
        id, request = relay_session.ask()
        waiting = mcp.begin("session_events", session_id=relay_session.session, since_index=request["index"], wait_ms=50_000)
        relay_session.held(poll=1)
        waiting.close()
        relay_session.lost(id, request)
        relay_session.absent()


@pytest.mark.parametrize("how", ["api", "modern"])
def test_an_open_poll_counts_and_so_does_one_just_answered(relay_session, how):
    relay_session.leave()
    waiting = begin_poll(how, relay_session, relay_session.log.seen[-1]["index"])
    relay_session.held(poll=1)
    # The call's own event answers the poll; from then on the caller counts as present because of the answered poll.
    id, request = relay_session.ask()
    answer = waiting.json()
    answer = answer if how == "api" else answer["result"]["structuredContent"]
    assert request["request_id"] in [e.get("request_id") for e in answer["events"]]
    waiting.close()
    relay_session.held(poll=0)
    relay_session.respond(request, result="still here")
    assert relay_session.relay.answer(id)["result"] == "still here"
    relay_session.present()


def test_somebody_elses_poll_does_not_count(relay_session, server):
    relay_session.leave()
    server.api("session_events", relay_session.admin, session_id=relay_session.session)
    relay_session.absent()
    server.api("session_events", relay_session.token, session_id=relay_session.session)
    relay_session.present()


# -- presence: waiting messages ----------------------------------------------------------------------


def begin_message(how: str, relay_session: RelaySession) -> Request:
    arguments = {"session_id": relay_session.session, "message": "again", "wait": True}
    if how == "api":
        return Request(relay_session.server, "POST", "/api/tools/session_message", relay_session.token, arguments)
    return ModernMcp(relay_session.server, relay_session.token).begin("session_message", **arguments)


@pytest.mark.parametrize("how", ["api", "modern"])
def test_a_waiting_message_counts(server, admin, token, project, how):
    with RelaySession(server, admin, token, project, [[{"say": "hi"}], [call("myapp_x"), {"say": "done"}]]) as relay_session:
        relay_session.leave()
        waiting = begin_message(how, relay_session)
        relay_session.log.until("message", role="user")
        request = relay_session.log.until("caller_tool_request")
        relay_session.respond(request, result="ok")
        answer = waiting.json()
        waiting.close()
        answer = answer if how == "api" else answer["result"]["structuredContent"]
        assert answer["text"] == "done"


@pytest.mark.parametrize("how", ["api", "modern"])
def test_a_waiting_message_broken_off_is_leaving_and_the_turn_goes_on(server, admin, token, project, how):
    with RelaySession(server, admin, token, project, [[{"say": "hi"}], [call("myapp_x"), {"say": "done"}]]) as relay_session:
        waiting = begin_message(how, relay_session)
        request = relay_session.log.until("caller_tool_request")
        waiting.close()
        done = relay_session.log.until("caller_tool_done", SOON, request_id=request["request_id"])
        assert done["outcome"] == "disconnected"
        assert relay_session.log.until("turn_completed")["text"] == "done"


def test_a_revoked_token_has_left(server, admin, project):
    made = server.api("token_create", admin, name="soon-gone", scope="write")
    with RelaySession(server, admin, made["token"], project) as relay_session:
        path = f"/api/sessions/{relay_session.session}/events?caller_id=myapp"
        with Request(server, "GET", path, made["token"]) as stream:
            assert stream.response.status == 200
            open_call = relay_session.ask()
            server.api("token_revoke", admin, token_id=made["token_id"])
            relay_session.lost(*open_call)


# -- several callers, names, schemas -----------------------------------------------------------------


def test_two_callers_with_one_tool_name_must_be_told_apart(relay_session, server):
    other = server.token("write")
    server.api("session_message", other, session_id=relay_session.session, message="x", context=lend("x", caller_id="second"), wait=True)
    ambiguous = relay_session.relay.call("caller_tool", tool="x", arguments={})["error"]
    assert ambiguous["code"] == -32602 and ambiguous["data"]["code"] == "invalid_argument"
    assert "myapp" in ambiguous["message"] and "second" in ambiguous["message"]
    id = relay_session.relay.request("caller_tool", tool="x", arguments={}, caller_id="second")
    request = relay_session.log.until("caller_tool_request")
    assert request["caller_id"] == "second"
    answer = {"session_id": relay_session.session, "request_id": request["request_id"], "result": 2}
    with pytest.raises(ToolFailed) as foreign:
        server.api("caller_tool_response", relay_session.token, **answer)
    assert foreign.value.code == "permission_denied"
    server.api("caller_tool_response", other, **answer)
    assert relay_session.relay.answer(id)["result"] == 2


def test_a_clashing_name_refuses_the_whole_declaration(server, admin, token, project):
    server.put_tool("reader", admin, kind="builtin", builtinPolicy={"name": "fs_read", "allowedPaths": ["."]})
    tools = {"use": ["reader"], "aliases": {"myapp_taken": "@reader/fs_read"}}
    server.put_agent("aliased", admin, [[{"say": "hi"}]], tools=tools)
    arguments = {"message": "go", "project_id": project, "agent": "aliased"}
    with pytest.raises(ToolFailed) as clash:
        server.api("session_message", token, **arguments, context=lend("free", "taken"))
    assert clash.value.code == "conflict" and "myapp_taken" in clash.value.message
    assert server.api("session_list", admin, project_id=project)["sessions"] == []
    started = server.api("session_message", token, **arguments, context=lend("free"), wait=True)
    with pytest.raises(ToolFailed) as clash:
        context = lend("other", "taken")
        server.api("session_message", token, session_id=started["session_id"], message="x", context=context)
    assert clash.value.code == "conflict"
    names = {row["name"] for row in server.api("tool_list", admin, session_id=started["session_id"])["tools"]}
    assert "myapp_free" in names and "myapp_other" not in names


def test_undeclared_tools_and_wrong_arguments_never_reach_the_caller(server, admin, token, project, relay_session):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    context = lend({"name": "typed", "inputSchema": schema})
    server.api("session_message", token, session_id=relay_session.session, message="x", context=context, wait=True)
    for params in (
        {"tool": "x", "arguments": {}},  # withdrawn by the new declaration
        {"tool": "nothing", "arguments": {}},
        {"tool": "typed", "arguments": {}, "caller_id": "nobody"},
        {"tool": "myapp_typed", "arguments": {"n": 1}},  # the socket expects names without the prefix
    ):
        error = relay_session.relay.call("caller_tool", **params)["error"]
        assert error["data"]["code"] == "not_found", error
    for arguments in ({}, {"n": "one"}):
        error = relay_session.relay.call("caller_tool", tool="typed", arguments=arguments)["error"]
        assert error["code"] == -32602 and error["data"]["code"] == "invalid_argument", error
    assert relay_session.relay.call("caller_tool", tool="typed", arguments=[1])["error"]["code"] == -32602
    assert relay_session.relay.call("caller_tool", tool="typed", argments={})["error"]["code"] == -32602
    log = server.api("session_events", admin, session_id=relay_session.session, max_events=1000)["events"]
    assert all(event["type"] != "caller_tool_request" for event in log)


# -- the socket --------------------------------------------------------------------------------------


def test_bad_lines_are_answered_and_the_connection_lives_on(relay_session):
    for line, code in (
        (b"this is not json", -32700),
        (b"\xff\xfe", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'"text"', -32600),
    ):
        relay_session.relay.send(line)
        answer = next(frame for frame in iter(relay_session.relay.read, None) if "method" not in frame)
        assert answer["error"]["code"] == code, line
    relay_session.relay.send(b"")
    assert "tools" in relay_session.relay.call("agent_tools")["result"]


def test_a_line_too_long_ends_its_connection_and_no_other(relay_session):
    with Relay(relay_session.path) as greedy:
        greedy.notice("caller_tools_config")
        waiting = relay_session.relay.request("caller_tool", tool="x", arguments={})
        request = relay_session.log.until("caller_tool_request")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            greedy.send(b'{"jsonrpc":"2.0","id":1,"method":"agent_tools","params":{"x":"' + b"x" * (16 << 20) + b'"}}')
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                greedy.read()
    relay_session.respond(request, result="unharmed")
    assert relay_session.relay.answer(waiting)["result"] == "unharmed"


def test_a_long_line_within_the_limit_is_taken(relay_session):
    text = "x" * (3 << 20)
    id = relay_session.relay.request("caller_tool", tool="x", arguments={"text": text})
    request = relay_session.log.until("caller_tool_request")
    assert request["arguments"]["text"] == text
    relay_session.respond(request, result=text)
    assert relay_session.relay.answer(id)["result"] == text


def test_every_connection_hears_every_callers_tools_and_their_changes(relay_session, server):
    def told(relay: Relay) -> tuple[str, list[str]]:
        frame = relay.notice("caller_tools_config")
        assert frame["jsonrpc"] == "2.0" and frame["type"] == "caller_tools_config"
        return frame["params"]["caller_id"], sorted(tool["name"] for tool in frame["params"]["tools"])

    other = server.token("write")

    def declare(token: str, context: dict) -> None:
        server.api("session_message", token, session_id=relay_session.session, message="x", context=context, wait=True)

    assert told(relay_session.relay) == ("myapp", ["x"])
    declare(other, lend("y", caller_id="second"))
    assert told(relay_session.relay) == ("second", ["y"])
    with Relay(relay_session.path) as late:
        assert sorted([told(late), told(late)]) == [("myapp", ["x"]), ("second", ["y"])]
        declare(relay_session.token, lend("x", "z"))
        assert told(late) == told(relay_session.relay) == ("myapp", ["x", "z"])
        declare(other, lend(caller_id="second"))
        assert told(late) == told(relay_session.relay) == ("second", [])
    with Relay(relay_session.path) as later:
        assert told(later) == ("myapp", ["x", "z"])
        # Withdrawn tools are not announced: the next line is the answer.
        assert "error" in later.call("caller_tool", tool="y", arguments={})
        assert [n for n in later.notices if n["method"] == "caller_tools_config"] == []


def test_a_connection_that_ends_cancels_its_calls_and_no_others(relay_session):
    with Relay(relay_session.path) as leaving:
        leaving.request("caller_tool", tool="x", arguments={"of": "leaving"})
        gone = relay_session.log.until("caller_tool_request")
        id, kept = relay_session.ask()
    done = relay_session.log.until("caller_tool_done", request_id=gone["request_id"])
    assert done["outcome"] == "cancelled"
    relay_session.respond(kept, result="kept")
    assert relay_session.relay.answer(id)["result"] == "kept"


def test_ending_the_session_ends_its_calls_and_its_socket(server, admin, token, project):
    with RelaySession(server, admin, token, project) as relay_session:
        _, request = relay_session.ask()
        server.api("session_end", admin, session_id=relay_session.session)
        assert relay_session.log.until("caller_tool_done", request_id=request["request_id"])["outcome"] == "cancelled"
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                relay_session.relay.read()
        with pytest.raises(OSError):
            Relay(relay_session.path)
        with pytest.raises(ToolFailed) as late:
            relay_session.respond(request, result=1)
        assert late.value.code == "not_found"


# -- oubliette-client: progress, cancel, restarts ----------------------------------------------------


def test_a_waiting_call_reports_progress(relay_session):
    with Client(relay_session.path) as client:
        assert "myapp_x" in client.tools()
        id = client.begin("myapp_x", token="patience")
        request = relay_session.log.until("caller_tool_request")
        first = client.notified("notifications/progress", progressToken="patience")
        second = client.notified("notifications/progress", progressToken="patience")
        assert second["progress"] > first["progress"]
        relay_session.respond(request, result="at last")
        assert client.answer(id)["content"] == [{"type": "text", "text": "at last"}]


def test_a_call_the_agent_cancels_is_cancelled_for_the_caller(relay_session):
    with Client(relay_session.path) as client:
        client.tools()
        id = client.begin("myapp_x")
        request = relay_session.log.until("caller_tool_request")
        client.send({"method": "notifications/cancelled", "params": {"requestId": id, "reason": "enough"}})
        done = relay_session.log.until("caller_tool_done", request_id=request["request_id"])
        assert done["outcome"] == "cancelled"
        with pytest.raises(ToolFailed) as late:
            relay_session.respond(request, result=1)
        assert late.value.code == "not_found"


def test_the_client_hears_of_new_tools_while_it_runs(relay_session, server):
    with Client(relay_session.path) as client:
        assert "myapp_x" in client.tools()
        context = lend("y")
        server.api("session_message", relay_session.token, session_id=relay_session.session, message="x", context=context, wait=True)
        client.notified("notifications/tools/list_changed")
        # The first notification may be about the tools found at start.
        while "myapp_y" not in (names := client.tools()):
            client.notified("notifications/tools/list_changed")
        assert "myapp_x" not in names


def test_a_killed_server_fails_waiting_calls_and_comes_back_to_its_clients(project):
    with running(CONFIG) as server:
        admin, token = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p")["project_id"]
        with RelaySession(server, admin, token, project) as relay_session, Client(relay_session.path) as client:
            assert "myapp_x" in client.tools()
            raw, request = relay_session.ask()
            waiting = client.begin("myapp_x", {"of": "client"})
            requests = [request, relay_session.log.until("caller_tool_request")]
            server.kill()
            # Raw socket and client both learn at once that no answer will come.
            with pytest.raises((EOFError, ConnectionError)):
                relay_session.relay.answer(raw)
            failed = client.answer(waiting)
            assert failed["isError"] and "server" in json.dumps(failed), failed
            # While the server is down, calls fail at once with an error that says so.
            away = client.answer(client.begin("myapp_x"))
            assert away["isError"] and "server" in json.dumps(away), away
            server.start()
            log = server.api("session_events", admin, session_id=relay_session.session, max_events=1000)["events"]
            assert [e["index"] for e in log] == list(range(len(log)))
            for request in requests:
                done = [e for e in log if e["type"] == "caller_tool_done" and e["request_id"] == request["request_id"]]
                assert len(done) == 1 and done[0]["outcome"] in ("cancelled", "disconnected"), done
                with pytest.raises(ToolFailed) as late:
                    relay_session.respond(request, result=1)
                assert late.value.code == "not_found"
            # After the session is resumed its socket has the same path, and the client its tools.
            context = lend("x", "new")
            server.api("session_message", token, session_id=relay_session.session, message="wake", context=context, wait=True)
            wait_until(lambda: "myapp_new" in client.tools(), "the tools to be back")
            with server.events(relay_session.session, admin, since=log[-1]["index"]) as events:
                id = client.begin("myapp_x", {"after": "restart"})
                request = events.until("caller_tool_request", arguments={"after": "restart"})
                relay_session.respond(request, result="back")
                assert client.answer(id)["content"] == [{"type": "text", "text": "back"}]


def test_a_server_that_stops_in_order_ends_waiting_calls():
    with running(CONFIG) as server:
        admin, token = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p")["project_id"]
        with RelaySession(server, admin, token, project) as relay_session, Client(relay_session.path) as client:
            client.tools()
            waiting = client.begin("myapp_x")
            request = relay_session.log.until("caller_tool_request")
            assert server.stop() == 0
            assert client.answer(waiting)["isError"]
            server.start()
            log = server.api("session_events", admin, session_id=relay_session.session, max_events=1000)["events"]
            done = [e for e in log if e["type"] == "caller_tool_done" and e["request_id"] == request["request_id"]]
            assert len(done) == 1 and done[0]["outcome"] in ("cancelled", "disconnected")


# -- faults of the caller's own connection -----------------------------------------------------------


def test_a_cut_connection_is_a_stream_broken_off(relay_session, server):
    with Link(server.port) as link:
        near = Server.__new__(Server)
        near.port = link.port
        stream = Request(near, "GET", f"/api/sessions/{relay_session.session}/events?caller_id=myapp", relay_session.token)
        assert stream.response.status == 200
        open_call = relay_session.ask()
        link.cut()
        relay_session.lost(*open_call)


def test_an_answer_broken_off_half_way_is_given_or_not_given(relay_session, server):
    # The stream keeps the caller present for the whole test.
    with Request(server, "GET", f"/api/sessions/{relay_session.session}/events?caller_id=myapp", relay_session.token) as stream:
        assert stream.response.status == 200
        for n in range(50):
            id = relay_session.relay.request("caller_tool", tool="x", arguments={"n": n})
            request = relay_session.log.until("caller_tool_request", arguments={"n": n})
            body = {"session_id": relay_session.session, "request_id": request["request_id"], "result": n}
            # Sent, and the connection closed: the caller cannot know whether it was accepted, so it sends it again.
            Request(server, "POST", "/api/tools/caller_tool_response", relay_session.token, body).close()
            try:
                relay_session.respond(request, result=n)
            except ToolFailed as refused:
                assert refused.code == "conflict"
            assert relay_session.log.until("caller_tool_done", request_id=request["request_id"])["outcome"] == "answered"
            assert relay_session.relay.answer(id)["result"] == n

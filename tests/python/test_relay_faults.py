"""The caller relay where it is hard: who is present, what a socket takes, what a restart leaves.

Every test drives the real server. Agents' sides are raw relay sockets or `oubliette-client` on stdio; callers' sides
are single HTTP requests, so that a test knows when exactly a stream or a poll is open.
"""

from __future__ import annotations

import contextlib
import json

import pytest

from caller import call, lend
from harness import Events, Server, ToolFailed, running, wait_until
from wire import Client, LegacyMcp, Link, ModernMcp, Relay, Request, poll

CONFIG = "[relay]\nreconnect_grace = '1ms'\n"
"""No grace to speak of: whoever is absent is found out at once, and by nothing else than being absent."""

SOON = 20
"""Seconds in which leaving is seen. An answered poll counts for 30: past those anybody is absent."""


@pytest.fixture(scope="module")
def server():
    with running(CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def token(server):
    return server.token("write")


@pytest.fixture(autouse=True)
def alone(server, admin):
    """Nobody who was there in the test before counts in this one."""
    for kind in ("stream", "poll"):
        wait_until(lambda: server.metric(admin, "oubliette_callers_held", kind=kind) == 0, f"the last {kind} to end")


class Scene:
    """One idle session that `myapp` lends a tool `x`, watched by an admin, who is no caller."""

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

    def __enter__(self) -> "Scene":
        return self

    def __exit__(self, *_) -> None:
        self.log.close()
        self.relay.close()
        with contextlib.suppress(ToolFailed):
            self.server.api("session_end", self.admin, session_id=self.session)

    def held(self, **kinds: int) -> None:
        """Waits until callers hold this open."""
        for kind, count in kinds.items():
            wait_until(
                lambda: self.server.metric(self.admin, "oubliette_callers_held", kind=kind) == count,
                f"{count} {kind}(s) to be held open",
            )

    def ask(self) -> tuple[int, dict]:
        """A call by the agent, and its event."""
        self.calls += 1
        arguments = {"n": self.calls}
        id = self.relay.request("caller_tool", tool="x", arguments=arguments)
        return id, self.log.until("caller_tool_request", arguments=arguments)

    def respond(self, request: dict, **answer) -> None:
        arguments = {"session_id": self.session, "request_id": request["request_id"], **answer}
        self.server.api("caller_tool_response", self.token, **arguments)

    def present(self) -> None:
        """The caller is taken for present: a call waits for its answer."""
        id, request = self.ask()
        self.respond(request, result="here")
        assert self.relay.answer(id)["result"] == "here"

    def absent(self) -> None:
        """The caller is taken for absent: a call fails as it does."""
        self.lost(*self.ask())

    def lost(self, id: int, request: dict) -> None:
        """An open call ends because the caller left, before anything times out or an answered poll counts no more."""
        done = self.log.until("caller_tool_done", SOON, request_id=request["request_id"])
        assert done["outcome"] == "disconnected"
        error = self.relay.answer(id)["error"]
        assert error["code"] == -32005 and error["data"]["code"] == "caller_disconnected", error

    def leave(self) -> None:
        """Whatever counted until now no longer does: a stream opened and broken off is leaving."""
        stream = Request(self.server, "GET", f"/api/sessions/{self.session}/events?caller_id=myapp", self.token)
        assert stream.response.status == 200
        stream.close()
        self.held(stream=0)
        self.absent()


@pytest.fixture
def scene(server, admin, token, project):
    with Scene(server, admin, token, project) as scene:
        yield scene


# -- presence: streams -------------------------------------------------------------------------------


def test_declaring_counts_like_an_answered_poll(scene):
    scene.present()


def test_a_legacy_stream_broken_off_is_leaving(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    stream = mcp.stream()
    with Scene(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as scene:
        scene.present()
        open_call = scene.ask()
        stream.close()
        scene.lost(*open_call)
        scene.absent()
        # Coming back is being there again.
        with mcp.stream():
            scene.present()


def test_deleting_the_mcp_session_is_leaving(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    with mcp.stream(), Scene(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as scene:
        open_call = scene.ask()
        mcp.delete()
        scene.lost(*open_call)
        scene.absent()


def test_deleting_an_mcp_session_without_a_stream_is_leaving_too(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    with Scene(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as scene:
        scene.present()
        mcp.delete()
        scene.absent()


def test_another_mcp_session_of_the_same_principal_does_not_count(server, admin, token, project):
    mine, other = LegacyMcp(server, token), LegacyMcp(server, token)
    stream = mine.stream()
    with Scene(server, admin, token, project, by=lambda **a: mine.call("session_message", **a)) as scene:
        stream.close()
        scene.held(stream=0)
        scene.absent()
        with other.stream():
            scene.held(stream=1)
            scene.absent()
            # Nor does its poll, nor one without any MCP session.
            other.call("session_events", session_id=scene.session)
            server.api("session_events", token, session_id=scene.session)
            scene.absent()
        mine.call("session_events", session_id=scene.session)
        scene.present()


def test_an_api_stream_counts_only_with_its_caller_id(scene, server):
    scene.leave()
    path = f"/api/sessions/{scene.session}/events"
    with Request(server, "GET", path, scene.token) as plain:
        assert plain.response.status == 200
        scene.absent()
    with Request(server, "GET", f"{path}?caller_id=other", scene.token) as other:
        assert other.response.status == 200
        scene.absent()
    with Request(server, "GET", f"{path}?caller_id=myapp", server.token("write")) as foreign:
        assert foreign.response.status == 200
        scene.absent()
    stream = Request(server, "GET", f"{path}?caller_id=myapp", scene.token)
    assert stream.response.status == 200
    scene.present()
    open_call = scene.ask()
    stream.close()
    scene.lost(*open_call)


def test_a_second_stream_keeps_the_caller_present(scene, server):
    path = f"/api/sessions/{scene.session}/events?caller_id=myapp"
    first, second = (Request(server, "GET", path, scene.token) for _ in range(2))
    assert first.response.status == second.response.status == 200
    first.close()
    scene.held(stream=1)
    scene.present()
    second.close()
    scene.held(stream=0)
    scene.absent()


def test_a_caller_that_comes_back_is_told_what_still_waits_for_it(scene, server):
    path = f"/api/sessions/{scene.session}/events"
    (_, first), (id, answered), (_, second) = scene.ask(), scene.ask(), scene.ask()
    scene.respond(answered, result="done")
    assert scene.relay.answer(id)["result"] == "done"
    scene.log.until("caller_tool_done")
    last = scene.log.seen[-1]["index"]

    def told(stream: Request, count: int) -> list[tuple[str, int]]:
        """Type and index of the next events, each with its index as its id."""
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
        Request(server, "GET", f"{mine}&since_index={last}", scene.token),
        Request(server, "GET", mine, scene.token, Last_Event_ID=str(last)),
        # Neither of these is the caller.
        Request(server, "GET", f"{path}?since_index={last}", scene.token),
        Request(server, "GET", f"{mine}&since_index={last}", server.token("write")),
        # This one hears them in their place.
        Request(server, "GET", f"{mine}&since_index={first['index'] - 1}", scene.token),
    ]
    with contextlib.ExitStack() as streams:
        for stream in opened:
            streams.enter_context(stream)
            assert stream.response.status == 200
        _, third = scene.ask()
        requests = [("caller_tool_request", event["index"]) for event in (first, second, third)]
        assert told(opened[0], 3) == told(opened[1], 3) == requests
        assert told(opened[2], 1) == told(opened[3], 1) == requests[2:]
        whole = told(opened[4], third["index"] - first["index"] + 1)
        assert [index for _, index in whole] == list(range(first["index"], third["index"] + 1))


def test_a_modern_subscription_counts_while_it_is_open(scene, server):
    scene.leave()
    listening = ModernMcp(server, scene.token).listen(scene.session)
    scene.held(stream=1)
    scene.present()
    open_call = scene.ask()
    listening.close()
    scene.lost(*open_call)
    scene.absent()


# -- presence: polls ---------------------------------------------------------------------------------


def begin_poll(how: str, scene: Scene, since: int) -> Request:
    arguments = {"session_id": scene.session, "since_index": since, "wait_ms": 50_000}
    if how == "api":
        return poll(scene.server, scene.token, scene.session, since)
    return ModernMcp(scene.server, scene.token).begin("session_events", **arguments)


@pytest.mark.parametrize("how", ["api", "modern"])
def test_a_poll_broken_off_is_leaving_at_once(scene, how):
    open_call = scene.ask()
    waiting = begin_poll(how, scene, open_call[1]["index"])
    scene.held(poll=1)
    waiting.close()
    scene.lost(*open_call)
    scene.absent()


def test_a_legacy_poll_broken_off_is_leaving_at_once(server, admin, token, project):
    mcp = LegacyMcp(server, token)
    with Scene(server, admin, token, project, by=lambda **a: mcp.call("session_message", **a)) as scene:
        id, request = scene.ask()
        waiting = mcp.begin("session_events", session_id=scene.session, since_index=request["index"], wait_ms=50_000)
        scene.held(poll=1)
        waiting.close()
        scene.lost(id, request)
        scene.absent()


@pytest.mark.parametrize("how", ["api", "modern"])
def test_an_open_poll_counts_and_so_does_one_just_answered(scene, how):
    scene.leave()
    waiting = begin_poll(how, scene, scene.log.seen[-1]["index"])
    scene.held(poll=1)
    # The call's own event answers the poll: for the rest of the call only that it was answered counts.
    id, request = scene.ask()
    answer = waiting.json()
    answer = answer if how == "api" else answer["result"]["structuredContent"]
    assert request["request_id"] in [e.get("request_id") for e in answer["events"]]
    waiting.close()
    scene.held(poll=0)
    scene.respond(request, result="still here")
    assert scene.relay.answer(id)["result"] == "still here"
    scene.present()


def test_somebody_elses_poll_does_not_count(scene, server):
    scene.leave()
    server.api("session_events", scene.admin, session_id=scene.session)
    scene.absent()
    server.api("session_events", scene.token, session_id=scene.session)
    scene.present()


# -- presence: waiting messages ----------------------------------------------------------------------


def begin_message(how: str, scene: Scene) -> Request:
    arguments = {"session_id": scene.session, "message": "again", "wait": True}
    if how == "api":
        return Request(scene.server, "POST", "/api/tools/session_message", scene.token, arguments)
    return ModernMcp(scene.server, scene.token).begin("session_message", **arguments)


@pytest.mark.parametrize("how", ["api", "modern"])
def test_a_waiting_message_counts(server, admin, token, project, how):
    with Scene(server, admin, token, project, [[{"say": "hi"}], [call("myapp_x"), {"say": "done"}]]) as scene:
        scene.leave()
        waiting = begin_message(how, scene)
        scene.log.until("message", role="user")
        request = scene.log.until("caller_tool_request")
        scene.respond(request, result="ok")
        answer = waiting.json()
        waiting.close()
        answer = answer if how == "api" else answer["result"]["structuredContent"]
        assert answer["text"] == "done"


@pytest.mark.parametrize("how", ["api", "modern"])
def test_a_waiting_message_broken_off_is_leaving_and_the_turn_goes_on(server, admin, token, project, how):
    with Scene(server, admin, token, project, [[{"say": "hi"}], [call("myapp_x"), {"say": "done"}]]) as scene:
        waiting = begin_message(how, scene)
        request = scene.log.until("caller_tool_request")
        waiting.close()
        done = scene.log.until("caller_tool_done", SOON, request_id=request["request_id"])
        assert done["outcome"] == "disconnected"
        assert scene.log.until("turn_completed")["text"] == "done"


def test_a_revoked_token_has_left(server, admin, project):
    made = server.api("token_create", admin, name="soon-gone", scope="write")
    with Scene(server, admin, made["token"], project) as scene:
        path = f"/api/sessions/{scene.session}/events?caller_id=myapp"
        with Request(server, "GET", path, made["token"]) as stream:
            assert stream.response.status == 200
            open_call = scene.ask()
            server.api("token_revoke", admin, token_id=made["token_id"])
            scene.lost(*open_call)


# -- several callers, names, schemas -----------------------------------------------------------------


def test_two_callers_with_one_tool_name_must_be_told_apart(scene, server):
    other = server.token("write")
    server.api("session_message", other, session_id=scene.session, message="x", context=lend("x", caller_id="second"), wait=True)
    ambiguous = scene.relay.call("caller_tool", tool="x", arguments={})["error"]
    assert ambiguous["code"] == -32602 and ambiguous["data"]["code"] == "invalid_argument"
    assert "myapp" in ambiguous["message"] and "second" in ambiguous["message"]
    id = scene.relay.request("caller_tool", tool="x", arguments={}, caller_id="second")
    request = scene.log.until("caller_tool_request")
    assert request["caller_id"] == "second"
    answer = {"session_id": scene.session, "request_id": request["request_id"], "result": 2}
    with pytest.raises(ToolFailed) as foreign:
        server.api("caller_tool_response", scene.token, **answer)
    assert foreign.value.code == "permission_denied"
    server.api("caller_tool_response", other, **answer)
    assert scene.relay.answer(id)["result"] == 2


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


def test_undeclared_tools_and_wrong_arguments_never_reach_the_caller(server, admin, token, project, scene):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    context = lend({"name": "typed", "inputSchema": schema})
    server.api("session_message", token, session_id=scene.session, message="x", context=context, wait=True)
    for params in (
        {"tool": "x", "arguments": {}},  # withdrawn by the new declaration
        {"tool": "nothing", "arguments": {}},
        {"tool": "typed", "arguments": {}, "caller_id": "nobody"},
        {"tool": "myapp_typed", "arguments": {"n": 1}},  # the socket takes names unprefixed
    ):
        error = scene.relay.call("caller_tool", **params)["error"]
        assert error["data"]["code"] == "not_found", error
    for arguments in ({}, {"n": "one"}):
        error = scene.relay.call("caller_tool", tool="typed", arguments=arguments)["error"]
        assert error["code"] == -32602 and error["data"]["code"] == "invalid_argument", error
    assert scene.relay.call("caller_tool", tool="typed", arguments=[1])["error"]["code"] == -32602
    assert scene.relay.call("caller_tool", tool="typed", argments={})["error"]["code"] == -32602
    log = server.api("session_events", admin, session_id=scene.session, max_events=1000)["events"]
    assert all(event["type"] != "caller_tool_request" for event in log)


# -- the socket --------------------------------------------------------------------------------------


def test_bad_lines_are_answered_and_the_connection_lives_on(scene):
    for line, code in (
        (b"this is not json", -32700),
        (b"\xff\xfe", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'"text"', -32600),
    ):
        scene.relay.send(line)
        answer = next(frame for frame in iter(scene.relay.read, None) if "method" not in frame)
        assert answer["error"]["code"] == code, line
    scene.relay.send(b"")
    assert "tools" in scene.relay.call("agent_tools")["result"]


def test_a_line_too_long_ends_its_connection_and_no_other(scene):
    with Relay(scene.path) as greedy:
        greedy.notice("caller_tools_config")
        waiting = scene.relay.request("caller_tool", tool="x", arguments={})
        request = scene.log.until("caller_tool_request")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            greedy.send(b'{"jsonrpc":"2.0","id":1,"method":"agent_tools","params":{"x":"' + b"x" * (16 << 20) + b'"}}')
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                greedy.read()
    scene.respond(request, result="unharmed")
    assert scene.relay.answer(waiting)["result"] == "unharmed"


def test_a_long_line_within_the_limit_is_taken(scene):
    text = "x" * (3 << 20)
    id = scene.relay.request("caller_tool", tool="x", arguments={"text": text})
    request = scene.log.until("caller_tool_request")
    assert request["arguments"]["text"] == text
    scene.respond(request, result=text)
    assert scene.relay.answer(id)["result"] == text


def test_every_connection_hears_every_callers_tools_and_their_changes(scene, server):
    def told(relay: Relay) -> tuple[str, list[str]]:
        frame = relay.notice("caller_tools_config")
        assert frame["jsonrpc"] == "2.0" and frame["type"] == "caller_tools_config"
        return frame["params"]["caller_id"], sorted(tool["name"] for tool in frame["params"]["tools"])

    other = server.token("write")

    def declare(token: str, context: dict) -> None:
        server.api("session_message", token, session_id=scene.session, message="x", context=context, wait=True)

    assert told(scene.relay) == ("myapp", ["x"])
    declare(other, lend("y", caller_id="second"))
    assert told(scene.relay) == ("second", ["y"])
    with Relay(scene.path) as late:
        assert sorted([told(late), told(late)]) == [("myapp", ["x"]), ("second", ["y"])]
        declare(scene.token, lend("x", "z"))
        assert told(late) == told(scene.relay) == ("myapp", ["x", "z"])
        declare(other, lend(caller_id="second"))
        assert told(late) == told(scene.relay) == ("second", [])
    with Relay(scene.path) as later:
        assert told(later) == ("myapp", ["x", "z"])
        # What is withdrawn is not told of: the next answer comes at once.
        assert "error" in later.call("caller_tool", tool="y", arguments={})
        assert [n for n in later.notices if n["method"] == "caller_tools_config"] == []


def test_a_connection_that_ends_cancels_its_calls_and_no_others(scene):
    with Relay(scene.path) as leaving:
        leaving.request("caller_tool", tool="x", arguments={"of": "leaving"})
        gone = scene.log.until("caller_tool_request")
        id, kept = scene.ask()
    done = scene.log.until("caller_tool_done", request_id=gone["request_id"])
    assert done["outcome"] == "cancelled"
    scene.respond(kept, result="kept")
    assert scene.relay.answer(id)["result"] == "kept"


def test_ending_the_session_ends_its_calls_and_its_socket(server, admin, token, project):
    with Scene(server, admin, token, project) as scene:
        _, request = scene.ask()
        server.api("session_end", admin, session_id=scene.session)
        assert scene.log.until("caller_tool_done", request_id=request["request_id"])["outcome"] == "cancelled"
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                scene.relay.read()
        with pytest.raises(OSError):
            Relay(scene.path)
        with pytest.raises(ToolFailed) as late:
            scene.respond(request, result=1)
        assert late.value.code == "not_found"


# -- oubliette-client: progress, cancel, restarts ----------------------------------------------------


def test_a_waiting_call_reports_progress(scene):
    with Client(scene.path) as client:
        assert "myapp_x" in client.tools()
        id = client.begin("myapp_x", token="patience")
        request = scene.log.until("caller_tool_request")
        first = client.notified("notifications/progress", progressToken="patience")
        second = client.notified("notifications/progress", progressToken="patience")
        assert second["progress"] > first["progress"]
        scene.respond(request, result="at last")
        assert client.answer(id)["content"] == [{"type": "text", "text": "at last"}]


def test_a_call_the_agent_cancels_is_cancelled_for_the_caller(scene):
    with Client(scene.path) as client:
        client.tools()
        id = client.begin("myapp_x")
        request = scene.log.until("caller_tool_request")
        client.send({"method": "notifications/cancelled", "params": {"requestId": id, "reason": "enough"}})
        done = scene.log.until("caller_tool_done", request_id=request["request_id"])
        assert done["outcome"] == "cancelled"
        with pytest.raises(ToolFailed) as late:
            scene.respond(request, result=1)
        assert late.value.code == "not_found"


def test_the_client_hears_of_new_tools_while_it_runs(scene, server):
    with Client(scene.path) as client:
        assert "myapp_x" in client.tools()
        context = lend("y")
        server.api("session_message", scene.token, session_id=scene.session, message="x", context=context, wait=True)
        client.notified("notifications/tools/list_changed")
        # The first notice may be of the tools it found when it started.
        while "myapp_y" not in (names := client.tools()):
            client.notified("notifications/tools/list_changed")
        assert "myapp_x" not in names


def test_a_killed_server_fails_waiting_calls_and_comes_back_to_its_clients(project):
    with running(CONFIG) as server:
        admin, token = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p")["project_id"]
        with Scene(server, admin, token, project) as scene, Client(scene.path) as client:
            assert "myapp_x" in client.tools()
            raw, request = scene.ask()
            waiting = client.begin("myapp_x", {"of": "client"})
            requests = [request, scene.log.until("caller_tool_request")]
            server.kill()
            # Both kinds of agent learn at once that no answer will come.
            with pytest.raises((EOFError, ConnectionError)):
                scene.relay.answer(raw)
            failed = client.answer(waiting)
            assert failed["isError"] and "server" in json.dumps(failed), failed
            # While it is away calls fail at once and say so.
            away = client.answer(client.begin("myapp_x"))
            assert away["isError"] and "server" in json.dumps(away), away
            server.start()
            log = server.api("session_events", admin, session_id=scene.session, max_events=1000)["events"]
            assert [e["index"] for e in log] == list(range(len(log)))
            for request in requests:
                done = [e for e in log if e["type"] == "caller_tool_done" and e["request_id"] == request["request_id"]]
                assert len(done) == 1 and done[0]["outcome"] in ("cancelled", "disconnected"), done
                with pytest.raises(ToolFailed) as late:
                    scene.respond(request, result=1)
                assert late.value.code == "not_found"
            # Woken, the session has its socket again where it was, and the client its tools.
            context = lend("x", "new")
            server.api("session_message", token, session_id=scene.session, message="wake", context=context, wait=True)
            wait_until(lambda: "myapp_new" in client.tools(), "the tools to be back")
            with server.events(scene.session, admin, since=log[-1]["index"]) as events:
                id = client.begin("myapp_x", {"after": "restart"})
                request = events.until("caller_tool_request", arguments={"after": "restart"})
                scene.respond(request, result="back")
                assert client.answer(id)["content"] == [{"type": "text", "text": "back"}]


def test_a_server_that_stops_in_order_ends_waiting_calls():
    with running(CONFIG) as server:
        admin, token = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p")["project_id"]
        with Scene(server, admin, token, project) as scene, Client(scene.path) as client:
            client.tools()
            waiting = client.begin("myapp_x")
            request = scene.log.until("caller_tool_request")
            assert server.stop() == 0
            assert client.answer(waiting)["isError"]
            server.start()
            log = server.api("session_events", admin, session_id=scene.session, max_events=1000)["events"]
            done = [e for e in log if e["type"] == "caller_tool_done" and e["request_id"] == request["request_id"]]
            assert len(done) == 1 and done[0]["outcome"] in ("cancelled", "disconnected")


# -- faults of the caller's own connection -----------------------------------------------------------


def test_a_cut_connection_is_a_stream_broken_off(scene, server):
    with Link(server.port) as link:
        near = Server.__new__(Server)
        near.port = link.port
        stream = Request(near, "GET", f"/api/sessions/{scene.session}/events?caller_id=myapp", scene.token)
        assert stream.response.status == 200
        open_call = scene.ask()
        link.cut()
        scene.lost(*open_call)


def test_an_answer_broken_off_half_way_is_given_or_not_given(scene, server):
    # Its stream keeps the caller present, however long all this takes.
    with Request(server, "GET", f"/api/sessions/{scene.session}/events?caller_id=myapp", scene.token) as stream:
        assert stream.response.status == 200
        for n in range(50):
            id = scene.relay.request("caller_tool", tool="x", arguments={"n": n})
            request = scene.log.until("caller_tool_request", arguments={"n": n})
            body = {"session_id": scene.session, "request_id": request["request_id"], "result": n}
            # Sent and let go of: the caller cannot know whether it was taken, so it gives it again.
            Request(server, "POST", "/api/tools/caller_tool_response", scene.token, body).close()
            try:
                scene.respond(request, result=n)
            except ToolFailed as refused:
                assert refused.code == "conflict"
            assert scene.log.until("caller_tool_done", request_id=request["request_id"])["outcome"] == "answered"
            assert scene.relay.answer(id)["result"] == n

"""The package against a stub of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from stub_server import SESSION, TOKEN, StubServer

from oubliette_caller import Ended, Lend, Oubliette, Refused, Unreachable


def on_loop(test: Callable[[StubServer], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def run() -> None:
        async with StubServer() as stub:
            await asyncio.wait_for(test(stub), 30)

    def plain() -> None:
        asyncio.run(run())

    plain.__name__, plain.__doc__ = test.__name__, test.__doc__
    return plain


def lender(stub: StubServer) -> Lend:
    lend = Oubliette(stub.address, TOKEN).lend("myapp")

    @lend.tool
    async def double(n: int) -> int:
        """Doubles."""
        if n == 13:
            raise ValueError("unlucky")
        return n * 2

    return lend


@on_loop
async def test_a_function_is_declared_called_and_answered(stub: StubServer) -> None:
    async with lender(stub).start("Double one.") as session:
        message = await stub.called("session_message")
        assert message["message"] == "Double one."
        assert message["context"]["caller_id"] == "myapp"
        (tool,) = message["context"]["caller_tools"]
        assert tool["name"] == "double" and tool["description"] == "Doubles."
        assert tool["inputSchema"]["properties"] == {"n": {"type": "integer"}}
        assert (await stub.opened.get())["caller_id"] == "myapp"
        stub.request("r1", {"n": 1})
        assert await stub.answered() == ("r1", {"result": 2})
        stub.emit(type="turn_completed", turn=1, stop_reason="end_turn", text="two")
        assert (await session.turn()).text == "two"


@on_loop
async def test_what_a_function_raises_is_the_tools_error(stub: StubServer) -> None:
    lend = lender(stub)

    @lend.tool
    def odd() -> object:
        return object()

    async with lend.start("x"):
        await stub.called("session_message")
        stub.request("a", {"n": 13})
        assert await stub.answered() == ("a", {"error": "unlucky"})
        stub.request("b", {"wrong": 1})
        assert "unexpected keyword" in (await stub.answered())[1]["error"]
        stub.request("c", {}, tool="odd")
        assert "not JSON serializable" in (await stub.answered())[1]["error"]
        stub.request("d", {}, tool="gone")
        assert "gone" in (await stub.answered())[1]["error"]


@on_loop
async def test_requests_of_others_are_left_alone(stub: StubServer) -> None:
    async with lender(stub).start("x"):
        await stub.called("session_message")
        stub.request("other", {"n": 1}, caller="other")
        stub.request("mine", {"n": 1})
        assert (await stub.answered())[0] == "mine"


@on_loop
async def test_a_lost_stream_is_resumed_and_nothing_runs_twice(stub: StubServer) -> None:
    runs: list[int] = []
    lend = Oubliette(stub.address, TOKEN).lend("myapp")

    @lend.tool
    def double(n: int) -> int:
        runs.append(n)
        return n * 2

    async with lend.start("x"):
        await stub.called("session_message")
        await stub.opened.get()
        stub.request("r1", {"n": 1})
        await stub.answered()
        stub.hang_up()
        opened = await stub.opened.get()
        assert (opened["since_index"], opened["last"]) == ("0", "0")
        stub.send(stub.log[0])
        stub.request("r2", {"n": 2})
        assert await stub.answered() == ("r2", {"result": 4})
        stub.hang_up()
        stub.request("r3", {"n": 3})
        assert await stub.answered() == ("r3", {"result": 6})
        assert runs == [1, 2, 3]


@on_loop
async def test_functions_run_side_by_side(stub: StubServer) -> None:
    gate = asyncio.Event()
    lend = Oubliette(stub.address, TOKEN).lend("myapp")

    @lend.tool
    async def double(n: int) -> int:
        if n == 0:
            await gate.wait()
        return n * 2

    async with lend.start("x"):
        await stub.called("session_message")
        stub.request("slow", {"n": 0})
        for n in range(1, 31):
            stub.request(f"fast{n}", {"n": n})
        for _ in range(30):
            assert (await stub.answered())[0].startswith("fast")
        gate.set()
        assert (await stub.answered())[0] == "slow"


@on_loop
async def test_an_answer_is_sent_again_until_it_is_taken(stub: StubServer) -> None:
    stub.failing = 2
    async with lender(stub).start("x"):
        await stub.called("session_message")
        stub.request("r1", {"n": 1})
        assert await stub.answered() == ("r1", {"result": 2})


@on_loop
async def test_a_cancelled_request_stops_its_function(stub: StubServer) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()
    lend = Oubliette(stub.address, TOKEN).lend("myapp")

    @lend.tool
    async def double(n: int) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with lend.start("x"):
        await stub.called("session_message")
        stub.request("r1", {"n": 1})
        await started.wait()
        stub.emit(type="caller_tool_done", request_id="r1", outcome="cancelled")
        await stopped.wait()


@on_loop
async def test_joining_a_session_runs_only_what_is_still_open(stub: StubServer) -> None:
    stub.request("old", {"n": 1})
    stub.emit(type="caller_tool_done", request_id="old", outcome="answered")
    stub.emit(type="turn_completed", turn=1, stop_reason="end_turn", text="old")
    stub.request("open", {"n": 2})
    async with lender(stub).start("again", session_id=SESSION, agent="a"):
        for _ in range(3):
            await stub.called("session_events")
        message = await stub.called("session_message")
        assert (message["session_id"], message["agent"]) == (SESSION, "a")
        assert await stub.answered() == ("open", {"result": 4})
        stub.request("new", {"n": 3})
        assert await stub.answered() == ("new", {"result": 6})


@on_loop
async def test_a_failed_turn_and_an_ended_session_are_errors(stub: StubServer) -> None:
    kinds: list[str] = []
    lend = lender(stub)
    lend.on_event(lambda event: kinds.append(event["type"]))
    async with lend.start("x") as session:
        await stub.called("session_message")
        stub.emit(type="status", status="running")
        stub.emit(type="error", code="unavailable", message="no model")
        stub.emit(type="status", status="idle")
        with pytest.raises(Refused, match="no model"):
            await session.turn()
        assert await session.message("go on") == 1
        assert (await stub.called("session_message"))["context"]["caller_id"] == "myapp"
        stub.emit(type="status", status="ended", reason="done")
        assert isinstance(await session.ended(), Ended)
        # The failure is of the first turn, not of a later one.
        with pytest.raises(Refused, match="no model"):
            await session.turn(1)
        with pytest.raises(Ended):
            await session.turn(2)
        assert kinds == ["status", "error", "status", "status"]


@on_loop
async def test_a_bad_token_and_an_absent_server_say_so(stub: StubServer) -> None:
    with pytest.raises(Refused) as refused:
        async with Oubliette(stub.address, "oub_bad").lend("a").start("x"):
            pass
    assert refused.value.code == "unauthenticated"
    with pytest.raises(Unreachable):
        async with Oubliette("http://127.0.0.1:9", "t").lend("a").start("x"):
            pass
    with pytest.raises(ValueError):
        Oubliette("localhost", "t")
    assert "oub_bad" not in repr(Oubliette(stub.address, "oub_bad"))

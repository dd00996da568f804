"""The stream from where it was left, each request answered once, and what the program waits for."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import Ended, OublietteError, Refused, is_passing
from .sse import Parser

if TYPE_CHECKING:
    from .client import Connection
    from .lend import Lend

Event = dict[str, Any]
"""One event of a session: ``{"index", "ts", "session_id", "type", …}``."""

# How many request ids are remembered, to know a repeat.
REMEMBERED = 10_000
# Waits between attempts to deliver an answer; the request times out at the server after a minute.
RETRIES = (0.05, 0.1, 0.3, 1.0, 3.0, 9.0, 27.0)
# The first wait before connecting again, and the longest.
BACKOFF = (0.05, 5.0)


@dataclass(frozen=True)
class Turn:
    """A finished turn: its number, why it ended, all the agent said in it."""

    turn: int
    stop_reason: str
    text: str


class Session:
    """A session that has this program's tools."""

    def __init__(self, lend: Lend, connection: Connection, session_id: str, turn: int, last: int) -> None:
        self.id = session_id
        self.last_turn = turn
        self._lend = lend
        self._connection = connection
        self._last = last
        self._turns: dict[int, Turn] = {}
        self._trouble: OublietteError | None = None
        self._failed = False
        self._over: OublietteError | None = None
        self._changed = asyncio.Condition()
        self._places = asyncio.Semaphore(lend.concurrency)
        self._requests: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._following: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, lend: Lend, connection: Connection, arguments: dict[str, Any]) -> Session:
        """Sends the first message and begins to follow the session."""
        last, waiting = -1, list[Event]()
        if session_id := arguments.get("session_id"):
            last, waiting = await _join(connection, str(session_id))
        reply = await connection.call("session_message", {**arguments, "context": lend.context()})
        session = cls(lend, connection, reply["session_id"], reply.get("turn", 0), last)
        for event in waiting:
            session._request(event)
        session._following = asyncio.create_task(session._follow())
        return session

    async def message(self, text: str, **more: Any) -> int:
        """Sends another message; gives the number of the turn it begins."""
        arguments = {**more, "message": text, "session_id": self.id}
        reply = await self._connection.call("session_message", arguments)
        self.last_turn = int(reply.get("turn", 0))
        return self.last_turn

    async def ask(self, text: str, **more: Any) -> Turn:
        """Sends another message and waits for its turn to end."""
        return await self.turn(await self.message(text, **more))

    async def turn(self, number: int | None = None) -> Turn:
        """Waits for a turn to end: this one, or the one the last message began."""
        wanted = self.last_turn if number is None else number
        async with self._changed:
            while True:
                if wanted in self._turns:
                    return self._turns[wanted]
                if self._failed and self._trouble:
                    raise self._trouble
                if self._over:
                    raise self._over
                await self._changed.wait()

    async def ended(self) -> OublietteError:
        """Serves until the session ends; says why it did."""
        async with self._changed:
            while not self._over:
                await self._changed.wait()
            return self._over

    async def end(self) -> None:
        """Ends the session."""
        await self._connection.call("session_end", {"session_id": self.id})

    async def stop(self) -> None:
        """Stops serving; the session itself goes on."""
        tasks = [task for task in (self._following, *self._requests.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        wait = BACKOFF[0]
        while True:
            began = self._last
            try:
                await self._read()
                return
            except OublietteError as why:
                if not is_passing(why):
                    await self._change(over=why)
                    return
            if self._last > began:
                wait = BACKOFF[0]
            await asyncio.sleep(wait)
            wait = min(wait * 2, BACKOFF[1])

    async def _read(self) -> None:
        """One connection; returns when the session has ended."""
        parser = Parser()
        stream = self._connection.events(self.id, self._lend.caller_id, self._last)
        async for piece in stream:
            try:
                found = list(parser.push(piece))
            except ValueError as why:
                raise OublietteError(str(why)) from why
            for data in found:
                try:
                    event = json.loads(data)
                    index = int(event["index"])
                except (ValueError, KeyError, TypeError):
                    # Something newer than this library may send more than events.
                    continue
                # Delivery is at least once. Of a repeat only a request may be worth a second look.
                repeat, self._last = index <= self._last, max(index, self._last)
                if event.get("type") == "caller_tool_request":
                    self._request(event)
                if not repeat and await self._heard(event):
                    return

    async def _heard(self, event: Event) -> bool:
        """Keeps what the program may wait for; true when the session has ended."""
        for listener in self._lend.listeners:
            listener(event)
        kind, status = event.get("type"), event.get("status")
        if kind == "caller_tool_done":
            task = self._requests.get(str(event.get("request_id")))
            if task and event.get("outcome") not in ("answered", "error"):
                task.cancel()
        elif kind == "turn_completed":
            number = int(event.get("turn", 0))
            turn = Turn(number, str(event.get("stop_reason", "")), str(event.get("text") or ""))
            await self._change(turn=turn)
        elif kind == "error":
            refused = Refused(str(event.get("code", "internal")), str(event.get("message", "")))
            await self._change(trouble=refused)
        elif kind == "status" and status == "running":
            await self._change(running=True)
        elif kind == "status" and status == "idle":
            await self._change(idle=True)
        elif kind == "status" and status in ("ended", "failed"):
            await self._change(over=Ended(f"the session has ended: {event.get('reason') or status}"))
            return True
        return False

    async def _change(
        self,
        *,
        turn: Turn | None = None,
        trouble: OublietteError | None = None,
        over: OublietteError | None = None,
        running: bool = False,
        idle: bool = False,
    ) -> None:
        async with self._changed:
            if turn:
                self._turns[turn.turn] = turn
            if turn or running:
                self._trouble, self._failed = None, False
            if trouble:
                self._trouble = trouble
            if idle:
                self._failed = self._trouble is not None
            self._over = over or self._over
            self._changed.notify_all()

    def _request(self, event: Event) -> None:
        """Starts working on a request, unless it is not ours or came before."""
        request_id = str(event.get("request_id"))
        if event.get("caller_id") != self._lend.caller_id or request_id in self._requests:
            return
        self._requests[request_id] = asyncio.create_task(self._work(request_id, event))
        while len(self._requests) > REMEMBERED and next(iter(self._requests.values())).done():
            self._requests.popitem(last=False)

    async def _work(self, request_id: str, event: Event) -> None:
        answer: dict[str, Any] = {"session_id": self.id, "request_id": request_id}
        tool = self._lend.tools.get(str(event.get("tool")))
        if tool is None:
            await self._deliver({**answer, "error": f"this program lends no tool {event.get('tool')}"})
            return
        try:
            async with self._places:
                result = await tool.run(event.get("arguments") or {})
            json.dumps(result)
            answer["result"] = result
        except Exception as why:  # whatever a lent function raises is the tool's error
            answer["error"] = str(why) or type(why).__name__
        await self._deliver(answer)

    async def _deliver(self, answer: dict[str, Any]) -> None:
        """Sends an answer until the server has it or does not want it."""
        for wait in RETRIES:
            try:
                await self._connection.call("caller_tool_response", answer)
                return
            except OublietteError as why:
                unfit = isinstance(why, Refused) and why.code in ("invalid_argument", "limit_exceeded")
                if unfit and "result" in answer:
                    # Too big, most likely: the agent should at least learn that.
                    del answer["result"]
                    answer["error"] = f"the answer was refused: {why}"
                elif is_passing(why):
                    await asyncio.sleep(wait)
                else:
                    # Late or repeated: no further attempt would change that.
                    return


async def _join(connection: Connection, session_id: str) -> tuple[int, list[Event]]:
    """Reads an existing session's log to its end: what was asked and answered must not run again."""
    last, waiting = -1, dict[str, Event]()
    while True:
        arguments = {"session_id": session_id, "since_index": last, "max_events": 1000}
        events = (await connection.call("session_events", arguments))["events"]
        if not events:
            return last, list(waiting.values())
        for event in events:
            last = int(event["index"])
            if event["type"] == "caller_tool_request":
                waiting[event["request_id"]] = event
            elif event["type"] == "caller_tool_done":
                waiting.pop(event["request_id"], None)

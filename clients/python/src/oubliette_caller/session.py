"""A session with lent tools: reading its event stream, answering each request once, waiting for turns."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import Ended, OublietteError, Refused, is_transient
from .sse import SseParser

if TYPE_CHECKING:
    from .client import Connection
    from .lend import Lend

Event = dict[str, Any]
"""One event of a session: ``{"index", "ts", "session_id", "type", …}``."""

# How many request ids are remembered, to recognise repeated requests.
MAX_REMEMBERED_IDS = 10_000
# Waits in seconds between attempts to send an answer: 40 s in total, within the server's default timeout
# of a minute.
RETRY_WAITS = (0.05, 0.1, 0.3, 1.0, 3.0, 9.0, 27.0)
# The first wait in seconds before reconnecting, and the longest; it doubles in between.
RECONNECT_WAIT = (0.05, 5.0)


@dataclass(frozen=True)
class Turn:
    """A completed turn: its number in the session, why it ended, and all text of the agent in it."""

    turn: int
    stop_reason: str
    text: str


class Session:
    """A session that may call this program's tools."""

    def __init__(self, lend: Lend, connection: Connection, session_id: str, turn: int, last: int) -> None:
        self.id = session_id
        self.last_turn = turn
        self._lend = lend
        self._connection = connection
        self._last = last
        self._turns: dict[int, Turn] = {}
        self._failures: dict[int, OublietteError] = {}
        self._turn_error: OublietteError | None = None
        self._turn_failed = False
        self._end_reason: OublietteError | None = None
        self._withdrawn = False
        self._changed = asyncio.Condition()
        self._slots = asyncio.Semaphore(lend.concurrency)
        self._requests: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._follow_task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, lend: Lend, connection: Connection, arguments: dict[str, Any]) -> Session:
        """Sends the first message and begins to follow the session."""
        last, waiting = -1, list[Event]()
        if session_id := arguments.get("session_id"):
            last, waiting = await _read_existing_log(connection, str(session_id))
        reply = await connection.call("session_message", {**arguments, "context": lend.context()})
        session = cls(lend, connection, reply["session_id"], reply.get("turn", 0), last)
        for event in waiting:
            session._start_request(event)
        session._follow_task = asyncio.create_task(session._follow())
        return session

    async def message(self, text: str, **more: Any) -> int:
        """Sends another message and returns the number of the turn it begins.

        It declares the tools again: a server that was restarted has forgotten them.
        """
        # A failure known by now is not of the turn that this message begins.
        if self._turn_failed and self._turn_error:
            self._failures[self.last_turn] = self._turn_error
            self._turn_error, self._turn_failed = None, False
        context = {} if self._withdrawn else {"context": self._lend.context()}
        arguments = {**context, **more, "message": text, "session_id": self.id}
        reply = await self._connection.call("session_message", arguments)
        self.last_turn = int(reply.get("turn", 0))
        return self.last_turn

    async def ask(self, text: str, **more: Any) -> Turn:
        """Sends another message and waits for its turn to end."""
        return await self.turn(await self.message(text, **more))

    async def turn(self, number: int | None = None) -> Turn:
        """Waits for a turn to end: the one with this number, or the one the last message began."""
        wanted = self.last_turn if number is None else number
        async with self._changed:
            while True:
                if wanted in self._turns:
                    return self._turns[wanted]
                if wanted in self._failures:
                    raise self._failures[wanted]
                if self._turn_failed and self._turn_error:
                    raise self._turn_error
                if self._end_reason:
                    raise self._end_reason
                await self._changed.wait()

    async def ended(self) -> OublietteError:
        """Waits until the session ends and returns the reason. Requests are answered meanwhile."""
        async with self._changed:
            while not self._end_reason:
                await self._changed.wait()
            return self._end_reason

    async def withdraw(self, text: str, **more: Any) -> int:
        """Sends a message that withdraws the functions. The session continues without them."""
        self._withdrawn = True
        context = {"caller_id": self._lend.caller_id, "caller_tools": []}
        return await self.message(text, **{**more, "context": context})

    async def end(self) -> None:
        """Ends the session."""
        await self._connection.call("session_end", {"session_id": self.id})

    async def stop(self) -> None:
        """Stops answering requests; the session itself continues."""
        tasks = [task for task in (self._follow_task, *self._requests.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        wait = RECONNECT_WAIT[0]
        while True:
            began = self._last
            try:
                await self._read_stream()
                return
            except OublietteError as why:
                if not is_transient(why):
                    await self._update(end_reason=why)
                    return
            if self._last > began:
                wait = RECONNECT_WAIT[0]
            await asyncio.sleep(wait)
            wait = min(wait * 2, RECONNECT_WAIT[1])

    async def _read_stream(self) -> None:
        """Reads one connection until it breaks; returns when the session has ended."""
        parser = SseParser()
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
                    # A newer server may send messages that are not events.
                    continue
                # Delivery is at least once. A repeated request is passed on: _start_request ignores those
                # already seen.
                repeat, self._last = index <= self._last, max(index, self._last)
                if event.get("type") == "caller_tool_request":
                    self._start_request(event)
                if not repeat and await self._record_event(event):
                    return

    async def _record_event(self, event: Event) -> bool:
        """Records what the program may wait for (turns, errors, the end); true when the session has ended."""
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
            await self._update(turn=turn)
        elif kind == "error":
            refused = Refused(str(event.get("code", "internal")), str(event.get("message", "")))
            await self._update(turn_error=refused)
        elif kind == "status" and status == "running":
            await self._update(running=True)
        elif kind == "status" and status == "idle":
            await self._update(idle=True)
        elif kind == "status" and status in ("ended", "failed"):
            await self._update(end_reason=Ended(f"the session has ended: {event.get('reason') or status}"))
            return True
        return False

    async def _update(
        self,
        *,
        turn: Turn | None = None,
        turn_error: OublietteError | None = None,
        end_reason: OublietteError | None = None,
        running: bool = False,
        idle: bool = False,
    ) -> None:
        async with self._changed:
            if turn:
                self._turns[turn.turn] = turn
            if turn or running:
                self._turn_error, self._turn_failed = None, False
            if turn_error:
                self._turn_error = turn_error
            if idle:
                self._turn_failed = self._turn_error is not None
            self._end_reason = end_reason or self._end_reason
            self._changed.notify_all()

    def _start_request(self, event: Event) -> None:
        """Starts the function for a request, unless it is another caller's or has been seen before."""
        request_id = str(event.get("request_id"))
        if event.get("caller_id") != self._lend.caller_id or request_id in self._requests:
            return
        self._requests[request_id] = asyncio.create_task(self._run_function(request_id, event))
        while len(self._requests) > MAX_REMEMBERED_IDS and next(iter(self._requests.values())).done():
            self._requests.popitem(last=False)

    async def _run_function(self, request_id: str, event: Event) -> None:
        answer: dict[str, Any] = {"session_id": self.id, "request_id": request_id}
        tool = self._lend.tools.get(str(event.get("tool")))
        if tool is None:
            await self._send_answer({**answer, "error": f"this program lends no tool {event.get('tool')}"})
            return
        try:
            async with self._slots:
                result = await tool.run(event.get("arguments") or {})
            json.dumps(result)
            answer["result"] = result
        except Exception as why:  # any exception of the lent function is the tool's error
            answer["error"] = str(why) or type(why).__name__
        await self._send_answer(answer)

    async def _send_answer(self, answer: dict[str, Any]) -> None:
        """Sends an answer, with retries, until the server accepts it or refuses it for good."""
        for wait in RETRY_WAITS:
            try:
                await self._connection.call("caller_tool_response", answer)
                return
            except OublietteError as why:
                codes = ("invalid_argument", "limit_exceeded")
                result_refused = isinstance(why, Refused) and why.code in codes
                if result_refused and "result" in answer:
                    # Most likely too large: send that as the tool's error, so that the agent learns of it.
                    del answer["result"]
                    answer["error"] = f"the answer was refused: {why}"
                elif is_transient(why):
                    await asyncio.sleep(wait)
                else:
                    # Too late, or answered before: a retry would not change that.
                    return


async def _read_existing_log(connection: Connection, session_id: str) -> tuple[int, list[Event]]:
    """Reads an existing session's log to its end; returns its last index and the unanswered requests."""
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

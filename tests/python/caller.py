"""A caller built on the real SDK: it starts a session, receives events as its MCP lifecycle does, and answers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, AsyncIterator, Callable

from harness import DEADLINE, LEGACY, Mcp, Server


class Caller:
    """Starts one session and collects its events."""

    def __init__(self, mcp: Mcp, mode: str):
        self.mcp = mcp
        self.mode = mode
        self.session_id = ""
        self.events: list[dict[str, Any]] = []
        self._arrived = asyncio.Condition()
        self._poller: asyncio.Task | None = None

    async def heard(self, event: dict[str, Any]) -> None:
        async with self._arrived:
            if any(e["index"] == event["index"] for e in self.events):
                return  # delivery is at least once
            self.events.append(event)
            self._arrived.notify_all()

    async def start(self, message: str = "go", **arguments: Any) -> dict[str, Any]:
        started = await self.mcp.call("session_message", message=message, **arguments)
        self.session_id = started["session_id"]
        if self.mode != LEGACY:
            self._poller = asyncio.create_task(self._poll())
        return started

    async def _poll(self) -> None:
        since = -1
        while True:
            page = await self.mcp.call("session_events", session_id=self.session_id, since_index=since, wait_ms=20_000)
            for event in page["events"]:
                await self.heard(event)
            since = page["last_index"]

    async def until(self, type: str, **fields: Any) -> dict[str, Any]:
        """Waits for the first event of this type with these fields."""

        def found():
            return next(
                (e for e in self.events if e["type"] == type and all(e.get(k) == v for k, v in fields.items())), None
            )

        async with self._arrived:
            try:
                await asyncio.wait_for(self._arrived.wait_for(lambda: found() is not None), DEADLINE)
            except asyncio.TimeoutError:
                raise AssertionError(f"no {type} {fields}; heard {[e['type'] for e in self.events]}") from None
            return found()

    async def other(self, type: str, than: dict[str, Any]) -> dict[str, Any]:
        """Waits for the first event of this type that is not `than`."""

        def found():
            return next((e for e in self.events if e["type"] == type and e["index"] != than["index"]), None)

        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: found() is not None), DEADLINE)
            return found()

    async def respond(self, request: dict[str, Any], **answer: Any) -> dict[str, Any]:
        return await self.mcp.call(
            "caller_tool_response", session_id=self.session_id, request_id=request["request_id"], **answer
        )

    async def log(self) -> list[dict[str, Any]]:
        page = await self.mcp.call("session_events", session_id=self.session_id, max_events=1000)
        return page["events"]

    async def close(self) -> None:
        if self._poller:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._poller


@contextlib.asynccontextmanager
async def calling(server: Server, token: str, mode: str) -> AsyncIterator[Caller]:
    """A caller connected with the stateful lifecycle (GET stream) or the stateless one (long poll)."""
    holder: list[Caller] = []

    async def heard(message: Any) -> None:
        if holder and message.logger == "oubliette.session" and message.data["session_id"] == holder[0].session_id:
            await holder[0].heard(message.data)
        elif holder:
            holder[0].early = getattr(holder[0], "early", []) + [message.data]

    options = {"logging_callback": heard} if mode == LEGACY else {}
    async with server.mcp(token, mode, **options) as mcp:
        caller = Caller(mcp, mode)
        holder.append(caller)
        original = caller.start

        async def start(*args: Any, **kwargs: Any) -> dict[str, Any]:
            started = await original(*args, **kwargs)
            for event in getattr(caller, "early", []):
                if event["session_id"] == caller.session_id:
                    await caller.heard(event)
            return started

        caller.start = start
        try:
            yield caller
        finally:
            await caller.close()


def lend(*tools: Any, caller_id: str = "myapp") -> dict[str, Any]:
    """The `context` that lends tools, each given as a name or as a whole declaration."""
    declared = [tool if isinstance(tool, dict) else {"name": tool} for tool in tools]
    return {"caller_id": caller_id, "caller_tools": declared}


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    """A script step that calls a tool."""
    return {"call": {"tool": tool, "arguments": arguments}}

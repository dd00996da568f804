"""The declaration of lent functions, and the start of a session with them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import schema
from .session import Event, Session

if TYPE_CHECKING:
    from .client import Oubliette

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class LentTool:
    """One lent function."""

    name: str
    description: str
    input_schema: dict[str, Any]
    function: Callable[..., Any]

    async def run(self, arguments: dict[str, Any]) -> Any:
        """Calls the function; one that is not a coroutine runs in a thread, so that it may block."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await asyncio.to_thread(self.function, **arguments)
        return await result if inspect.isawaitable(result) else result


class Lend:
    """The functions a program lends to an agent, under one caller id."""

    def __init__(self, client: Oubliette, caller_id: str, *, concurrency: int = 256) -> None:
        self.client = client
        self.caller_id = caller_id
        self.concurrency = concurrency
        self.tools: dict[str, LentTool] = {}
        self.listeners: list[Callable[[Event], None]] = []

    @overload
    def tool(self, function: Function, /) -> Function: ...

    @overload
    def tool(
        self,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        input_schema: dict[str, Any] | None = None,
    ) -> Callable[[Function], Function]: ...

    def tool(
        self,
        function: Function | None = None,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        input_schema: dict[str, Any] | None = None,
    ) -> Function | Callable[[Function], Function]:
        """Lends a function: ``@lend.tool`` or ``@lend.tool(name=…)``.

        The schema comes from its annotations, the description from its docstring, unless they are given.
        """

        def lend(function: Function) -> Function:
            called = name or function.__name__
            if called in self.tools:
                raise ValueError(f"{called!r} is lent already")
            text = description if description is not None else inspect.getdoc(function) or ""
            shape = input_schema if input_schema is not None else schema.of_function(function)
            self.tools[called] = LentTool(called, text, shape, function)
            return function

        return lend if function is None else lend(function)

    def on_event(self, listener: Callable[[Event], None]) -> Callable[[Event], None]:
        """Calls a function for every event of the session, in order. It must not block."""
        self.listeners.append(listener)
        return listener

    @asynccontextmanager
    async def start(
        self,
        message: str,
        *,
        session_id: str | None = None,
        agent: str | None = None,
        project_id: str | None = None,
        workspace_id: str | None = None,
        **more: Any,
    ) -> AsyncIterator[Session]:
        """Sends the message, which declares the tools, and answers requests while the block lasts."""
        named = {
            "session_id": session_id,
            "agent": agent,
            "project_id": project_id,
            "workspace_id": workspace_id,
        }
        arguments = {"message": message, **more, **{k: v for k, v in named.items() if v is not None}}
        async with self.client.connection() as connection:
            session = await Session.open(self, connection, arguments)
            try:
                yield session
            finally:
                await session.stop()

    def context(self) -> dict[str, Any]:
        """The ``context`` argument of ``session_message``: caller id and tool declarations."""
        tools = [
            {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
            for tool in self.tools.values()
        ]
        return {"caller_id": self.caller_id, "caller_tools": tools}

"""The server's address and the token; plain calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from .errors import OublietteError, Refused, Unreachable
from .lend import Lend

# A stream that says nothing, not even that it lives, for this long is dead.
SILENCE = 75.0


class Oubliette:
    """A server and a token for it. Nothing is sent before a session starts."""

    def __init__(self, address: str, token: str, *, timeout: float = 60.0) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError("the address must start with http:// or https://")
        self._address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"Oubliette({self._address!r})"

    def lend(self, caller_id: str, *, concurrency: int = 256) -> Lend:
        """Begins to lend tools under this name: the agent sees ``<caller_id>_<tool>``."""
        return Lend(self, caller_id, concurrency=concurrency)

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._address, headers=self._headers, timeout=self._timeout)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Connections to the server, kept for reuse while the block lasts."""
        async with self._http() as http:
            yield Connection(http)

    async def call(self, tool: str, **arguments: Any) -> Any:
        """Calls any of the server's tools by name: arguments in, the result object out."""
        async with self.connection() as connection:
            return await connection.call(tool, arguments)


class Connection:
    """Plain calls and the event stream."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """One tool of the server."""
        try:
            response = await self._http.post(f"/api/tools/{tool}", json=arguments)
        except httpx.HTTPError as why:
            raise Unreachable(str(why) or type(why).__name__) from why
        _accept(response)
        return response.json()

    async def events(self, session_id: str, caller_id: str, since: int) -> AsyncIterator[bytes]:
        """The bytes of a session's event stream after this index."""
        headers = {"Accept": "text/event-stream"}
        if since >= 0:
            headers["Last-Event-ID"] = str(since)
        path = f"/api/sessions/{session_id}/events"
        params: dict[str, str | int] = {"since_index": since, "caller_id": caller_id}
        timeout = httpx.Timeout(10.0, read=SILENCE)
        try:
            async with self._http.stream(
                "GET", path, params=params, headers=headers, timeout=timeout
            ) as stream:
                if stream.is_error:
                    await stream.aread()
                _accept(stream)
                async for piece in stream.aiter_bytes():
                    yield piece
        except httpx.HTTPError as why:
            raise Unreachable(str(why) or type(why).__name__) from why
        raise Unreachable("the stream ended")


def _accept(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        refused = Refused(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        if response.status_code >= 500:
            # Something between us and the server, most likely.
            raise Unreachable(f"HTTP {response.status_code}") from None
        if response.status_code == 401:
            raise Refused("unauthenticated", "the token is not valid") from None
        raise OublietteError(f"unexpected answer: HTTP {response.status_code}") from None
    raise refused

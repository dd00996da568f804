"""The connection to the server: its address, the token, single calls and the event stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from .errors import OublietteError, Refused, Unreachable
from .lend import Lend

# A stream without any bytes for this many seconds, not even a keep-alive comment, is treated as broken.
SILENCE_TIMEOUT = 75.0


class Oubliette:
    """A client for one server, with one token. Nothing is sent before a session starts."""

    def __init__(self, address: str, token: str, *, timeout: float = 60.0) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError("the address must start with http:// or https://")
        self._address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"Oubliette({self._address!r})"

    def lend(self, caller_id: str, *, concurrency: int = 256) -> Lend:
        """Begins a declaration of tools under this caller id: the agent sees ``<caller_id>_<tool>``."""
        return Lend(self, caller_id, concurrency=concurrency)

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._address, headers=self._headers, timeout=self._timeout)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection pool that lives as long as the ``async with`` block."""
        async with self._http() as http:
            yield Connection(http)

    async def call(self, tool: str, **arguments: Any) -> Any:
        """Calls one of the server's own tools (``session_message``, …) and returns its result object."""
        async with self.connection() as connection:
            return await connection.call(tool, arguments)


class Connection:
    """Single calls and the event stream, over one connection pool."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Calls one of the server's own tools."""
        try:
            response = await self._http.post(f"/api/tools/{tool}", json=arguments)
        except httpx.HTTPError as why:
            raise Unreachable(str(why) or type(why).__name__) from why
        _check_response(response)
        return response.json()

    async def events(self, session_id: str, caller_id: str, since: int) -> AsyncIterator[bytes]:
        """The bytes of a session's event stream, from the event after index ``since`` on."""
        headers = {"Accept": "text/event-stream"}
        if since >= 0:
            headers["Last-Event-ID"] = str(since)
        path = f"/api/sessions/{session_id}/events"
        params: dict[str, str | int] = {"since_index": since, "caller_id": caller_id}
        timeout = httpx.Timeout(10.0, read=SILENCE_TIMEOUT)
        try:
            async with self._http.stream(
                "GET", path, params=params, headers=headers, timeout=timeout
            ) as stream:
                if stream.is_error:
                    await stream.aread()
                _check_response(stream)
                async for piece in stream.aiter_bytes():
                    yield piece
        except httpx.HTTPError as why:
            raise Unreachable(str(why) or type(why).__name__) from why
        raise Unreachable("the stream ended")


def _check_response(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        refused = Refused(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        if response.status_code >= 500:
            # Without our error body it most likely comes from a proxy in between.
            raise Unreachable(f"HTTP {response.status_code}") from None
        if response.status_code == 401:
            raise Refused("unauthenticated", "the token is not valid") from None
        raise OublietteError(f"unexpected answer: HTTP {response.status_code}") from None
    raise refused

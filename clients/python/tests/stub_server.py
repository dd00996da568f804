"""A stub of the server's REST and SSE interface, on plain asyncio."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qsl, urlsplit

SESSION = "gogol_01J00000000000000000000000"
TOKEN = "oub_good"


class StubServer:
    """A server with one session; a test emits its events and sees the calls."""

    def __init__(self) -> None:
        self.log: list[dict[str, Any]] = []
        self.streams: list[asyncio.StreamWriter] = []
        self.calls: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.opened: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self.failing = 0
        self.address = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> StubServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        for stream in self.streams:
            stream.close()
        self.streams.clear()

    def emit(self, **event: Any) -> None:
        event |= {"index": len(self.log), "session_id": SESSION}
        self.log.append(event)
        self.send(event)

    def send(self, event: dict[str, Any]) -> None:
        for stream in self.streams:
            stream.write(
                _chunk(f"id: {event['index']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n")
            )

    def request(self, request_id: str, arguments: Any, tool: str = "double", caller: str = "myapp") -> None:
        self.emit(
            type="caller_tool_request",
            request_id=request_id,
            caller_id=caller,
            tool=tool,
            arguments=arguments,
        )

    async def called(self, name: str) -> Any:
        called, arguments = await asyncio.wait_for(self.calls.get(), 10)
        assert called == name
        return arguments

    async def answered(self) -> tuple[str, dict[str, Any]]:
        answer = await self.called("caller_tool_response")
        assert answer.pop("session_id") == SESSION
        return answer.pop("request_id"), answer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
                target = urlsplit(request.split()[1])
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if headers.get("authorization") != f"Bearer {TOKEN}":
                    _answer(writer, 401, {"error": {"code": "unauthenticated", "message": "bad token"}})
                elif target.path.startswith("/api/tools/"):
                    self._tool(writer, target.path.removeprefix("/api/tools/"), json.loads(body))
                else:
                    query = dict(parse_qsl(target.query)) | {"last": headers.get("last-event-id", "")}
                    self._stream(writer, query)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _tool(self, writer: asyncio.StreamWriter, name: str, arguments: Any) -> None:
        if name == "caller_tool_response" and self.failing:
            self.failing -= 1
            _answer(writer, 503, {"error": {"code": "unavailable", "message": "later"}})
            return
        result: dict[str, Any] = {"resolved": True}
        if name == "session_message":
            result = {"session_id": SESSION, "turn": 1, "status": "running"}
        elif name == "session_events":
            result = {"events": [e for e in self.log if e["index"] > arguments["since_index"]][:2]}
        self.calls.put_nowait((name, arguments))
        _answer(writer, 200, result)

    def _stream(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(_chunk(": open\n\n"))
        self.streams.append(writer)
        for event in self.log:
            if event["index"] > int(query["since_index"]):
                writer.write(_chunk(f"data: {json.dumps(event)}\r\n\r\n"))
        self.opened.put_nowait(query)


def _chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)

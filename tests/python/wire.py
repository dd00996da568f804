"""Low-level clients: a relay socket, one HTTP request, MCP without an SDK, a proxy whose connections can be cut.

SDKs hide what these tests are about: when exactly a stream or a poll is open, and when it is closed.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import queue
import select
import socket
import subprocess
import threading
from typing import Any

from harness import BIN, DEADLINE, Server, ToolFailed


class Relay:
    """One connection to a relay socket."""

    def __init__(self, path: str):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE)
        self.socket.connect(path)
        self._file = self.socket.makefile("rb")
        self._ids = itertools.count(1)
        self._answers: dict[Any, dict] = {}
        self.notices: list[dict] = []

    def send(self, frame: Any) -> None:
        text = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        self.socket.sendall(text + b"\n")

    def read(self) -> dict:
        line = self._file.readline()
        if not line:
            raise EOFError("the server hung up")
        return json.loads(line)

    def request(self, method: str, **params: Any) -> int:
        id = next(self._ids)
        self.send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        return id

    def answer(self, id: Any) -> dict:
        while id not in self._answers:
            frame = self.read()
            if "method" in frame:
                self.notices.append(frame)
            else:
                self._answers[frame["id"]] = frame
        return self._answers.pop(id)

    def call(self, method: str, **params: Any) -> dict:
        return self.answer(self.request(method, **params))

    def notice(self, method: str) -> dict:
        """The next notification of this method."""
        for index, frame in enumerate(self.notices):
            if frame["method"] == method:
                return self.notices.pop(index)
        while True:
            frame = self.read()
            if frame.get("method") == method:
                return frame
            if "method" in frame:
                self.notices.append(frame)
            else:
                self._answers[frame["id"]] = frame

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Request:
    """One HTTP request on its own connection: sent when constructed, answered when read, aborted when closed."""

    def __init__(self, server: Server, method: str, path: str, token: str | None, body: Any = None, **headers: str):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._connection.request(method, path, data, headers)
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def header(self, name: str) -> str | None:
        return self.response.getheader(name)

    def frames(self):
        """The data of server-sent events."""
        data: list[str] = []
        for raw in self.response:
            line = raw.decode().rstrip("\r\n")
            if not line and data:
                yield json.loads("\n".join(data))
                data = []
            elif line.startswith("data:") and line[5:].strip():
                data.append(line[5:].removeprefix(" "))

    def json(self) -> Any:
        """The answer: the body, or the last frame of a stream."""
        if "text/event-stream" in (self.header("Content-Type") or ""):
            return next(frame for frame in self.frames() if "id" in frame)
        text = self.response.read()
        return json.loads(text) if text else None

    def close(self) -> None:
        # Closing with unread data would send a reset; a shutdown closes as a client that leaves does.
        with contextlib.suppress(OSError):
            if self._connection.sock:
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        if self._response:
            self._response.close()
        self._connection.close()

    def __enter__(self) -> "Request":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def call_tool(server: Server, token: str | None, tool: str, arguments: dict, **headers: str) -> Any:
    """Calls one tool over REST; cheaper than a library's client, for tests that make very many calls."""
    with Request(server, "POST", f"/api/tools/{tool}", token, arguments, **headers) as request:
        body = request.json()
        if request.response.status != 200:
            raise ToolFailed(body["error"]["code"], body["error"]["message"], request.response.status)
        return body


def poll(server: Server, token: str, session_id: str, since: int, wait_ms: int = 50_000) -> Request:
    body = {"session_id": session_id, "since_index": since, "wait_ms": wait_ms}
    return Request(server, "POST", "/api/tools/session_events", token, body)


class LegacyMcp:
    """One stateful MCP session (2025-11-25)."""

    ACCEPT = "application/json, text/event-stream"

    def __init__(self, server: Server, token: str):
        self.server, self.token = server, token
        self._ids = itertools.count(1)
        client = {"name": "wire", "version": "0"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        with self._post({"id": next(self._ids), "method": "initialize", "params": params}) as opened:
            self.session = opened.header("Mcp-Session-Id")
            assert opened.json()["result"]["protocolVersion"] == "2025-11-25"
        with self._post({"method": "notifications/initialized"}) as done:
            assert done.response.status == 202

    def _headers(self) -> dict[str, str]:
        known = {"Mcp_Session_Id": self.session, "MCP_Protocol_Version": "2025-11-25"} if hasattr(self, "session") else {}
        return {"Accept": self.ACCEPT, **known}

    def _post(self, message: dict) -> Request:
        return Request(self.server, "POST", "/mcp", self.token, {"jsonrpc": "2.0", **message}, **self._headers())

    def begin(self, tool: str, /, **arguments: Any) -> Request:
        params = {"name": tool, "arguments": arguments}
        return self._post({"id": next(self._ids), "method": "tools/call", "params": params})

    def call(self, tool: str, /, **arguments: Any) -> Any:
        with self.begin(tool, **arguments) as request:
            return unwrap(request.json())

    def stream(self) -> Request:
        """Opens the GET stream."""
        stream = Request(self.server, "GET", "/mcp", self.token, **{**self._headers(), "Accept": "text/event-stream"})
        assert stream.response.status == 200
        return stream

    def delete(self) -> None:
        with Request(self.server, "DELETE", "/mcp", self.token, **self._headers()) as request:
            assert request.response.status in (200, 204)


class ModernMcp:
    """Stateless MCP (2026-07-28)."""

    VERSION = "2026-07-28"

    def __init__(self, server: Server, token: str):
        self.server, self.token = server, token
        self._ids = itertools.count(1)

    def request(self, method: str, name: str | None, params: dict) -> Request:
        meta = {
            "io.modelcontextprotocol/protocolVersion": self.VERSION,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "wire", "version": "0"},
        }
        body = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": {**params, "_meta": meta}}
        headers = {"MCP_Protocol_Version": self.VERSION, "Mcp_Method": method, "Accept": LegacyMcp.ACCEPT}
        if name:
            headers["Mcp_Name"] = name
        return Request(self.server, "POST", "/mcp", self.token, body, **headers)

    def begin(self, tool: str, /, **arguments: Any) -> Request:
        return self.request("tools/call", tool, {"name": tool, "arguments": arguments})

    def call(self, tool: str, /, **arguments: Any) -> Any:
        with self.begin(tool, **arguments) as request:
            return unwrap(request.json())

    def listen(self, session_id: str) -> Request:
        """Subscribes to a session's events (`subscriptions/listen`) and waits for the acknowledgement."""
        uri = f"oubliette://sessions/{session_id}/events"
        request = self.request("subscriptions/listen", None, {"notifications": {"resourceSubscriptions": [uri]}})
        assert request.response.status == 200, request.response.read()
        return request


def unwrap(message: dict) -> Any:
    result = message["result"]
    if result.get("isError"):
        error = result["structuredContent"]["error"]
        raise ToolFailed(error["code"], error["message"])
    return result["structuredContent"]


class Client:
    """`oubliette-client` on stdio, run here instead of in a sandbox."""

    def __init__(self, socket_path: str, **env: str):
        self.process = subprocess.Popen(
            [BIN / "oubliette-client"],
            env={"PATH": os.environ["PATH"], "OUBLIETTE_SOCKET": socket_path, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._ids = itertools.count(1)
        self._frames: queue.Queue[dict | None] = queue.Queue()
        self.seen: list[dict] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "wire", "version": "0"}}
        self.answer(self.request("initialize", params))
        self.send({"method": "notifications/initialized"})

    def _read(self) -> None:
        for line in self.process.stdout:
            self._frames.put(json.loads(line))
        self._frames.put(None)

    def send(self, message: dict) -> None:
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def request(self, method: str, params: dict) -> int:
        id = next(self._ids)
        self.send({"id": id, "method": method, "params": params})
        return id

    def until(self, what: str, is_it) -> dict:
        """Removes and returns the first frame, received already or still to come, for which `is_it` is true."""
        for index, frame in enumerate(self.seen):
            if is_it(frame):
                return self.seen.pop(index)
        while True:
            try:
                frame = self._frames.get(timeout=DEADLINE)
            except queue.Empty:
                raise AssertionError(f"waited in vain for {what}; seen {self.seen}") from None
            if frame is None:
                raise EOFError("oubliette-client ended")
            if is_it(frame):
                return frame
            self.seen.append(frame)

    def answer(self, id: int) -> dict:
        frame = self.until(f"the answer to {id}", lambda f: f.get("id") == id and "method" not in f)
        return frame["result"]

    def tools(self) -> dict[str, dict]:
        return {tool["name"]: tool for tool in self.answer(self.request("tools/list", {}))["tools"]}

    def begin(self, tool: str, arguments: dict | None = None, token: Any = None) -> int:
        params: dict = {"name": tool, "arguments": arguments or {}}
        if token is not None:
            params["_meta"] = {"progressToken": token}
        return self.request("tools/call", params)

    def notified(self, method: str, **params: Any) -> dict:
        def is_it(frame: dict) -> bool:
            given = frame.get("params") or {}
            return frame.get("method") == method and all(given.get(k) == v for k, v in params.items())

        return self.until(method, is_it).get("params") or {}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=DEADLINE)


class Link:
    """A TCP proxy to a server whose connections a test can cut, to simulate a failing network."""

    def __init__(self, port: int):
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    # The server is away; the next connection may find it.
                    near.close()
                    continue
                with self._lock:
                    self._pairs.append((near, far))
                threading.Thread(target=self._copy, args=(near, far), daemon=True).start()

    def _copy(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                ready, _, _ = select.select([near, far], [], [])
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return self._end(near, far)
                    (far if source is near else near).sendall(data)
        self._end(near, far)

    @staticmethod
    def _end(*sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """Closes every connection; new ones work."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for near, far in pairs:
            for each in (near, far):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: Any) -> None:
        self._listener.close()
        self.cut()

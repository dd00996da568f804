"""MCP servers for the orchestration tests: real ones from npm and the Python SDK, over every transport."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
import subprocess
import sys
import threading
from typing import Any

import harness

NODE_MODULES = harness.ROOT / "tests" / "node" / "node_modules"
NODE = NODE_MODULES / "node" / "bin" / "node"
TRUST = f"""
[trust]
read_only = ["{NODE_MODULES}", "{harness.ROOT / 'target' / 'venv'}", "{harness.ROOT / 'tests'}", "{pathlib.Path(sys.base_prefix)}"]
"""
"""The part of `oubliette.toml` that lets sandboxed servers read the packages the tests installed."""


def everything(**more: Any) -> dict[str, Any]:
    """npm's server-everything over stdio."""
    script = NODE_MODULES / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
    return stdio(str(NODE), [str(script), "stdio"], [str(NODE_MODULES)], **more)


def filesystem(*folders: str, **more: Any) -> dict[str, Any]:
    """npm's server-filesystem over stdio."""
    script = NODE_MODULES / "@modelcontextprotocol" / "server-filesystem" / "dist" / "index.js"
    return stdio(str(NODE), [str(script), *folders], [str(NODE_MODULES)], **more)


def python_server(**more: Any) -> dict[str, Any]:
    """A server made with the Python SDK (`notes_server.py`) over stdio."""
    script = harness.ROOT / "tests" / "python" / "notes_server.py"
    seen = [str(harness.ROOT / "target" / "venv"), str(harness.ROOT / "tests"), str(pathlib.Path(sys.base_prefix))]
    return stdio(sys.executable, [str(script)], seen, **more)


def stdio(command: str, args: list[str], read_only: list[str], **more: Any) -> dict[str, Any]:
    return {
        "kind": "mcp", "transport": "stdio", "command": command, "args": args, "read_only": read_only,
        "timeouts": {"startupMs": 120000, "requestMs": 240000}, **more,
    }


class Loop:
    """An asyncio event loop on a thread, for servers that run during a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(harness.DEADLINE)


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of a minimal MCP server with one tool, `echo`; None for notifications."""
    method, id = message.get("method"), message.get("id")
    if id is None:
        return None
    if method == "initialize":
        result: Any = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "small", "version": "1"},
        }
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        result = {"tools": [{"name": "echo", "description": "Says it again.", "inputSchema": schema}]}
    elif method == "tools/call":
        text = json.dumps(message["params"].get("arguments", {}))
        result = {"content": [{"type": "text", "text": text}]}
    elif method == "ping":
        result = {}
    else:
        return {"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no such method"}}
    return {"jsonrpc": "2.0", "id": id, "result": result}


class Tcp:
    """An MCP server over TCP, one message per line."""

    def __init__(self, loop: Loop):
        self.connections: list[asyncio.StreamWriter] = []
        self.loop = loop
        self.server = loop.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        while line := await reader.readline():
            if reply := answer(json.loads(line)):
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        self.connections.remove(writer)
        writer.close()


class WebSocket:
    """An MCP server over WebSocket, subprotocol `mcp`."""

    def __init__(self, loop: Loop, subprotocols: list[str] | None = ["mcp"]):
        from websockets.asyncio.server import serve

        self.connections: list[Any] = []

        async def start() -> Any:
            return await serve(self._serve, "127.0.0.1", 0, subprotocols=subprotocols)

        self.server = loop.run(start())
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, connection: Any) -> None:
        self.connections.append(connection)
        async for text in connection:
            if reply := answer(json.loads(text)):
                await connection.send(json.dumps(reply))
        self.connections.remove(connection)


class Http:
    """npm's server-everything over streamable HTTP."""

    def __init__(self) -> None:
        self.port = harness.free_port()
        script = NODE_MODULES / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
        self.process = subprocess.Popen(
            [NODE, script, "streamableHttp"], env={"PORT": str(self.port), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        harness.wait_until(self._open, "server-everything over http")

    def _open(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

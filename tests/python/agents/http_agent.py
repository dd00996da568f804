"""An ACP agent for tests that takes MCP servers only over HTTP, by the real MCP SDK. Its prompts are commands.

Its one argument is a JSON object:
    mode       the MCP lifecycle: legacy or 2026-07-28 (default legacy)
    http       whether it says that it takes MCP servers over HTTP (default true)
    connect    whether it connects to the servers it is given (default true)
    load       whether it offers `session/load` (default false)
"""

import asyncio
import contextlib
import json
import os
import sys

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

CONFIG = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
LEGACY = CONFIG.get("mode", "legacy") == "legacy"


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


class Agent:
    def __init__(self, stack):
        self.stack, self.client, self.server = stack, None, None
        self.names, self.turn, self.prompts = [], None, 0

    async def connect(self, server):
        assert server["type"] == "http", server
        self.server = server
        if not CONFIG.get("connect", True):
            return
        headers = {header["name"]: header["value"] for header in server["headers"]}
        http = await self.stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=300)))
        transport = streamable_http_client(server["url"], http_client=http)
        options = {"message_handler": self.heard} if LEGACY else {}
        client = Client(transport, mode=CONFIG.get("mode", "legacy"), cache=None, **options)
        self.client = await self.stack.enter_async_context(client)
        if not LEGACY:
            listening = await self.stack.enter_async_context(self.client.listen(tools_list_changed=True))
            asyncio.create_task(self.follow(listening))
        await self.list()

    async def heard(self, message):
        if "tools/list_changed" in repr(message) or "ToolListChanged" in type(message).__name__:
            # Not here: the answer arrives on the connection whose messages this function handles.
            asyncio.create_task(self.list())

    async def follow(self, listening):
        async for _ in listening:
            await self.list()

    async def list(self):
        self.names = sorted(tool.name for tool in (await self.client.list_tools()).tools)

    async def call(self, id, name, arguments):
        progress = []

        async def report(value, total, message):
            progress.append(value)

        try:
            result = await self.client.call_tool(name, arguments, progress_callback=report)
            text = " ".join(block.text for block in result.content)
            self.say(json.dumps({"error": bool(result.is_error), "text": text, "progress": progress}))
            send({"id": id, "result": {"stopReason": "end_turn"}})
        except asyncio.CancelledError:
            send({"id": id, "result": {"stopReason": "cancelled"}})
            raise

    async def abandon(self, name, arguments):
        waiting = asyncio.Event()

        async def report(value, total, message):
            waiting.set()

        call = asyncio.create_task(self.client.call_tool(name, arguments, progress_callback=report))
        await waiting.wait()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        return "abandoned"

    async def status_without_token(self):
        async with httpx2.AsyncClient() as http:
            headers = {"Authorization": "Bearer wrong"}
            ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            answers = [await http.post(self.server["url"], json=ping), await http.post(self.server["url"], json=ping, headers=headers)]
            return " ".join(str(answer.status_code) for answer in answers)

    def say(self, text):
        update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
        send({"method": "session/update", "params": {"sessionId": "one", "update": update}})

    async def prompt(self, id, text):
        self.prompts += 1
        word, _, rest = text.partition(" ")
        if word == "call":
            name, _, arguments = rest.partition(" ")
            self.turn = asyncio.create_task(self.call(id, name, json.loads(arguments)))
            return
        if word == "tools":
            self.say(" ".join(self.names) or "none")
        elif word == "abandon":
            name, _, arguments = rest.partition(" ")
            self.say(await self.abandon(name, json.loads(arguments)))
        elif word == "server":
            self.say(json.dumps({**self.server, "headers": [header["name"] for header in self.server["headers"]]}))
        elif word == "unauthorized":
            self.say(await self.status_without_token())
        elif word == "env":
            self.say(os.environ.get(rest, "unset"))
        elif word == "prompts":
            self.say(str(self.prompts))
        send({"id": id, "result": {"stopReason": "end_turn"}})

    async def serve(self):
        reader = asyncio.StreamReader(limit=1 << 24)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            message = json.loads(line)
            method, params, id = message.get("method"), message.get("params"), message.get("id")
            if method == "initialize":
                capabilities = {"loadSession": CONFIG.get("load", False), "mcpCapabilities": {"http": CONFIG.get("http", True)}}
                send({"id": id, "result": {"protocolVersion": 1, "agentCapabilities": capabilities, "agentInfo": {"name": "http-fake", "version": "1"}}})
            elif method in ("session/new", "session/load"):
                await self.connect(params["mcpServers"][0])
                send({"id": id, "result": {"sessionId": "one"} if method == "session/new" else None})
            elif method == "session/prompt":
                await self.prompt(id, params["prompt"][-1]["text"])
            elif method == "session/cancel" and self.turn:
                self.turn.cancel()


async def main():
    async with contextlib.AsyncExitStack() as stack:
        await Agent(stack).serve()


asyncio.run(main())

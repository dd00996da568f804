"""The driver of the Python client for `tests/callers/scenarios.json`: commands on stdin, replies and notes on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "clients" / "python" / "src"))

from oubliette_caller import Ended, Lend, Oubliette, Refused, Session, Unreachable  # noqa: E402


def write(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def describe_error(error: Exception) -> dict[str, Any]:
    """What an error is, in the words of the scenarios."""
    kinds = {Refused: "refused", Unreachable: "unreachable", Ended: "ended"}
    kind = next((kind for type, kind in kinds.items() if isinstance(error, type)), "other")
    return {"kind": kind, "code": getattr(error, "code", None), "message": str(error)}


class Caller:
    """One caller: its functions and its session."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.session: Session
        self.released = asyncio.Event()
        self.scope = contextlib.AsyncExitStack()

    def lend(self, lend: Lend, tool: str, behaviour: str) -> None:
        async def run(**arguments: Any) -> Any:
            write({"caller": self.key, "note": "ran", "tool": tool, "arguments": arguments})
            if behaviour == "fail":
                raise ValueError("not today")
            if behaviour == "hold":
                await self.released.wait()
                return "held"
            if behaviour == "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    write({"caller": self.key, "note": "stopped", "tool": tool})
            return {"echo": arguments}

        lend.tool(name=tool, description=f"Does {behaviour}.", input_schema={"type": "object"})(run)

    async def start(self, url, token, caller_id, tools, message, options) -> dict[str, Any]:
        lend = Oubliette(url, token).lend(caller_id)
        lend.on_event(lambda e: write({"caller": self.key, "note": "event", "index": e["index"], "type": e["type"]}))
        for tool, behaviour in tools.items():
            self.lend(lend, tool, behaviour)
        self.session = await self.scope.enter_async_context(lend.start(message, **options))
        return {"session_id": self.session.id, "turn": self.session.last_turn}

    async def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        match name:
            case "start":
                return await self.start(**args)
            case "turn":
                return vars(await self.session.turn(args["number"]))
            case "ask":
                return vars(await self.session.ask(args["message"]))
            case "message":
                await self.session.message(args["message"])
            case "withdraw":
                await self.session.withdraw(args["message"])
            case "release":
                self.released.set()
            case "ended":
                await self.session.ended()
            case "end":
                await self.session.end()
            case "stop":
                await self.session.stop()
            case _:
                raise ValueError(f"no command {name}")
        return {}


async def run(caller: Caller, id: int, name: str, args: dict[str, Any]) -> None:
    try:
        write({"id": id, "ok": await caller.command(name, args)})
    except Exception as error:
        write({"id": id, "error": describe_error(error)})


async def main() -> None:
    callers: dict[str, Caller] = {}
    tasks = set()
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        command = json.loads(line)
        id, key, name = command.pop("id"), command.pop("caller"), command.pop("do")
        task = asyncio.create_task(run(callers.setdefault(key, Caller(key)), id, name, command))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


asyncio.run(main())

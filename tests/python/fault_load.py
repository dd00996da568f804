"""The load of the fault rounds: all clients of one home, and what they share."""

from __future__ import annotations

import collections
import json
import pathlib
import threading
from typing import Any

from fault_check import Violation
from fault_clients import (
    AGENTS,
    Client,
    DebuggerFollower,
    DefinitionClient,
    Driver,
    FileClient,
    Launcher,
    Poller,
    TokenClient,
    ToolCaller,
)
from fault_history import Connection, Gate, History, ServerGone

HERE = pathlib.Path(__file__).resolve().parent
CONFIG = f"""
[trust]
read_only = ["{HERE}"]
"""
SESSIONS = 3
"""Sessions at a time."""
LAUNCHERS = 6
"""Clients that start sandboxes at once in a burst."""


class Load:
    """All clients of one home, and what they share."""

    if_not_acknowledged: dict[str, Any] = {}
    """What the history says of requests besides that were not acknowledged."""

    def __init__(self, server: Any, seed: str):
        self.server, self.seed, self.port = server, seed, server.port
        self.history = History()
        self.gate = Gate()
        self.stopping = threading.Event()
        self.burst = threading.Event()
        """Set while many sandboxes are to start at once."""
        self.refusals: collections.Counter[str] = collections.Counter()
        self.current: dict[str, dict[str, Any]] = {}
        """The session each driver works with."""
        self.secrets: dict[str, str] = {}
        """Tokens by name."""
        self.known_strays: set[str] = set()
        """Files nobody wrote that were waited for and reported."""
        self.killing = False
        self.broken: list[Violation] = []
        self._lock = threading.Lock()
        self._number = 0
        self.owner = self.connect_owner(server.token("admin"))
        self.define()
        self.janitor = Client(self, "janitor")
        self.gate.leave(self.janitor)
        self.clients: list[Client] = [Driver(self, f"driver-{n}") for n in range(SESSIONS)]
        self.clients += [Launcher(self, f"launcher-{n}") for n in range(LAUNCHERS)]
        self.clients += [kind(self, kind.__name__) for kind in self.other_clients()]
        for client in self.clients:
            client.start()

    def connect(self, token: str) -> Connection:
        return Connection(self.port, token)

    def connect_owner(self, token: str) -> Connection:
        """A connection by which the server is read out."""
        return self.connect(token)

    def other_clients(self) -> list[type[Client]]:
        return [Poller, DebuggerFollower, ToolCaller, TokenClient, DefinitionClient, FileClient]

    def unblock(self) -> None:
        """Does what waiting turns need while clients are held back."""

    def define(self) -> None:
        """The catalog, the agents and the project that the clients use."""
        tools = {
            "tally": {
                "kind": "mcp",
                "transport": "stdio",
                "command": "/usr/bin/python3",
                "read_only": [str(HERE)],
                "args": ["-I", "-S", str(HERE / "tally_server.py")],
                "timeouts": {"startupMs": 120_000},
            },
            "writer": {"kind": "builtin", "builtinPolicy": {"name": "fs_write", "allowedPaths": ["out/"]}},
            "shell": {"kind": "builtin", "builtinPolicy": {"name": "shell_exec", "allowedCommands": ["touch", "true"]}},
        }
        for id, definition in tools.items():
            self.owner.tool("catalog_put", id=id, definition={"id": id, **definition})
        for agent in AGENTS:
            turn = [
                {"say": f"{agent} works"},
                {"call": {"tool": "app_note", "arguments": {"agent": agent}}},
                {"call": {"tool": "@tally/add", "arguments": {"mark": "turn"}}},
                {"sleep_ms": 30},
                {"say": "done"},
            ]
            self.put_agent(agent, turn, {"use": list(tools)})
        made = self.owner.tool("project_create", name="load", limits={"max_sessions": 50})
        self.project, self.workspace = made["project_id"], made["default_workspace_id"]

    def put_agent(self, slug: str, turn: list[dict[str, Any]], tools: dict[str, Any]) -> None:
        """Stores an agent that does the same in each turn."""
        definition = {"name": slug, "prompt": "Follow the script.", "model": "script:script.json", "tools": tools}
        files = {"script.json": json.dumps({"turns": [turn]})}
        self.owner.tool("agent_put", slug=slug, definition=definition, files=files)

    def make_token(self, name: str) -> dict[str, str]:
        return self.owner.tool("token_create", name=f"client {name}", scope="admin")

    def unique(self, what: str) -> str:
        with self._lock:
            self._number += 1
            return f"{what}-{self._number}"

    def connection_broke(self, client: Client, error: ServerGone) -> int | None:
        """Returns the epoch after which the client goes on; none if it may connect again at once."""
        if not self.killing:
            self.broken.append(Violation("broken off", client.name, f"the server was not killed: {error}"))
        return client.epoch

    def client_failed(self, client: Client, error: Exception) -> None:
        self.broken.append(Violation("client failed", client.name, repr(error)))

    def stop(self) -> None:
        self.stopping.set()
        self.gate.stop()
        for client in self.clients:
            client.http.close()

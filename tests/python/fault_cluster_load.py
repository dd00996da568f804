"""The load of fault rounds over several servers: its clients connect again, anywhere, and approvals are decided."""

from __future__ import annotations

import contextlib
from typing import Any

from fault_clients import Client
from fault_history import Connection, Refused, ServerGone
from fault_load import Load
from fault_machine import pause
from harness import wait_until

CLIENT_TIMEOUT = 12.0
"""How long a client waits for a byte. Streams have one every ten seconds, and a frozen server is declared dead after
eight."""
ASKED_TOOL = "@asked/shell_exec"


class SteadyConnection(Connection):
    """Asks again, for what only reads, until a server answers."""

    def request(self, method: str, path: str, body: bytes | None = None, token: str | None = None) -> tuple[int, bytes]:
        def answered() -> tuple[int, bytes] | None:
            try:
                status, text = super(SteadyConnection, self).request(method, path, body, token)
            except ServerGone:
                return None
            return None if status == 503 else (status, text)

        return wait_until(answered, f"an answer to {method} {path}")


class Approver(Client):
    """Decides approvals, most of them favourably."""

    def step(self) -> None:
        for row in self.pending():
            self.decide(row["approval_id"], "allow" if self.random.random() < 0.8 else "deny")
        self.pause(0.1)

    def pending(self) -> list[dict[str, Any]]:
        return self.http.tool("approval_list", project_id=self.load.project, status="pending")["approvals"]

    def decide(self, approval_id: str, decision: str) -> None:
        arguments = {"approval_id": approval_id, "decision": decision}
        with contextlib.suppress(Refused):  # it was over before it was decided
            self.call("approval_decide", arguments, target=approval_id, **arguments)


class ClusterLoad(Load):
    """All clients of a cluster."""

    # What a server did not finish another may have been asked for, and a frozen one wakes later.
    if_not_acknowledged = {"late": True}

    def connect(self, token: str) -> Connection:
        return Connection(self.port, token, CLIENT_TIMEOUT)

    def connect_owner(self, token: str) -> Connection:
        return SteadyConnection(self.port, token, CLIENT_TIMEOUT)

    def other_clients(self) -> list[type[Client]]:
        return [*super().other_clients(), Approver]

    def put_agent(self, slug: str, turn: list[dict[str, Any]], tools: dict[str, Any]) -> None:
        """The second agent needs approval for one of its calls."""
        if slug == "second":
            policy = {"name": "shell_exec", "allowedCommands": ["true"]}
            definition = {"id": "asked", "kind": "builtin", "builtinPolicy": policy}
            self.owner.tool("catalog_put", id="asked", definition=definition)
            turn = [*turn[:-1], {"call": {"tool": ASKED_TOOL, "arguments": {"argv": ["true"]}}}, turn[-1]]
            tools = {"use": [*tools["use"], "asked"], "ask": [ASKED_TOOL]}
        super().put_agent(slug, turn, tools)

    def unblock(self) -> None:
        approver = next(client for client in self.clients if isinstance(client, Approver))
        with contextlib.suppress(ServerGone, Refused):
            for row in approver.pending():
                approver.decide(row["approval_id"], "allow")

    def connection_broke(self, client: Client, error: ServerGone) -> int | None:
        """Clients of a load balancer connect again."""
        pause(0.05)
        return None

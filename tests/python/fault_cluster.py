"""Several servers on one PostgreSQL behind a load balancer, and what can happen to them.

- `ClusterServer`: one server. Its clients, the other servers and the database are reached over links that can be cut.
- `Cluster`: all of them, with their database.
- `Fault`: what is done to one of them, or to the database, and how it is undone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import tempfile
from functools import partial
from typing import Any, Callable

import harness
from fault_database import FaultyDatabase
from fault_history import Connection, ServerGone
from fault_load import CONFIG
from fault_machine import LEFTOVER_DEADLINE, KilledServer, descendants, pause
from fault_network import Link, Network, balancer
from harness import wait_until

KEY = "a-key-of-the-fault-rounds"
SCHEMA = "fault_rounds"
SHORT, LONG = (0.0, 1.5), (6.5, 12.0)
"""How many seconds a fault lasts: too short for the others to take over, or long enough."""


class ClusterServer(KilledServer):
    """A server of a cluster."""

    def __init__(self, folder: pathlib.Path, name: str, network: Network, database: FaultyDatabase):
        super().__init__(folder / name)
        sockets = folder / f"{name}-db"
        sockets.mkdir()
        far = f"{database.socket_dir}/.s.PGSQL.5432"
        self.to_database = Link(network, lambda: [far], f"{sockets}/.s.PGSQL.5432")
        self.from_others = Link(network, lambda: [self.port])
        (self.home / "oubliette.toml").write_text(
            f"""{CONFIG}
[server]
rate_limit = {{ per_second = 3000 }}
[cluster]
advertise = "http://127.0.0.1:{self.from_others.port}"
key_env = "TEST_CLUSTER_KEY"
[workspaces]
dir = "{folder}/workspaces"
"""
        )
        self.env = {"OUBLIETTE_STORE_URL": database.url(SCHEMA, str(sockets)), "TEST_CLUSTER_KEY": KEY}

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def cli(self, *args: str, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess:
        """Without the database of the other tests, which would be started for it."""
        command = [harness.BIN / "oubliette", "--home", self.home, *args]
        options = {"capture_output": True, "text": True, "timeout": harness.DEADLINE, "env": self.environment()}
        return subprocess.run(command, check=check, **{**options, **kwargs})

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.from_others.port}"

    def cut(self) -> None:
        for link in (self.from_others, self.to_database):
            link.cut()

    def restore(self) -> None:
        for link in (self.from_others, self.to_database):
            link.restore()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Cluster:
    """Servers on one database. Clients take it for one server: `port`, `token` and `log` are what `Load` asks for."""

    def __init__(self, size: int):
        self._folder = tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True)
        folder = pathlib.Path(self._folder.name)
        (folder / "workspaces").mkdir()
        self.network = Network()
        self.database = FaultyDatabase()
        self.database.execute(f"CREATE SCHEMA {SCHEMA}")
        self.servers = [ClusterServer(folder, f"h{n}", self.network, self.database) for n in range(size)]
        self.balancer = balancer(self.network, [server.from_others for server in self.servers])

    @property
    def port(self) -> int:
        return self.balancer.port

    def start(self) -> None:
        for server in self.servers:
            server.start()

    def token(self, scope: str) -> str:
        return self.servers[0].token(scope)

    def log(self) -> str:
        return "\n".join(f"--- {server.home.name}, {server.address}\n{server.log()}" for server in self.servers)

    def wait_until_whole(self, token: str) -> None:
        """Waits until every server runs, all of them know it, and nobody else is a member."""
        addresses = sorted(server.address for server in self.servers)

        def is_whole() -> bool:
            if not all(server._ready() for server in self.servers):
                return False
            return all(self.members(server, token) == addresses for server in self.servers)

        wait_until(is_whole, "all servers to be members again")

    @staticmethod
    def members(server: ClusterServer, token: str) -> list[str] | None:
        try:
            status, text = Connection(server.port, token).request("POST", "/api/tools/server_list", b"{}")
        except ServerGone:
            return None
        return sorted(row["address"] for row in json.loads(text)["servers"]) if status == 200 else None

    def member_ids(self) -> list[str]:
        """The ids of the servers, which change when one starts anew."""
        return self.database.execute(f"SELECT server_id FROM {SCHEMA}.servers ORDER BY 1").splitlines()

    def owners(self) -> dict[str, list[str]]:
        """For each session, the servers that own it or run processes of it."""
        sql = (
            "SELECT sessions.session_id, owner.server_id, servers.address FROM {0}.sessions"
            " LEFT JOIN {0}.session_owners owner USING (root_id) LEFT JOIN {0}.servers USING (server_id)"
        )
        found: dict[str, list[str]] = {}
        for row in self.database.execute(sql.format(SCHEMA)).splitlines():
            session, owner, address = row.split("|")
            found[session] = [address or f"{owner}, which is gone"] if owner else []
        for server in self.servers:
            for session in sessions_below(server) & found.keys():
                found[session].append(server.address)
        return found

    def owners_at_rest(self) -> dict[str, list[str]]:
        """The same, once there was time for processes of sessions that changed hands to end."""
        with contextlib.suppress(AssertionError):
            wait_until(
                lambda: all(len(set(servers)) <= 1 for servers in self.owners().values()),
                "sessions to have one server each",
                LEFTOVER_DEADLINE,
            )
        return self.owners()

    def integrity(self) -> list[str]:
        """What PostgreSQL's own check of its indexes says."""
        sql = (
            "SET client_min_messages = warning; CREATE EXTENSION IF NOT EXISTS amcheck; SELECT count(bt_index_check(c.oid))"
            " FROM pg_class c JOIN pg_am a ON a.oid = c.relam JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE c.relkind = 'i' AND a.amname = 'btree' AND n.nspname = '{SCHEMA}'"
        )
        try:
            self.database.execute(sql)
        except subprocess.CalledProcessError as error:
            return [error.stderr.strip()]
        return ["ok"]

    def kill(self) -> None:
        for server in self.servers:
            if server.process and server.process.poll() is None:
                server.kill()

    def close(self) -> None:
        self.kill()
        self.balancer.close()
        for server in self.servers:
            server.from_others.close()
            server.to_database.close()
        self.database.close()
        self.network.close()
        self._folder.cleanup()


def sessions_below(server: ClusterServer) -> set[str]:
    """The sessions of which a server runs processes: their sandboxes have the session's sockets mounted."""
    if server.process is None or server.process.poll() is not None:
        return set()
    needle = f"{server.home}/run/"
    found = set()
    for pid in descendants(server.process.pid):
        with contextlib.suppress(OSError):
            mounts = pathlib.Path(f"/proc/{pid}/mountinfo").read_text()
            found |= {part.split("/")[0].split()[0] for part in mounts.split(needle)[1:]}
    return found


@dataclasses.dataclass
class Fault:
    """Something that happens to a server or to the database."""

    name: str
    happen: Callable[[], Any]
    end: Callable[[], Any]
    seconds: float
    loses_memory: bool = False
    """The database loses what it had not yet written."""


FAULTS = (
    "kill",
    "kill twice",
    "freeze",
    "cut",
    "isolate",
    "break off",
    "freeze database",
    "cut database",
    "break off database",
    "restart database",
    "crash database",
)


class FaultMaker:
    """Makes faults by name. Which server one is for is up to chance."""

    def __init__(self, cluster: Cluster, chance: random.Random, killed: Callable[[int], None]):
        self.cluster, self.chance, self.killed = cluster, chance, killed

    def make(self, name: str, seconds: float) -> Fault:
        server, database = self.chance.choice(self.cluster.servers), self.cluster.database
        victim = f"{name} {server.home.name}"
        match name:
            case "kill":
                return Fault(victim, partial(self.kill, server), server.start, seconds)
            case "kill twice":
                return Fault(victim, partial(self.kill, server), partial(self.start_and_kill, server), seconds)
            case "freeze":
                freeze, thaw = partial(server.signal, signal.SIGSTOP), partial(server.signal, signal.SIGCONT)
                return Fault(victim, freeze, thaw, seconds)
            case "cut":
                return Fault(victim, server.cut, server.restore, seconds)
            case "isolate":
                return Fault(victim, server.to_database.cut, server.to_database.restore, seconds)
            case "break off":
                return Fault(victim, server.to_database.break_off, nothing, 0)
            case "freeze database":
                return Fault(name, database.freeze, database.thaw, seconds)
            case "cut database":
                return Fault(name, partial(self.to_all_links, Link.cut), partial(self.to_all_links, Link.restore), seconds)
            case "break off database":
                return Fault(name, partial(self.to_all_links, Link.break_off), nothing, 0)
            case "restart database":
                return Fault(name, database.shut_down, database.start, seconds)
            case "crash database":
                return Fault(name, database.crash, database.start, seconds, loses_memory=True)
        raise ValueError(name)

    def kill(self, server: ClusterServer) -> None:
        self.killed(server.process.pid)
        server.kill()

    def start_and_kill(self, server: ClusterServer) -> None:
        """Kills it again while it starts, then starts it."""
        server.spawn()
        pause(self.chance.uniform(0, 0.5))
        self.kill(server)
        server.start()

    def to_all_links(self, act: Callable[[Link], None]) -> None:
        for server in self.cluster.servers:
            act(server.to_database)


def nothing() -> None:
    pass

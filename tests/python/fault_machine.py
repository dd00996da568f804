"""The server that is killed in fault rounds, and what it leaves on the machine: processes, control groups, mounts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import sqlite3
import subprocess
import threading
import time

import harness
import stores
from fault_history import Connection, ServerGone
from harness import wait_until

LEFTOVER_DEADLINE = 60.0
"""How long processes and files of a killed server may take to go."""
PR_SET_CHILD_SUBREAPER = 36


def pause(seconds: float) -> None:
    """Lets time pass where there is no event to wait for: a random time before a kill, or between looks at processes."""
    threading.Event().wait(seconds)


class KilledServer(harness.Server):
    """A server that can also be killed while it starts."""

    @property
    def log_file(self) -> pathlib.Path:
        return self._log

    @log_file.setter
    def log_file(self, path: pathlib.Path) -> None:
        """Puts the server's own log elsewhere than beside its home."""
        self._log = path

    def environment(self) -> dict[str, str]:
        return {**os.environ, **stores.env(self.home), **self.env}

    def spawn(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [harness.BIN / "oubliette", "--home", self.home, "serve", "--listen", f"127.0.0.1:{self.port}"],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start(self) -> "KilledServer":
        self.spawn()
        wait_until(self._ready, "the server to be ready")
        return self

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log()[-3000:]}")
        return self.probe("/ready") == 200

    def is_up(self) -> bool:
        return self.probe("/health") == 200

    def probe(self, path: str) -> int | None:
        try:
            return Connection(self.port, "").request("GET", path)[0]
        except ServerGone:
            return None

    @property
    def database(self) -> pathlib.Path:
        return self.home / "oubliette.db"

    def integrity(self) -> list[str]:
        return integrity(self.database)


class Processes:
    """Finds what killed servers left running.

    This process is made the reaper of orphans below it, so everything a server ever started stays a descendant of this
    process until it ends, whatever its namespaces, environment or command line are.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._adopt(True)
        self._others = set(descendants(os.getpid()))
        self.killed: set[int] = set()
        self.spared: set[int] = set()
        """Processes that are no server's, with everything below them."""

    def _adopt(self, on: bool) -> None:
        if self._libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    def close(self) -> None:
        """Ends what is left of all servers, also of a test that broke off."""
        self.end([pid for pid in descendants(os.getpid()) if pid not in self._others])
        self.reap(set())
        self._adopt(False)

    def left(self, *servers: KilledServer) -> list[int]:
        """Processes of killed servers that still run."""
        running = {server.process.pid for server in servers if server.process and server.process.poll() is None}
        self.reap(running)
        table = process_table()
        below = descendants(os.getpid(), table)
        own = running | self.spared
        own = own.union(*(descendants(top, table) for top in own))
        found = [pid for pid, (_, state) in below.items() if pid not in self._others | own and state not in "ZX"]
        if found:
            return found
        # Processes that belong to a home and left the tree, if that were possible. Some may just have been started.
        homes = [server.home for server in servers]
        strays = {pid for home in homes for pid in of_home(home, self.killed, except_for=below.keys() | own)}
        return sorted(strays.difference(*(descendants(top) for top in running)) if strays else strays)

    def reap(self, running: set[int]) -> None:
        """Takes leave of orphans that ended here."""
        for pid, (parent, state) in descendants(os.getpid()).items():
            if parent == os.getpid() and state == "Z" and pid not in self._others | running | self.spared:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def end(self, pids: list[int]) -> None:
        """Kills survivors, so that the next round begins with none; only what is below this process."""
        for pid in descendants(os.getpid()).keys() & set(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def process_table() -> dict[int, tuple[int, str]]:
    """Every process: its parent and its state."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat = pathlib.Path(f"/proc/{name}/stat").read_text()
                fields = stat[stat.rindex(")") + 2 :].split()
                table[int(name)] = (int(fields[1]), fields[0])
    return table


def descendants(top: int, table: dict[int, tuple[int, str]] | None = None) -> dict[int, tuple[int, str]]:
    table = table or process_table()
    found: dict[int, tuple[int, str]] = {}
    while more := {p: row for p, row in table.items() if p not in found and (row[0] == top or row[0] in found)}:
        found.update(more)
    return found


def wait_for_first_child(server: KilledServer) -> None:
    """Waits until the server has started its first process, or has exited, for two seconds at most. It does not sleep in
    between: what it waits for may be over in a millisecond."""
    tasks = pathlib.Path(f"/proc/{server.process.pid}/task")
    deadline = time.monotonic() + 2
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if any((task / "children").read_text() for task in tasks.iterdir()):
                return


def of_home(home: pathlib.Path, killed: set[int], except_for: set[int]) -> list[int]:
    """Processes with the home in their command line, environment or mounts, or in a control group of a killed server."""
    needle = f"{home}/".encode()
    groups = [f"-{pid}-".encode() for pid in gone(killed)]
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid() or int(name) in except_for:
            continue
        text = b""
        for file in ("cmdline", "environ", "mountinfo"):
            with contextlib.suppress(OSError):
                text += pathlib.Path(f"/proc/{name}/{file}").read_bytes()
        with contextlib.suppress(OSError):
            group = pathlib.Path(f"/proc/{name}/cgroup").read_bytes()
            if needle in text or b"oubliette" in group and any(pid in group for pid in groups):
                found.append(int(name))
    return found


def gone(pids: set[int]) -> set[int]:
    """Without those that another process has by now."""
    return {pid for pid in pids if not pathlib.Path(f"/proc/{pid}").exists()}


def describe_process(pid: int) -> str:
    def read(name: str) -> str:
        with contextlib.suppress(OSError):
            return (
                pathlib.Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            )
        return "?"

    exe = "?"
    with contextlib.suppress(OSError):
        exe = os.readlink(f"/proc/{pid}/exe")
    parent, state = process_table().get(pid, ("?", "?"))
    return f"{pid} (parent {parent}, state {state}, {exe}, waits in {read('wchan')}): {read('cmdline')[:200]}"


def left_running(processes: Processes, *servers: KilledServer) -> list[str]:
    """Processes of killed servers that run on, once they had time to end. They are described and then killed."""
    has_restarted = all(server.process.poll() is None for server in servers)
    when = "after the restart" if has_restarted else "before the restart"
    deadline = time.monotonic() + LEFTOVER_DEADLINE
    while left := processes.left(*servers):
        if time.monotonic() > deadline:
            break
        pause(0.05)
    described = [f"{describe_process(pid)} ({when})" for pid in left]
    processes.end(left)
    return described


def cgroups_of(killed: set[int]) -> list[str]:
    """Control groups that carry the process id of a killed server."""
    found = []
    killed = gone(killed)
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            if "oubliette" in name and killed & {int(part) for part in name.split("-") if part.isdigit()}:
                found.append(f"{folder}/{name}")
    return found


def mounts_of(home: pathlib.Path) -> list[str]:
    return [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if f" {home}/" in line]


def integrity(database: pathlib.Path) -> list[str]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)
    try:
        lines = [row[0] for row in connection.execute("PRAGMA integrity_check")]
        broken = [
            f"row {row[1]} of {row[0]} refers to a missing row"
            for row in connection.execute("PRAGMA foreign_key_check")
        ]
        return lines if not broken else [line for line in lines if line != "ok"] + broken
    finally:
        connection.close()

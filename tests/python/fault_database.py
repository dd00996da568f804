"""A PostgreSQL of its own for fault rounds, which can be frozen, stopped and killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import threading

import stores
from fault_machine import process_table


class FaultyDatabase:
    """One PostgreSQL server. Unlike that of the other tests it keeps its pages whole when it is killed."""

    def __init__(self) -> None:
        command = [stores.SERVE, "full_page_writes=on"]
        self._serve = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()
        self.socket_dir = self._ready()

    def _ready(self) -> str:
        assert self._serve.stdout
        said = self._serve.stdout.readline().strip()
        assert said.startswith("ready "), f"no PostgreSQL for the fault rounds: {said}"
        return said.removeprefix("ready ")

    @property
    def top_pid(self) -> int:
        """The process that all of its processes are below."""
        return self._serve.pid

    @property
    def pid(self) -> int:
        """Its first process, whose children serve the connections."""
        return int(pathlib.Path(self.socket_dir, "data", "postmaster.pid").read_text().split()[0])

    def execute(self, sql: str) -> str:
        """The output of a statement."""
        command = ["psql", "-h", self.socket_dir, "-U", "oubliette", "-d", "postgres", "-AtqX", "-v", "ON_ERROR_STOP=1"]
        return subprocess.run([*command, "-c", sql], check=True, capture_output=True, text=True).stdout.strip()

    def url(self, schema: str, socket_dir: str | None = None) -> str:
        """The address of a schema, reached through another socket if one is given."""
        host = socket_dir or self.socket_dir
        return f"postgres://oubliette@localhost/postgres?host={host}&options[search_path]={schema}"

    def freeze(self) -> None:
        """Stops all its processes, the first one first, so that no new one begins."""
        first = self.pid
        self._signal([first], signal.SIGSTOP)
        self._signal(children(first), signal.SIGSTOP)

    def thaw(self) -> None:
        first = self.pid
        self._signal([*children(first), first], signal.SIGCONT)

    def shut_down(self) -> None:
        """Ends it as an operator does: connections are ended, and what was committed is on the disk."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """Kills all its processes: what was only in their memory is lost."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        first = self.pid
        others = children(first)
        self._signal([first], number)
        if number == signal.SIGKILL:
            self._signal(others, number)

    def start(self) -> None:
        """Starts it again after it has ended."""
        with self._lock:
            assert self._serve.stdin
            self._serve.stdin.write("start\n")
            self._serve.stdin.flush()
            self._ready()

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.thaw()
        assert self._serve.stdin
        self._serve.stdin.close()
        self._serve.wait()


def children(parent: int) -> list[int]:
    return [pid for pid, (of, _) in process_table().items() if of == parent]

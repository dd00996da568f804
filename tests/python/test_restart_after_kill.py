"""A server starts although processes of the killed one still hold what they inherited from it.

Between fork and exec a process has every descriptor of the server that starts it: the port, the control socket, the lock
of the home. That takes some thousandths of a second, or longer on a machine that is busy. Here the test itself holds them.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import tempfile

import pytest

import fault_machine
import harness
from harness import wait_until

SYS_PIDFD_GETFD = 438
LOCK = "oubliette.db.lock"


def descriptors(pid: int) -> dict[int, str]:
    """The descriptors of a process and what they are open for."""
    found = {}
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue
    return found


def listening_sockets(pid: int, port: int) -> tuple[set[str], set[str]]:
    """Inodes of the sockets listening on this port and of those at a `control.sock`, as their links in /proc name them."""
    net = pathlib.Path(f"/proc/{pid}/net")
    tcp = [line.split() for line in (net / "tcp").read_text().splitlines()[1:]]
    unix = [line.split() for line in (net / "unix").read_text().splitlines()[1:]]
    on_port = {f"socket:[{row[9]}]" for row in tcp if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    control = {f"socket:[{row[6]}]" for row in unix if row[-1].endswith("/control.sock")}
    return on_port, control


def inherit(pid: int, number: int) -> int:
    """A descriptor of another process, as a child of it would have it."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        taken = libc.syscall(SYS_PIDFD_GETFD, process, number, 0)
        if taken < 0:
            pytest.skip(f"descriptors of another process cannot be taken here: {os.strerror(ctypes.get_errno())}")
        return taken
    finally:
        os.close(process)


@pytest.fixture
def server():
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        server = fault_machine.KilledServer(pathlib.Path(folder) / "h").start()
        yield server
        server.kill()


def test_a_server_starts_while_a_process_of_the_killed_one_has_its_descriptors(server):
    """The port, the control socket and the lock are still held when the next server starts: it waits until they are free."""
    pid = server.process.pid
    on_port, control = listening_sockets(pid, server.port)
    open_files = descriptors(pid)
    port = [inherit(pid, number) for number, name in open_files.items() if name in on_port]
    others = [inherit(pid, n) for n, name in open_files.items() if name in control or name.endswith(LOCK)]
    assert len(port) == 1 and len(others) >= 2
    server.kill()
    server.spawn()
    next_pid = server.process.pid
    wait_until(lambda: ended(server) or "anon_inode:[eventpoll]" in descriptors(next_pid).values(), "a start")
    assert not ended(server), server.log()
    os.close(port[0])
    wait_until(lambda: ended(server) or any(n.endswith(LOCK) for n in descriptors(next_pid).values()), "the lock's turn")
    assert not ended(server), server.log()
    for number in others:
        os.close(number)
    wait_until(server._ready, "the server to be ready")


def test_a_second_server_is_refused_at_once_while_the_first_one_runs(server):
    """A server that lives is not waited for."""
    second = fault_machine.KilledServer(server.home)
    second.log_file = server.home.parent / "second.log"
    second.spawn()
    assert second.process.wait(harness.DEADLINE) != 0
    assert "running" in second.log() and f":{server.port}" in second.log(), second.log()
    assert server.is_up()


def ended(server: fault_machine.KilledServer) -> bool:
    return server.process.poll() is not None

"""Nothing inside a sandbox gets out of it: not an agent, not a tool server, not a command, at either isolation level.

The attempts are those of `attacks/escapes`. Each runs at each level from each of the three, and each is a test of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any, Iterator

import pytest

import servers
from attack_support import ATTACKS, TRUST, Attacker, program, unharmed
from harness import BIN, Server, running

sys.path.insert(0, str(ATTACKS))
import escapes  # noqa: E402

escapes.load()

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attempts know the system calls of x86-64")

SECRET, TRUSTED = "only-the-owner-may-read-this-91ce", "known-to-the-server-alone-44d0"
LIBC = ctypes.CDLL(None, use_errno=True)
IPC_CREATE, IPC_REMOVE = 0o1000, 0
MQ_OPEN, MQ_UNLINK = 240, 241

PROGRAM = """
    import json, os, sys
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.getcwd())
    import escapes
    said = json.dumps(escapes.run_all(json.load(open('escapes/host.json'))))
"""

ROWS = [
    pytest.param(level, origin, name, id=f"{level}-{origin}-{name}")
    for level in escapes.BOTH
    for origin in ("agent", "tool_server", "shell_exec")
    for name, (_, levels) in escapes.ATTEMPTS.items()
    if level in levels
]


class Host:
    """Things of the host that a sandbox must not reach, and whether they were."""

    def __init__(self, folder: pathlib.Path):
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.victim = subprocess.Popen(["sleep", "1000"])
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("0.0.0.0", 0))
        self.abstract = f"oubliette-escapes-{os.getpid()}-{folder.name}"
        self.unix = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, name in zip(self.unix, ["\0" + self.abstract, str(folder / "host.sock")]):
            listener.bind(name)
            listener.listen()
        for each in (self.tcp, self.udp, *self.unix):
            each.setblocking(False)
        self.path = str(folder / "host.sock")
        self.temporary = []
        for place in ("/tmp", "/dev/shm", "/var/tmp"):
            if os.path.isdir(place):
                fd, path = tempfile.mkstemp(prefix="oubliette-escapes", dir=place)
                os.write(fd, SECRET.encode())
                os.close(fd)
                os.chmod(path, 0o666)
                self.temporary.append(path)
        self.key = os.getpid()
        self.shared = [
            (LIBC.shmctl, LIBC.shmget(self.key, 4096, IPC_CREATE | 0o666)),
            (LIBC.msgctl, LIBC.msgget(self.key, IPC_CREATE | 0o666)),
        ]
        self.semaphore = LIBC.semget(self.key, 1, IPC_CREATE | 0o666)
        self.queue = f"oubliette-escapes-{os.getpid()}"
        LIBC.syscall(MQ_OPEN, self.queue.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
        self.before = self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "outside": sorted(os.listdir(self.outside)),
            "temporary": [pathlib.Path(path).read_text() for path in self.temporary],
            "host name": os.uname().nodename,
            "priority": os.getpriority(os.PRIO_PROCESS, self.victim.pid),
            "processors": os.sched_getaffinity(self.victim.pid),
            "files": resource.prlimit(self.victim.pid, resource.RLIMIT_NOFILE),
            "victim": self.victim.poll(),
            "core pattern": pathlib.Path("/proc/sys/kernel/core_pattern").read_text(),
        }

    def check_untouched(self) -> None:
        assert self._state() == self.before
        with contextlib.suppress(BlockingIOError):
            pytest.fail(f"a datagram came from a sandbox: {self.udp.recvfrom(100)}")
        for listener in (self.tcp, *self.unix):
            with contextlib.suppress(BlockingIOError):
                pytest.fail(f"a connection came from a sandbox: {listener.accept()}")

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for each in (self.tcp, self.udp, *self.unix):
            each.close()
        for path in self.temporary:
            os.unlink(path)
        for control, id in self.shared:
            control(id, IPC_REMOVE, None)
        LIBC.semctl(self.semaphore, 0, IPC_REMOVE)
        LIBC.syscall(MQ_UNLINK, self.queue.encode())


def addresses() -> list[str]:
    """The host's address in its network, if it has one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect(("192.0.2.1", 9))
        return [any_socket.getsockname()[0]]
    return []


@contextlib.contextmanager
def confined(level: str) -> Iterator[Server]:
    """A server whose sandboxes have this level."""
    env = {"ATTACK_SECRET": TRUSTED}
    with tempfile.TemporaryDirectory() as programs:
        if level == "landlock":
            # As on a host where bubblewrap cannot make namespaces.
            pathlib.Path(programs, "bwrap").write_text("#!/bin/sh\nexit 1\n")
            pathlib.Path(programs, "bwrap").chmod(0o755)
            env["PATH"] = f"{programs}:{os.environ['PATH']}"
        with running(f'{TRUST}[sandbox]\nminimum = "{level}"\n', env) as server:
            yield server


class Inside:
    """A session whose agent, tool server and commands all mean harm."""

    def __init__(self, server: Server, level: str, host: Host):
        admin = server.token("admin")
        self.server, self.admin, self.host = server, admin, host
        script = ["-I", "-S", str(ATTACKS / "tool_server.py")]
        server.put_tool("hostile", admin, **servers.stdio("/usr/bin/python3", script, [str(ATTACKS)]))
        policy = {"name": "shell_exec", "allowedCommands": ["python3"], "timeoutMs": 120_000}
        server.put_tool("shell", admin, kind="builtin", builtinPolicy=policy)
        project, other = (server.api("project_create", admin, name=name)["project_id"] for name in ("own", "other"))
        server.put_agent("other", admin, [[{"say": "hi"}]])
        bystander = server.api("session_message", admin, message="go", project_id=other, agent="other", wait=True)
        bystander = server.api("session_get", admin, session_id=bystander["session_id"])
        self.other_file = server.home / "projects" / other / "workspaces" / bystander["workspace_id"] / "file"
        self.other_file.write_text(SECRET)
        secret = server.home / "admin.token"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        self.attacker = Attacker(server, admin, project, tools={"use": ["hostile", "shell"]})
        package = self.attacker.workspace / "escapes"
        shutil.copytree(ATTACKS / "escapes", package, ignore=shutil.ignore_patterns("__pycache__"))
        assert server.process
        facts = {
            "level": level,
            "attacks": str(ATTACKS),
            "home": str(server.home),
            "secret": str(secret),
            "secrets": [SECRET, TRUSTED, admin],
            "other_file": str(self.other_file),
            "other_relay": bystander["relay_socket"],
            "control": str(self._control_socket()),
            "client": str(BIN / "oubliette-client"),
            "outside": str(host.outside),
            "temporary": host.temporary,
            "server_pid": server.process.pid,
            "victim_pid": host.victim.pid,
            "port": server.port,
            "listener_port": host.tcp.getsockname()[1],
            "datagram_port": host.udp.getsockname()[1],
            "listener_path": host.path,
            "abstract": host.abstract,
            "addresses": addresses(),
            "ipc_key": host.key,
            "queue": host.queue,
        }
        # In a file: an argument would be among what is searched for secrets.
        (package / "host.json").write_text(json.dumps(facts))
        assert server.api("server_info", admin)["isolation"] == level

    def _control_socket(self) -> pathlib.Path:
        sockets = [path for path in (self.server.home / "run").iterdir() if path.is_socket()]
        assert len(sockets) == 1, sockets
        return sockets[0]

    def escape_from(self, origin: str) -> dict[str, str]:
        """Makes every attempt from there; their outcomes by name."""
        text = program(PROGRAM)
        if origin == "agent":
            return json.loads(self.attacker.run(text + "\nagent.say(said)"))
        if origin == "tool_server":
            tool, arguments = "@hostile/run", {"program": text}
        else:
            tool, arguments = "@shell/shell_exec", {"argv": ["python3", "-I", "-S", "-c", text + "\nprint(said)"]}
        call = {"session_id": self.attacker.session, "tool": tool, "arguments": arguments}
        result = self.server.api("tool_call", self.admin, **call)
        if origin == "shell_exec":
            assert not result["isError"], result
            return json.loads(result["structuredContent"]["stdout"])
        return json.loads(result["content"][0]["text"])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came of all attempts from one place; each place is tried once."""
    with contextlib.ExitStack() as stack:
        places: dict[str, Inside] = {}
        done: dict[tuple[str, str], dict[str, str]] = {}

        def outcomes(level: str, origin: str) -> dict[str, str]:
            if level not in places:
                host = Host(tmp_path_factory.mktemp(level))
                stack.callback(host.close)
                places[level] = Inside(stack.enter_context(confined(level)), level, host)
            if (level, origin) not in done:
                done[level, origin] = places[level].escape_from(origin)
            return done[level, origin]

        outcomes.places = places
        yield outcomes


@pytest.mark.parametrize(("level", "origin", "name"), ROWS)
def test_it_is_held(outcomes, level, origin, name):
    """One attempt to leave a sandbox is refused in everything it tries."""
    outcome = outcomes(level, origin)[name]
    assert outcome == "held", outcome


@pytest.mark.parametrize("level", escapes.BOTH)
def test_the_host_is_as_it_was(outcomes, level):
    """After every attempt at a level: no file, process, setting or socket of the host was touched, and the server works."""
    for origin in ("agent", "tool_server", "shell_exec"):
        outcomes(level, origin)
    place = outcomes.places[level]
    place.host.check_untouched()
    assert place.other_file.read_text() == SECRET
    assert os.listdir(place.other_file.parent) == ["file"]
    assert (place.server.home / "admin.token").read_text() == SECRET
    assert (place.server.home / "admin.token").stat().st_mode & 0o777 == 0o600
    assert not (place.server.home / "escaped").exists()
    unharmed(place.server, place.admin)


def test_the_suite_is_as_large_as_promised():
    """At least sixty attempts at each level; a row that goes missing is noticed."""
    for level in escapes.BOTH:
        assert len([name for name, (_, levels) in escapes.ATTEMPTS.items() if level in levels]) >= 60, level

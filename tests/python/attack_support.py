"""What the attacks on the server have in common: an agent that means harm, and measures of the harm done."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import tempfile
import textwrap
import time
from typing import Any, Callable, Iterator

import httpx
import pytest

import harness
from harness import Server, ToolFailed, running, wait_until

ATTACKS = harness.ROOT / "tests" / "python" / "attacks"
TRUST = f'[trust]\nread_only = ["{ATTACKS}"]\n'
"""What `oubliette.toml` opens so that sandboxes see the programs in `attacks/`."""

MIB = 1024 * 1024

NOBODY = 65534

ANSWERED_WITHIN = 120.0
"""Seconds in which a server that is being attacked answers somebody else. A frozen one never does; this is no measurement."""


def program(text: str, **values: Any) -> str:
    """A program for `acp_agent.py`, with values it can name."""
    return "".join(f"{name} = {value!r}\n" for name, value in values.items()) + textwrap.dedent(text)


@contextlib.contextmanager
def folder_in_memory() -> Iterator[pathlib.Path]:
    """A folder on a memory file system, where there is one; one of its own, if we may mount it."""
    shared = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="oub", dir=shared if shared.is_dir() else None) as folder:
        options = ["-t", "tmpfs", "-o", "size=4g,nr_inodes=2m"]
        mount = subprocess.run(["mount", *options, "oubliette-test", folder], capture_output=True)
        try:
            yield pathlib.Path(folder)
        finally:
            if mount.returncode == 0:
                # Lazily: whatever is still open in it goes with its process.
                subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def running_in_memory(config: str = "") -> Iterator[Server]:
    """A server whose home is on a memory file system, where there is one: making and removing many thousand directories
    takes minutes on a disk that others use. Where we may mount, nobody else writes on it or frees anything."""
    with folder_in_memory() as folder:
        server = Server(folder / "h", config).start()
        try:
            yield server
        finally:
            if server.process and server.process.poll() is None:
                server.stop()
            # Python's own removal is recursive, and would not get through what some attacks leave.
            subprocess.run(["rm", "-rf", server.home], check=True)


@contextlib.contextmanager
def unprivileged(config: str) -> Iterator[Server]:
    """A server of an ordinary user: no privilege opens a directory that its owner closed."""
    if os.geteuid() != 0:
        with running(config) as server:
            yield server
        return
    for path in (harness.BIN / "oubliette", harness.BIN / "oubliette-client", harness.BIN / "oubliette-agent"):
        if subprocess.run(["test", "-x", path], user=NOBODY, group=NOBODY, extra_groups=[]).returncode:
            pytest.skip(f"{path} is not there for another user than root")
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        server = Unprivileged(pathlib.Path(folder) / "h", config)
        for path in (server.home, *server.home.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        server.start()
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.stop()
            subprocess.run(["rm", "-rf", server.home], check=True)


class Unprivileged(Server):
    """`oubliette serve` and its commands, run by nobody."""

    def start(self) -> "Unprivileged":
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [harness.BIN / "oubliette", "--home", self.home, "serve", "--listen", f"127.0.0.1:{self.port}"],
                env={**os.environ, "HOME": str(self.home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
            )
        wait_until(self._ready, "the server to be ready")
        return self

    def cli(self, *args: str, **kwargs) -> subprocess.CompletedProcess:
        return super().cli(*args, user=NOBODY, group=NOBODY, extra_groups=[], **kwargs)


class Attacker:
    """A session whose agent runs the programs it is sent."""

    def __init__(self, server: Server, admin: str, project: str, slug: str = "hostile", **definition: Any):
        self.server, self.admin, self.project = server, admin, project
        command = ["/usr/bin/python3", "-I", "-S", str(ATTACKS / "acp_agent.py")]
        runtime = {"kind": "acp", "command": command, "read_only": [str(ATTACKS)]}
        server.put_agent(slug, admin, runtime=runtime, **definition)
        started = server.api(
            "session_message", admin, message="agent.say('ready')", project_id=project, agent=slug, wait=True
        )
        assert started["text"] == "ready", started
        self.session = started["session_id"]

    def run(self, text: str, /, **values: Any) -> str:
        """One turn; what the program said."""
        return self.server.api(
            "session_message", self.admin, session_id=self.session, message=program(text, **values), wait=True
        )["text"]

    def begin(self, text: str, /, **values: Any) -> None:
        """One turn, not waited for."""
        self.server.api("session_message", self.admin, session_id=self.session, message=program(text, **values))

    @property
    def details(self) -> dict[str, Any]:
        return self.server.api("session_get", self.admin, session_id=self.session)

    @property
    def workspace(self) -> pathlib.Path:
        """The session's workspace on the host."""
        folder = self.server.home / "projects" / self.project / "workspaces"
        return folder / self.details["workspace_id"]

    @property
    def sockets(self) -> list[pathlib.Path]:
        """The session's sockets on the host, each of which the sandbox can connect to."""
        folder = pathlib.Path(self.details["relay_socket"]).parent
        return sorted(path for path in folder.iterdir() if path.is_socket())

    def log(self) -> list[dict[str, Any]]:
        """Every event so far."""
        events: list[dict[str, Any]] = []
        while True:
            since = events[-1]["index"] if events else -1
            arguments = {"session_id": self.session, "since_index": since, "max_events": 1000}
            page = self.server.api("session_events", self.admin, **arguments)["events"]
            if not page:
                return events
            events += page

    def errors(self) -> list[dict[str, Any]]:
        return [event for event in self.log() if event["type"] == "error"]

    def end(self) -> None:
        with contextlib.suppress(ToolFailed):
            self.server.api("session_end", self.admin, session_id=self.session)

    def __enter__(self) -> "Attacker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def settled(read: Callable[[], Any], what: str, quiet: float = 3.0) -> None:
    """Waits until a value has not changed for some seconds: an attack that is held up has come as far as it will."""
    last, since = read(), time.monotonic()

    def check() -> bool:
        nonlocal last, since
        now = read()
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > quiet

    wait_until(check, what)


class Memory:
    """How far the server's resident memory rose above what it was when this was made."""

    def __init__(self, server: Server):
        assert server.process
        self._process = pathlib.Path("/proc") / str(server.process.pid)
        # Resets the high-water mark: what came before does not count.
        (self._process / "clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def _read(self, field: str) -> int:
        for line in (self._process / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"no {field}: the server is gone")

    @property
    def peak(self) -> int:
        """Bytes at the highest."""
        return self._read("VmHWM") - self._before

    def check(self, most: int) -> None:
        assert self.peak < most, f"the server's memory grew by {self.peak // MIB} MiB, more than {most // MIB} MiB"


def unharmed(server: Server, admin: str) -> None:
    """The server lives and answers in time, and another session works, tool calls included."""
    assert server.process and server.process.poll() is None, f"the server ended:\n{server.log()[-2000:]}"
    answers(server, admin)
    step = {"call": {"tool": "project_list", "arguments": {}}}
    server.put_agent("bystander", admin, [[step, {"say": "unharmed"}]])
    project = server.api("project_create", admin, name="bystander")["project_id"]
    arguments = {"message": "go", "project_id": project, "agent": "bystander", "wait": True}
    said = answers(server, admin, "session_message", **arguments)
    assert said["text"] == "unharmed", said
    log = server.api("session_events", admin, session_id=said["session_id"], max_events=1000)["events"]
    results = [event for event in log if event["type"] == "tool_result"]
    assert [event["ok"] for event in results] == [True], results
    server.api("session_end", admin, session_id=said["session_id"])


def answers(server: Server, token: str, tool: str = "project_list", /, **arguments: Any) -> Any:
    """Somebody else's request, answered while an attack is under way."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        answer = httpx.post(f"{server.url}/api/tools/{tool}", json=arguments, headers=headers, timeout=ANSWERED_WITHIN)
    except httpx.TransportError as error:
        raise AssertionError(f"{tool} was not answered while the attack is under way: {error!r}") from None
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(action: Callable[[], Any]) -> str | None:
    """The error code an action was refused with, or none."""
    try:
        action()
    except ToolFailed as refused:
        return refused.code
    return None


def disk_use(folder: pathlib.Path) -> int:
    """Bytes that the files directly in a folder take on disk, such as the database's."""
    return sum(path.lstat().st_blocks * 512 for path in folder.iterdir() if path.is_file())

"""A session's limits hold for all of it together: every sandbox it has, and everything it can write, at all times."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import subprocess
import tempfile
import uuid

import pytest

import harness
from attack_support import MIB, TRUST, Attacker, program, unharmed
from harness import Server, ToolFailed, processes_with, running, wait_until

MEMORY_MB, PIDS, WORKSPACE_MB = 192, 48, 32
CONFIG = f"{TRUST}[sandbox]\nmemory_mb = {MEMORY_MB}\npids = {PIDS}\nworkspace_mb = {WORKSPACE_MB}\n"

NOBODY = 65534
NOTICED_WITHIN = 40.0
"""Seconds in which too much on disk is found out by whoever counts it. Without a count it never is."""


@pytest.fixture(scope="module")
def server():
    with running(CONFIG) as server:
        yield server


# -- memory and processes -----------------------------------------------------------------------------


def needs_groups(server: Server, admin: str, limit: str) -> None:
    """Skips where this machine lets nobody limit a whole tree of processes."""
    checks = {check["name"]: check for check in server.api("doctor", admin)["checks"]}
    check = checks.get(limit)
    if not (check and check["ok"] and "cgroup" in check["detail"]):
        pytest.skip(f"no {limit} for a group of processes here: {check}")


class Commands:
    """Commands of one session, run side by side. Each takes what it can, says so, and waits."""

    def __init__(self, server: Server, admin: str, project: str, count: int, text: str, **values):
        self.server, self.admin = server, admin
        self.mark = f"side-by-side-{uuid.uuid4()}"
        policy = {"name": "shell_exec", "allowedCommands": ["python3"], "allowedEnv": ["MARK"], "timeoutMs": 90_000}
        server.put_tool("shell", admin, kind="builtin", builtinPolicy=policy)
        server.put_agent("shell-user", admin, [[{"say": "hi"}]], tools={"use": ["shell"]})
        start = {"message": "go", "project_id": project, "agent": "shell-user", "create_workspace": True, "wait": True}
        self.session = server.api("session_message", admin, **start)["session_id"]
        details = server.api("session_get", admin, session_id=self.session)
        self.workspace = server.home / "projects" / project / "workspaces" / details["workspace_id"]
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self.calls = [self._pool.submit(self.run, program(text + HOLD, N=n, **values)) for n in range(count)]

    def run(self, text: str) -> bool:
        """Whether a command came to its end."""
        arguments = {"argv": ["python3", "-I", "-S", "-c", text], "env": {"MARK": self.mark}}
        try:
            result = self.server.api(
                "tool_call", self.admin, session_id=self.session, tool="@shell/shell_exec", arguments=arguments
            )
        except ToolFailed as failed:
            assert failed.code in ("limit_exceeded", "unavailable"), failed
            return False
        return not result["isError"]

    def wait_until_held(self) -> None:
        """Until each command has what it could get, or has failed."""

        def held() -> bool:
            done = [call.done() or (self.workspace / f"held-{n}").exists() for n, call in enumerate(self.calls)]
            return all(done)

        wait_until(held, "each command to hold something or fail")

    def release(self) -> list[bool]:
        (self.workspace / "go").touch()
        return [call.result(harness.DEADLINE) for call in self.calls]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            (self.workspace / "go").touch()
        self._pool.shutdown()
        with contextlib.suppress(ToolFailed):
            self.server.api("session_end", self.admin, session_id=self.session)


HOLD = """
import os, time
open(f'/workspace/held-{N}', 'w').close()
end = time.monotonic() + 60
while not os.path.exists('/workspace/go') and time.monotonic() < end:
    time.sleep(0.05)
"""


def resident(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024
    return 0


def test_commands_side_by_side_share_the_sessions_memory(server, admin, project):
    """An agent runs many commands at once, each within the memory limit; together they do not exceed it."""
    needs_groups(server, admin, "memory limit")
    take = "kept = bytearray(SIZE)\nfor at in range(0, SIZE, 4096):\n    kept[at] = 1\n"
    commands = Commands(server, admin, project, 8, take, SIZE=100 * MIB)
    try:
        commands.wait_until_held()
        used = sum(resident(pid) for pid in processes_with(commands.mark))
        assert used < 1.25 * MEMORY_MB * MIB, f"one session has {used // MIB} MiB of {MEMORY_MB}"
        unharmed(server, admin)
        assert not all(commands.release()), "nobody was told that the limit was reached"
        wait_until(lambda: not processes_with(commands.mark), "the end of every command")
        assert commands.run("print('works again')")
    finally:
        commands.close()


def test_commands_side_by_side_share_the_sessions_processes(server, admin, project):
    """An agent runs many commands at once, each within the limit of processes; together they do not exceed it."""
    needs_groups(server, admin, "process limit")
    take = """
import subprocess
for _ in range(COUNT):
    try:
        subprocess.Popen(['/bin/sleep', '90'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        break
"""
    count = 6
    commands = Commands(server, admin, project, count, take, COUNT=20)
    try:
        commands.wait_until_held()
        found = len(processes_with(commands.mark))
        # What Oubliette itself starts for a sandbox is not the session's.
        assert found <= PIDS + 3 * count, f"one session has {found} processes of {PIDS}"
        unharmed(server, admin)
        commands.release()
        wait_until(lambda: not processes_with(commands.mark), "the end of every command")
        assert commands.run("print('works again')")
    finally:
        commands.close()


# -- disk ---------------------------------------------------------------------------------------------

FILL = """
    import errno, os, time
    PIECE = os.urandom(1 << 20)

    def fill(files):
        # Each file within what one file may be, together more than all may be.
        for file in files:
            for _ in range(24):
                view = memoryview(PIECE)
                while view:
                    view = view[os.write(file, view):]

    def refused(error):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)

    def hold():
        end = time.monotonic() + 100
        while not os.path.exists('/workspace/go') and time.monotonic() < end:
            time.sleep(0.05)

    def create(folder, name):
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder)

    def plain():
        return [create(workspace, f'f{n}') for n in range(3)]

    def home():
        folder = os.open('/home/agent', os.O_RDONLY)
        return [create(folder, f'f{n}') for n in range(3)]

    def deep():
        # Further down than a path can say.
        folder = workspace
        for _ in range(40):
            os.mkdir('d' * 200, dir_fd=folder)
            folder = os.open('d' * 200, os.O_RDONLY, dir_fd=folder)
        return [create(folder, f'f{n}') for n in range(3)]

    def unlinked():
        files = [create(workspace, f'f{n}') for n in range(3)]
        for n in range(3):
            os.unlink(f'f{n}', dir_fd=workspace)
        return files

    def unreadable():
        os.mkdir('closed', dir_fd=workspace)
        folder = os.open('closed', os.O_RDONLY, dir_fd=workspace)
        files = [create(folder, f'f{n}') for n in range(3)]
        os.chmod('closed', 0, dir_fd=workspace)
        return files

    workspace = os.open('/workspace', os.O_RDONLY)
"""

IN_A_TURN = FILL + """
    try:
        fill(globals()[WHERE]())
        hold()
        agent.say('kept')
    except OSError as error:
        agent.say('refused' if refused(error) else repr(error))
"""

BETWEEN_TURNS = FILL + """
    report = create(workspace, 'report')
    os.write(report, b'waiting')
    if os.fork() == 0:
        try:
            while not os.path.exists('/workspace/now'):
                time.sleep(0.05)
            fill(plain())
            os.pwrite(report, b'filled ', 0)
            hold()
        except OSError as error:
            os.pwrite(report, b'refused' if refused(error) else b'failed ', 0)
        finally:
            os._exit(0)
    agent.say('started')
"""


def limited(attacker: Attacker, since: int, is_refused=lambda: False) -> None:
    """Waits until the session is told that it holds too much, or the writer was refused by the file system."""

    def told() -> bool:
        for event in attacker.log():
            if event["index"] > since and event["type"] == "error":
                assert event["code"] == "limit_exceeded", event
                return True
            if event["index"] > since and event["type"] == "turn_completed":
                assert event["text"] == "refused", event
                return True
        return is_refused()

    wait_until(told, "the limit to be noticed", NOTICED_WITHIN)


def writer_refused(report: pathlib.Path) -> bool:
    """Whether the process that was left behind was refused by the file system."""
    said = report.read_bytes().strip() if report.exists() else b""
    assert said != b"failed", "the process could not do its part"
    return said == b"refused"


def fill_in_a_turn(attacker: Attacker, where: str) -> None:
    since = attacker.log()[-1]["index"]
    attacker.begin(IN_A_TURN, WHERE=where)
    try:
        limited(attacker, since)
    finally:
        with contextlib.suppress(OSError):
            (attacker.workspace / "go").touch()


@pytest.mark.parametrize("where", ["plain", "home", "deep", "unlinked"])
def test_what_an_agent_writes_counts_wherever_it_is(server, admin, project, where):
    """An agent writes more than its limit where nobody might count: in its home, beyond the longest path, into files
    without a name; it is stopped, with a reason."""
    with Attacker(server, admin, project) as attacker:
        fill_in_a_turn(attacker, where)
    unharmed(server, admin)


def test_what_an_agent_writes_counts_between_turns(server, admin, project):
    """An agent leaves a process behind that writes while no turn is under way; it is stopped all the same."""
    with Attacker(server, admin, project) as attacker:
        assert attacker.run(BETWEEN_TURNS) == "started"
        wait_until(lambda: attacker.details["status"] == "idle", "the end of the turn")
        since, workspace = attacker.log()[-1]["index"], attacker.workspace
        report = workspace / "report"
        (workspace / "now").touch()
        try:
            limited(attacker, since, lambda: writer_refused(report))
        finally:
            with contextlib.suppress(OSError):
                (workspace / "go").touch()
    unharmed(server, admin)


def test_a_directory_an_agent_closed_counts():
    """An agent hides what it writes in a directory that the server's user may not read; it is stopped all the same."""
    with unprivileged(CONFIG) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        with Attacker(server, admin, project) as attacker:
            fill_in_a_turn(attacker, "unreadable")
        unharmed(server, admin)


def test_uploads_count(server, admin, project):
    """A client uploads file after file; past the workspace's limit it is refused, and may go on once it has made room."""
    workspace = server.api("project_get", admin, project_id=project)["default_workspace_id"]
    url = f"{server.url}/api/workspaces/{workspace}/files"
    headers = {"Authorization": f"Bearer {admin}"}
    piece = os.urandom(3 * MIB)

    def put(name: str) -> int:
        answer = harness.put(f"{url}/{name}", content=piece, headers=headers)
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "limit_exceeded", answer.text
        return answer.status_code

    # The same file again and again is no more than one.
    assert {put("same") for _ in range(16)} == {200}
    statuses = [put(f"f{n}") for n in range(16)]
    assert statuses[0] == 200 and statuses[-1] == 429, statuses
    folder = server.home / "projects" / project / "workspaces" / workspace
    held = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert held <= (WORKSPACE_MB + 1) * MIB, f"{held // MIB} MiB of {WORKSPACE_MB}"
    for name in ("f0", "f1"):
        assert harness.delete(f"{url}/{name}", headers=headers).status_code == 200
    wait_until(lambda: put("f0") == 200, "room to be noticed")
    unharmed(server, admin)


@contextlib.contextmanager
def unprivileged(config: str):
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

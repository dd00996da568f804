"""A session's limits of memory and processes hold for all its sandboxes together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import uuid

import pytest

import harness
from attack_support import MIB, TRUST, program, unharmed, unprivileged
from harness import Server, ToolFailed, processes_with, running, wait_until

MEMORY_MB, PIDS = 192, 48
CONFIG = f"{TRUST}[sandbox]\nmemory_mb = {MEMORY_MB}\npids = {PIDS}\n"


@pytest.fixture(scope="module")
def server():
    with running(CONFIG) as server:
        yield server


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
        policy = {"name": "shell_exec", "allowedCommands": ["python3"], "allowedEnv": ["MARK"], "timeoutMs": 300_000}
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
end = time.monotonic() + 240
while not os.path.exists('/workspace/go') and time.monotonic() < end:
    time.sleep(0.05)
"""


def resident(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024
    return 0


TAKE_MEMORY = "kept = bytearray(SIZE)\nfor at in range(0, SIZE, 4096):\n    kept[at] = 1\n"
TAKE_PROCESSES = """
import subprocess
for _ in range(COUNT):
    try:
        subprocess.Popen(['/bin/sleep', '240'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        break
"""


def test_commands_side_by_side_share_the_sessions_memory(server, admin, project):
    """An agent runs many commands at once, each within the memory limit; together they do not exceed it."""
    needs_groups(server, admin, "memory limit")
    commands = Commands(server, admin, project, 8, TAKE_MEMORY, SIZE=100 * MIB)
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
    count = 6
    commands = Commands(server, admin, project, count, TAKE_PROCESSES, COUNT=20)
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


def test_without_control_groups_a_session_is_counted_and_held_to_its_limits():
    """The machine lets the server make no control groups: many commands of one session at once still share its limits."""
    with unprivileged(CONFIG) as server:
        admin = server.token("admin")
        check = {check["name"]: check for check in server.api("doctor", admin)["checks"]}["memory limit"]
        if "cgroup" in check["detail"]:
            pytest.skip(f"control groups can be made by everybody here: {check}")
        project = server.api("project_create", admin, name="p")["project_id"]
        commands = Commands(server, admin, project, 8, TAKE_MEMORY, SIZE=100 * MIB)
        try:
            commands.wait_until_held()
            bound = 1.25 * MEMORY_MB * MIB
            wait_until(lambda: sum(map(resident, processes_with(commands.mark))) < bound, "memory to be freed")
            assert not all(commands.release()), "nobody was told that the limit was reached"
            assert commands.run("print('works again')")
        finally:
            commands.close()
        commands = Commands(server, admin, project, 6, TAKE_PROCESSES, COUNT=20)
        try:
            commands.wait_until_held()
            wait_until(lambda: len(processes_with(commands.mark)) <= PIDS + 3 * 6, "processes to be ended")
            commands.release()
            wait_until(lambda: not processes_with(commands.mark), "the end of every command")
            assert commands.run("print('works again')")
        finally:
            commands.close()
        unharmed(server, admin)

"""Many agent switches leak nothing: no zombie, no orphan, no open file, thread, mount, socket or memory.

`OUBLIETTE_SWITCHES` sets how many (default 40): a few dozen show a leak in every switch, a thousand a rarer one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import time

import harness
import servers
from harness import running, wait_until

SWITCHES = int(os.environ.get("OUBLIETTE_SWITCHES", "40"))
WARM = 10
"""Switches before the first count, so that everything created only once exists by then."""
SPARE_KIB = 24 * 1024
"""How much resident memory may grow, for the allocator's own variation; independent of the number of switches."""
SPARE_THREADS = 16
"""How many threads may be added: those for blocking work start on demand and end after ten idle seconds."""


def resource_counts(server, pid: int) -> dict[str, object]:
    """Counts of the resources that the server and its sandboxes hold."""
    status = dict(
        line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    below = tree(pid)
    sockets = [line for line in pathlib.Path("/proc/net/unix").read_text().splitlines() if str(server.home) in line]
    return {
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss_kib": int(status["VmRSS"].split()[0]),
        "mounts": len(pathlib.Path("/proc/self/mountinfo").read_text().splitlines()),
        "zombies": sum(state == "Z" for _, state, _ in below.values()),
        "processes": dict(collections.Counter(name for _, _, name in below.values())),
        "sockets": len(sockets),
        "socket files": sum(path.is_socket() for path in server.home.rglob("*")),
        "run files": sum(1 for _ in (server.home / "run").rglob("*")) if (server.home / "run").exists() else 0,
        "cgroups": sum(1 for path in cgroups() if str(pid) in path),
    }


def tree(top: int) -> dict[int, tuple[int, str, str]]:
    """All descendants of a process: pid to (parent, state, name)."""
    every = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                text = (entry / "stat").read_text()
                name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
                every[int(entry.name)] = (int(rest[1]), rest[0], name)
    found: dict[int, tuple[int, str, str]] = {}
    while more := {p: row for p, row in every.items() if p not in found and (row[0] == top or row[0] in found)}:
        found.update(more)
    return found


def cgroups() -> list[str]:
    root = pathlib.Path("/sys/fs/cgroup")
    found = []
    for folder, names, _ in os.walk(root):
        found += [f"{folder}/{name}" for name in names if "oubliette" in f"{folder}/{name}"]
    return found


def orphans(marker: str, pid: int) -> list[int]:
    """Processes with the test's marker that are not descendants of the server."""
    below = tree(pid)
    return [p for p in harness.processes_with(marker) if p not in below and p != pid]


def test_no_zombie_no_orphan_no_leaked_socket_after_many_switches():
    mark = f"leak-mark-{os.getpid()}"
    with running(servers.TRUST) as server:
        admin = server.token("admin")
        script = str(harness.ROOT / "tests" / "python" / "small_server.py")
        for agent in ("left", "right"):
            for n in range(3):
                child = ["--child"] if n == 0 else []
                small = servers.stdio("/usr/bin/python3", ["-I", "-S", script, *child], [str(harness.ROOT / "tests")])
                server.put_tool(f"{agent}{n}", admin, **small, env={"MARK": mark})
            server.put_agent(agent, admin, [[{"say": agent}]], tools={"use": [f"{agent}{n}" for n in range(3)]})
        project = server.api("project_create", admin, name="p")["project_id"]
        started = server.api("session_message", admin, message="go", project_id=project, agent="left", wait=True)
        session, pid = started["session_id"], server.process.pid

        def switch(n: int) -> None:
            agent = ("right", "left")[n % 2]
            server.api("session_switch_agent", admin, session_id=session, agent=agent)
            row = server.api("tool_call", admin, session_id=session, tool=f"@{agent}0/echo", arguments={"n": n})
            assert row["isError"] is False

        for n in range(WARM):
            switch(n)
        before = stable_counts(server, pid, None)
        began, samples = time.monotonic(), []
        for n in range(WARM, WARM + SWITCHES + SWITCHES % 2):
            switch(n)
            if n % 100 == 0:
                samples.append(resource_counts(server, pid)["rss_kib"])
        took = time.monotonic() - began
        after = stable_counts(server, pid, before)
        print(json.dumps({"switches": SWITCHES, "took_s": round(took, 1), "before": before, "after": after, "rss": samples}))
        assert after["zombies"] == 0
        assert after["threads"] <= before["threads"] + SPARE_THREADS, f"{before['threads']} threads, then {after['threads']}"
        for what in ("files", "mounts", "processes", "sockets", "socket files", "run files", "cgroups"):
            assert no_more_than(after[what], before[what]), f"{what}: {before[what]} before, {after[what]} after"
        assert after["rss_kib"] - before["rss_kib"] < SPARE_KIB, f"{before['rss_kib']} KiB before, {after['rss_kib']} after"
        assert not orphans(mark, pid), "processes that left the server's tree"
        assert server.api("session_message", admin, message="on", session_id=session, wait=True)["text"] == "left"
        server.api("session_end", admin, session_id=session)
        wait_until(lambda: not tree(pid), "the end of every process of the session")
        wait_until(lambda: not harness.processes_with(mark), "the end of every tool server")
        assert server.stop() == 0


def no_more_than(after, before) -> bool:
    if isinstance(after, dict):
        return all(count <= before.get(name, 0) for name, count in after.items())
    return after <= before


def stable_counts(server, pid: int, before: dict | None) -> dict[str, object]:
    """Waits until the counts are the same twice in a row and not above `before`, then returns them."""
    last: dict[str, object] = {}
    end = time.monotonic() + harness.DEADLINE
    while time.monotonic() < end:
        now = resource_counts(server, pid)
        counts = {k: v for k, v in now.items() if k not in ("rss_kib", "threads")}
        if counts == last and (before is None or all(no_more_than(v, before[k]) for k, v in counts.items())):
            return now
        last = counts
        time.sleep(0.2)
    return resource_counts(server, pid)

"""Kills the server with SIGKILL at random moments under load, restarts it, and checks that it kept its word.

    OUBLIETTE_BIN_DIR=target/release python soak.py --rounds 1000 [--servers N] [--seed S] [--seconds N] [--keep DIR]

In each round clients write through the real server (sessions with scripted agents, caller tools, tool servers,
built-ins, projects, agents, tokens, files) and follow its logs, until the server is killed. Clients record what they
sent, what was acknowledged and what they were shown. After the restart the server is read out, and `fault_check.check`
compares both. Some rounds kill the server again while it starts.

The home is thrown away after some rounds (a *generation*), so that reading all of it stays quick. The seed decides what
is sent and when the server is killed after it is ready; what that meets is up to the machine.

With `--servers` there are several on one PostgreSQL (`soak_cluster.py`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any, Callable

import fault_check
import harness
from fault_check import Violation
from fault_history import Refused, ServerGone
from fault_load import CONFIG, Load
from fault_machine import LEFTOVER_DEADLINE, KilledServer, Processes, cgroups_of, left_running, mounts_of, pause
from fault_observe import drain, observe
from harness import wait_until

GENERATION_ROUNDS = 12
"""Rounds before a new home."""


@dataclasses.dataclass
class Summary:
    rounds: int = 0
    kills: int = 0
    checks: int = 0
    drained: int = 0
    sent: int = 0
    acknowledged: int = 0
    unknown: int = 0
    refused: int = 0
    shown: int = 0
    seconds: float = 0.0
    violations: list[tuple[int, Violation]] = dataclasses.field(default_factory=list)
    kept: list[str] = dataclasses.field(default_factory=list)

    def count(self, history: list[dict[str, Any]]) -> None:
        events = collections.Counter(record["event"] for record in history)
        for name in ("sent", "acknowledged", "unknown", "refused", "shown"):
            setattr(self, name, getattr(self, name) + events[name])

    def text(self) -> str:
        each = self.seconds / self.rounds if self.rounds else 0
        lines = [
            f"{self.rounds} rounds in {self.seconds:.0f} s ({each:.1f} s each): {self.kills} kills, {self.checks} checks, "
            f"{self.drained} of them after every accepted message had run",
            f"requests: {self.sent} sent, {self.acknowledged} acknowledged, {self.refused} refused, "
            f"{self.unknown} without an answer; {self.shown} events shown",
        ]
        kinds: dict[str, list[tuple[int, Violation]]] = collections.defaultdict(list)
        for round, violation in self.violations:
            kinds[violation.kind].append((round, violation))
        lines.append(f"{len(self.violations)} violations" + (":" if kinds else ""))
        for kind, found in sorted(kinds.items()):
            rounds = sorted({round for round, _ in found})
            lines.append(f"  {kind}: {len(found)}, in {len(rounds)} rounds (first {rounds[0]})")
            lines += [f"    round {round}: {violation}"[:400] for round, violation in found[:5]]
        lines += [f"kept: {path}" for path in self.kept]
        return "\n".join(lines)


class Soak:
    """Rounds on one home after another."""

    def __init__(self, seed: str, keep: pathlib.Path | None = None, report: Callable[[str], None] = print):
        self.seed, self.keep, self.report = seed, keep, report
        self.random = random.Random(f"{seed} rounds")
        self.summary = Summary()
        self.reported: set[tuple[str, str]] = set()

    def run(self, rounds: int, seconds: float | None = None) -> Summary:
        began = time.monotonic()
        self.processes = Processes()
        try:
            while self.summary.rounds < rounds and (seconds is None or time.monotonic() - began < seconds):
                self.generation(min(GENERATION_ROUNDS, rounds - self.summary.rounds), began, seconds)
        finally:
            self.processes.close()
            self.summary.seconds = time.monotonic() - began
        return self.summary

    def generation(self, rounds: int, began: float, seconds: float | None) -> None:
        with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
            server = KilledServer(pathlib.Path(folder) / "h", CONFIG)
            load, before = None, self.summary.rounds
            self.processes.killed.clear()
            try:
                server.start()
                load = Load(server, f"{self.seed} {self.summary.rounds}")
                for n in range(rounds):
                    last = n == rounds - 1 or seconds is not None and time.monotonic() - began >= seconds
                    self.round(load, last)
                    if last:
                        break
            except (AssertionError, ServerGone, Refused) as error:
                # The server does not start, ends or refuses by itself, or a client hangs: this home cannot be used on.
                self.summary.rounds = max(self.summary.rounds, before + 1)
                self.violations([Violation("stuck", f"round {self.summary.rounds}", repr(error)[-2000:])], load, {})
            finally:
                if load:
                    load.killing = True
                    load.stop()
                    self.summary.count(load.history.copy())
                if server.process and server.process.poll() is None:
                    self.processes.killed.add(server.process.pid)
                    server.kill()
                self.processes.end(self.processes.left(server))

    def round(self, load: Load, last: bool) -> None:
        server, began = load.server, time.monotonic()
        self.summary.rounds += 1
        moment = self.random.choice([self.random.uniform(0, 0.3), self.random.uniform(0, 1.5)])
        load.killing = False
        load.gate.open()
        pause(moment)
        if self.random.random() < 0.4:
            load.burst.set()
            pause(self.random.uniform(0, 0.1))
        if server.process.poll() is not None:
            load.broken.append(
                Violation("crashed", "server", f"exit {server.process.returncode}: {server.log()[-1500:]}")
            )
        load.killing = True
        self.kill(server)
        load.burst.clear()
        load.gate.close()
        load.history.add("killed", round=self.summary.rounds, after=moment)
        load.owner.close()
        # Sometimes it stays down until all of it is gone, sometimes the next one starts at once.
        left = left_running(self.processes, server) if self.random.random() < 0.4 else []
        for _ in range(self.random.choice([0, 0, 0, 1, 2])):
            server.spawn()
            pause(self.random.uniform(0, 0.25))
            self.kill(server)
        server.start()
        load.history.add("restarted", round=self.summary.rounds)
        left += left_running(self.processes, server)
        drained = last or self.random.random() < 0.7
        if drained:
            drain(load)
        observation = observe(load, drained)
        observation["left_running"] = left
        observation["left_behind"] = self.left_behind(server)
        self.summary.checks += 1
        self.summary.drained += drained
        found = fault_check.check(load.history.copy(), observation)
        found += load.broken
        load.broken = []
        new = self.violations(found, load, observation)
        self.end_unowned_sessions(load)
        took = time.monotonic() - began
        records = len(load.history.records)
        self.report(
            f"round {self.summary.rounds}: killed after {moment:.2f} s, {records} records, "
            f"{'drained' if drained else 'not drained'}, {new} new violations, {took:.1f} s"
        )

    def kill(self, server: KilledServer) -> None:
        self.summary.kills += 1
        self.processes.killed.add(server.process.pid)
        server.kill()

    def left_behind(self, server: KilledServer) -> list[str]:
        """Control groups and mounts of killed servers."""

        def left() -> list[str]:
            groups = [f"control group {path}" for path in cgroups_of(self.processes.killed)]
            return groups + [f"mount {line}" for line in mounts_of(server.home)]

        return self.wait_for_leftovers(left)

    @staticmethod
    def wait_for_leftovers(left: Callable[[], list[str]]) -> list[str]:
        """What is left once there was time for it to go."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left(), "control groups of killed servers to go", LEFTOVER_DEADLINE)
        return left()

    def end_unowned_sessions(self, load: Load) -> None:
        """Ends sessions that no driver works with any more, or whose start was never answered."""
        owned = {session["session_id"] for session in load.current.values()}
        for row in load.owner.pages("session_list", "sessions", project_id=load.project):
            id = row["session_id"]
            if id not in owned and row["status"] not in fault_check.FINAL:
                with contextlib.suppress(Refused):
                    meaning = {"session": id, "target": id, "register": f"end of {id}", "value": "ended"}
                    load.janitor.call("session_end", {"session_id": id}, **meaning)
        load.janitor.http.close()

    def violations(self, found: list[Violation], load: Load | None, observation: dict[str, Any]) -> int:
        """Reports each once: what is missing is missing in every later round too."""
        distinct = {(violation.kind, violation.subject): violation for violation in found}
        new = [violation for key, violation in distinct.items() if key not in self.reported]
        self.reported.update(distinct)
        self.summary.violations += [(self.summary.rounds, violation) for violation in new]
        for violation in new[:20]:
            self.report(f"round {self.summary.rounds}: {violation}"[:600])
        if new and load and self.keep:
            folder = self.keep / f"round-{self.summary.rounds}"
            folder.mkdir(parents=True, exist_ok=True)
            records = "".join(json.dumps(record) + "\n" for record in load.history.copy())
            (folder / "history.jsonl").write_text(records)
            (folder / "observation.json").write_text(json.dumps(observation))
            (folder / "server.log").write_text(load.server.log())
            self.summary.kept.append(str(folder))
        return len(new)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the server at random moments and check what it kept.")
    parser.add_argument("--rounds", type=int, default=1000, help="how many kills to check (default 1000)")
    parser.add_argument("--servers", type=int, default=1, help="several on one PostgreSQL, behind a load balancer")
    parser.add_argument("--seed", default=None, help="decides what is sent and when the server is killed")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this long, whatever was reached")
    parser.add_argument("--keep", type=pathlib.Path, default=None, help="where histories with violations are kept")
    arguments = parser.parse_args()
    seed = arguments.seed or str(random.SystemRandom().randrange(10**9))
    print(f"seed {seed}, programs {harness.BIN}", flush=True)
    options = {"keep": arguments.keep, "report": lambda text: print(text, flush=True)}
    if arguments.servers > 1:
        # Not at the top: it is made of the rounds of one server.
        from soak_cluster import ClusterSoak

        soak = ClusterSoak(seed, arguments.servers, **options)
    else:
        soak = Soak(seed, **options)
    try:
        soak.run(arguments.rounds, arguments.seconds)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(soak.summary.text(), flush=True)
    return 1 if soak.summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())

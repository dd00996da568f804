"""Fault rounds over several servers on one PostgreSQL, behind a load balancer: `soak.py --servers 3`.

In each round clients write through the load balancer while one server, or the database, is killed, frozen, cut off or broken
off from the others, for a moment or for so long that another server takes over. Clients connect again by themselves and
record what they were told, as in the rounds of one server. When everything runs again the cluster is read out through all
servers, and `fault_check.check` compares both.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Sequence

import fault_check
from fault_check import Violation
from fault_cluster import FAULTS, LONG, SHORT, Cluster, Fault, FaultMaker
from fault_cluster_load import ClusterLoad, SteadyConnection
from fault_history import Refused, ServerGone
from fault_machine import cgroups_of, left_running, mounts_of, pause
from fault_observe import drain, observe
from harness import wait_until
from soak import Soak

UNDER_WAY = 20
"""Acknowledged requests of a round before its fault: one that meets no load shows nothing."""
OBSERVATIONS = 5
"""How often reading the cluster out is begun anew because a server started anew meanwhile."""


class ClusterSoak(Soak):
    """Rounds on one cluster after another."""

    def __init__(self, seed: str, servers: int = 3, schedule: Sequence[tuple[str, tuple[float, float]]] = (), **more: Any):
        """With a schedule, what happens in each round is not up to chance, nor for how long roughly."""
        super().__init__(seed, **more)
        self.servers, self.schedule = servers, list(schedule)

    def generation(self, rounds: int, began: float, seconds: float | None) -> None:
        cluster, load, before = Cluster(self.servers), None, self.summary.rounds
        self.processes.killed.clear()
        self.processes.spared = {cluster.database.top_pid}
        try:
            cluster.start()
            load = ClusterLoad(cluster, f"{self.seed} {self.summary.rounds}")
            for n in range(rounds):
                last = n == rounds - 1 or seconds is not None and time.monotonic() - began >= seconds
                if self.cluster_round(cluster, load, last) or last:
                    break
        except (AssertionError, ServerGone, Refused) as error:
            # A server does not start, ends or refuses by itself, or a client hangs: this cluster cannot be used on.
            self.summary.rounds = max(self.summary.rounds, before + 1)
            self.violations([Violation("stuck", f"round {self.summary.rounds}", repr(error)[-2000:])], load, {})
        finally:
            if load:
                load.stop()
                self.summary.count(load.history.copy())
            self.processes.killed |= {server.process.pid for server in cluster.servers if server.process}
            cluster.kill()
            self.processes.end(self.processes.left(*cluster.servers))
            cluster.close()

    def choose(self, maker: FaultMaker) -> Fault:
        if self.schedule:
            name, span = self.schedule[(self.summary.rounds - 1) % len(self.schedule)]
        else:
            name, span = self.random.choice(FAULTS), self.random.choice((SHORT, LONG))
        return maker.make(name, self.random.uniform(*span))

    def cluster_round(self, cluster: Cluster, load: ClusterLoad, last: bool) -> bool:
        """Returns whether the cluster is not to be used on."""
        began = time.monotonic()
        self.summary.rounds += 1
        fault = self.choose(FaultMaker(cluster, self.random, self.note_killed))
        self.under_load(cluster, load, fault)
        cluster.wait_until_whole(load.owner.token)
        left = left_running(self.processes, *cluster.servers)
        drained = last or fault.loses_memory or self.random.random() < 0.7
        observation = self.observe(cluster, load, drained)
        observation["left_running"] = left
        observation["left_behind"] = self.left_behind_by(cluster)
        if fault.loses_memory:
            # What was done is not undone with the events that tell of it, and may be done again.
            for seen in observation["sessions"].values():
                seen.pop("work", None)
        self.summary.checks += 1
        self.summary.drained += drained
        found = fault_check.check(load.history.copy(), observation)
        found += load.broken
        load.broken = []
        new = self.violations(found, load, observation)
        with contextlib.suppress(ServerGone):
            self.end_unowned_sessions(load)
        self.report(
            f"round {self.summary.rounds}: {fault.name} for {fault.seconds:.1f} s, {len(load.history.records)} records, "
            f"{'drained' if drained else 'not drained'}, {new} new violations, {time.monotonic() - began:.1f} s"
        )
        return fault.loses_memory

    def under_load(self, cluster: Cluster, load: ClusterLoad, fault: Fault) -> None:
        """Lets the clients work while the fault happens and is undone; then they are held back."""
        cluster.balancer.refuse(False)
        before = load.history.acknowledged
        load.gate.open()
        wait_until(lambda: load.history.acknowledged > before + UNDER_WAY, "the load to be under way")
        pause(self.random.uniform(0, 1.5))
        if self.random.random() < 0.4:
            load.burst.set()
            pause(self.random.uniform(0, 0.1))
        load.history.add("fault", name=fault.name, seconds=fault.seconds)
        fault.happen()
        if fault.loses_memory:
            load.history.add("database_crashed")
        pause(fault.seconds)
        fault.end()
        load.history.add("fault over", name=fault.name)
        load.burst.clear()
        pause(self.random.uniform(0, 1))
        for server in cluster.servers:
            if server.process.poll() is not None:
                text = f"exit {server.process.returncode}: {server.log()[-1500:]}"
                load.broken.append(Violation("crashed", server.home.name, text))
        # Clients notice that their connections are gone, and wait at the gate.
        load.gate.close(lambda: cluster.balancer.refuse(True))
        cluster.balancer.refuse(False)
        load.owner.close()

    def observe(self, cluster: Cluster, load: ClusterLoad, drained: bool) -> dict[str, Any]:
        """Reads the cluster out while no server starts anew, and each session's log through every server."""
        for _ in range(OBSERVATIONS):
            before = cluster.member_ids()
            if drained:
                drain(load)
            observation = observe(load, drained)
            observation["owners"] = cluster.owners_at_rest()
            self.read_everywhere(cluster, load, observation)
            if cluster.member_ids() == before:
                break
            cluster.wait_until_whole(load.owner.token)
        return observation

    @staticmethod
    def read_everywhere(cluster: Cluster, load: ClusterLoad, observation: dict[str, Any]) -> None:
        """What each server shows counts as shown, and so has to be what the observation has."""
        for id, seen in observation["sessions"].items():
            for server in cluster.servers:
                reader = SteadyConnection(server.port, load.owner.token)
                events = reader.log("session_events", session_id=id)[: len(seen["events"])]
                reader.close()
                wrong = next((pair for pair in zip(events, seen["events"]) if pair[0] != pair[1]), None)
                if wrong or len(events) < len(seen["events"]):
                    detail = f"{server.home.name} shows {len(events)} of {len(seen['events'])} events; {wrong}"
                    load.broken.append(Violation("changed event", f"session {id}", detail[:500]))

    def note_killed(self, pid: int) -> None:
        self.summary.kills += 1
        self.processes.killed.add(pid)

    def left_behind_by(self, cluster: Cluster) -> list[str]:
        homes = [server.home for server in cluster.servers]
        return self.wait_for_leftovers(
            lambda: [f"control group {path}" for path in cgroups_of(self.processes.killed)]
            + [f"mount {line}" for home in homes for line in mounts_of(home)]
        )

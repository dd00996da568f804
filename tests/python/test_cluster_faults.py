"""Three servers on one PostgreSQL keep their promises when one of them, or the database, is killed, frozen or cut off.

The short form of `soak.py --servers 3`. `OUBLIETTE_FAULT_ROUNDS` says how many rounds, `OUBLIETTE_FAULT_SEED` repeats what was
sent.
"""

from __future__ import annotations

import os
import pathlib
import random

import pytest

import stores
from fault_check import PROMISES
from fault_cluster import SHORT
from soak_cluster import UNDER_WAY, ClusterSoak

pytestmark = pytest.mark.skipif(not stores.ON_POSTGRES, reason="several servers share a PostgreSQL database")

SEED = os.environ.get("OUBLIETTE_FAULT_SEED") or str(random.SystemRandom().randrange(10**9))
TAKEN_OVER = (8.5, 9.5)
"""So many seconds, and another server has the sessions."""
SCHEDULE = [
    ("kill", SHORT),
    ("freeze", TAKEN_OVER),
    ("restart database", SHORT),
    ("cut", TAKEN_OVER),
    ("crash database", SHORT),
]
ROUNDS = int(os.environ.get("OUBLIETTE_FAULT_ROUNDS", len(SCHEDULE)))


@pytest.fixture(scope="module")
def rounds():
    """The rounds, run once; each promise is a test of its own."""
    keep = os.environ.get("OUBLIETTE_FAULT_KEEP")
    soak = ClusterSoak(SEED, 3, SCHEDULE, keep=keep and pathlib.Path(keep))
    summary = soak.run(ROUNDS)
    print(summary.text())
    return summary


def test_every_round_was_played_and_checked(rounds):
    assert rounds.rounds == rounds.checks == ROUNDS, rounds.text()
    assert rounds.acknowledged > UNDER_WAY * ROUNDS and rounds.shown > 0, rounds.text()


@pytest.mark.parametrize("promise", PROMISES)
def test_what_was_promised_holds_over_servers(rounds, promise):
    found = [f"round {round}: {violation}" for round, violation in rounds.violations if violation.kind in PROMISES[promise]]
    assert not found, f"seed {SEED}: {len(found)} violations\n" + "\n".join(found[:20])


def test_there_is_no_violation_of_another_kind(rounds):
    known = set().union(*PROMISES.values())
    assert not [str(violation) for _, violation in rounds.violations if violation.kind not in known]

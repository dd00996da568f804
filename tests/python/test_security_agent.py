"""What an agent says to the server, or leaves unread, fills neither the server's memory nor its database."""

from __future__ import annotations

import contextlib
import json
from typing import Iterator

import pytest

from attack_support import MIB, TRUST, Attacker, Memory, disk_use, refusal, settled, unharmed
from harness import running, wait_until

SESSION_LOG_MB = 32
SMALL_LOG = f"{TRUST}[limits]\nsession_log_mb = {SESSION_LOG_MB}\n"

MOST_MEMORY = 256 * MIB
MOST_DISK = 3 * SESSION_LOG_MB * MIB
"""What the database may take on disk: what one session may write, once more in its write-ahead log, and a margin."""

GO_ON = """
    import os, time
    def wait_for_go():
        end = time.monotonic() + 600
        while not os.path.exists('/workspace/go') and time.monotonic() < end:
            time.sleep(0.05)
"""
"""An agent that has done its part waits to be told to go on, so that the server is measured meanwhile."""


@pytest.fixture
def server():
    with running(TRUST) as server:
        yield server


@pytest.fixture
def admin(server):
    return server.token("admin")


@contextlib.contextmanager
def small_log() -> Iterator[Attacker]:
    """An agent of a server that lets each session write little."""
    with running(SMALL_LOG) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        with Attacker(server, admin, project) as attacker:
            yield attacker


def finish(attacker: Attacker) -> tuple[str, list[str]]:
    """Lets a waiting agent go on; what it said in the end, and the error codes of its session."""
    with contextlib.suppress(OSError):
        (attacker.workspace / "go").touch()

    def over() -> bool:
        return attacker.details["status"] in ("idle", "failed")

    wait_until(over, "the end of the turn")
    log = attacker.log()
    said = [event["text"] for event in log if event["type"] == "turn_completed" and event["turn"] == 2]
    return "".join(said), [event["code"] for event in log if event["type"] == "error"]


def test_answers_an_agent_does_not_read_are_bounded(server, admin, project):
    """An agent asks for its memory again and again and reads no answer; past the budget it is refused or given up."""
    with Attacker(server, admin, project) as attacker:
        memory = Memory(server)
        attacker.begin(
            GO_ON + """
    assert 'result' in agent.call('_oubliette/memory/append', entries=[{'text': 'x' * SIZE}])
    asked = [agent.request('_oubliette/memory/load') for _ in range(COUNT)]
    agent.say('asked ')
    wait_for_go()
    answers = [agent.answer(id) for id in asked]
    codes = [(answer['error'].get('data') or {}).get('code') for answer in answers if 'error' in answer]
    agent.say(' '.join(map(str, codes)))
""",
            SIZE=8 * MIB,
            COUNT=100,
        )

        def all_answered() -> bool:
            # What the agent says after its requests is logged after they were answered or refused.
            said = any(event["type"] == "delta" and "asked" in event["text"] for event in attacker.log())
            return said or attacker.details["status"] == "failed"

        wait_until(all_answered, "the answers to be made or refused")
        memory.check(MOST_MEMORY)
        unharmed(server, admin)
        said, errors = finish(attacker)
        assert "limit_exceeded" in said or {"limit_exceeded", "unavailable"} & set(errors), (said[-500:], errors)
        memory.check(MOST_MEMORY)


def test_an_agents_memory_is_bounded():
    """An agent appends to its memory without end; past the bound it is refused, and what it has stays readable."""
    with small_log() as attacker:
        server, memory = attacker.server, Memory(attacker.server)
        said = attacker.run(
            """
            codes = []
            for _ in range(COUNT):
                answer = agent.call('_oubliette/memory/append', entries=[{'text': 'x' * SIZE}])
                codes.append((answer['error'].get('data') or {}).get('code') if 'error' in answer else 'ok')
            agent.say(' '.join(map(str, codes)))
            """,
            SIZE=8 * MIB,
            COUNT=14,
        )
        codes, taken = said.split(), disk_use(server.home) // MIB
        assert codes[0] == "ok" and set(codes) == {"ok", "limit_exceeded"}, f"{codes}; {taken} MiB on disk"
        read = attacker.run("agent.say(str('result' in agent.call('_oubliette/memory/load')))")
        assert read == "True"
        assert disk_use(server.home) < MOST_DISK, f"{taken} MiB on disk"
        memory.check(MOST_MEMORY)
        unharmed(server, attacker.admin)


@pytest.mark.parametrize("field", ["title", "toolCallId"])
def test_what_an_agent_calls_its_tool_calls_is_bounded(server, admin, project, field):
    """An agent reports tool calls with names of many megabytes; they are cut, or the turn fails with a reason."""
    with Attacker(server, admin, project) as attacker:
        memory = Memory(server)
        attacker.begin(
            GO_ON + """
    for n in range(COUNT):
        call = {'toolCallId': str(n), 'title': 'title', 'status': 'pending'}
        call[FIELD] = f'{n}' + 'x' * SIZE
        agent.update('tool_call', **call)
    open('/workspace/reported', 'w').close()
    wait_for_go()
    agent.say('over')
""",
            FIELD=field,
            SIZE=8 * MIB,
            COUNT=80,
        )
        reported = attacker.workspace / "reported"
        wait_until(lambda: reported.exists() or attacker.details["status"] == "failed", "the agent to have reported")
        settled(lambda: memory.peak // MIB, "the reports to be taken")
        memory.check(MOST_MEMORY)
        unharmed(server, admin)
        said, errors = finish(attacker)
        assert said == "over" or "limit_exceeded" in errors, (said, errors)


REPORTS = {
    "plan": """
        for n in range(COUNT):
            entry = {'content': f'{n}' + 'x' * SIZE, 'priority': 'high', 'status': 'pending'}
            agent.update('plan', entries=[entry])
        agent.say('over')
    """,
    "usage": """
        for n in range(COUNT):
            agent.update('usage_update', used=n, size=2, _meta={'x': 'x' * SIZE})
        agent.say('over')
    """,
    "tool_call": """
        for n in range(COUNT):
            agent.update('tool_call', toolCallId=str(n), title='t', status='in_progress', rawInput={'x': 'x' * SIZE})
        agent.say('over')
    """,
}
REPLACED = {"plan", "usage"}
"""Reports of which each replaces the one before."""


@pytest.mark.parametrize("kind", REPORTS)
def test_events_of_one_session_do_not_fill_the_database(kind):
    """An agent reports things of many megabytes as fast as it can. Each is cut, and those that replace each other are
    logged now and then; past the session's share of the log the turn fails. The log stays readable."""
    with small_log() as attacker:
        memory = Memory(attacker.server)
        failed = refusal(lambda: attacker.run(REPORTS[kind], SIZE=4 * MIB, COUNT=64))
        taken = disk_use(attacker.server.home)
        log = attacker.log()
        assert [event["index"] for event in log] == list(range(len(log)))
        codes = [event["code"] for event in log if event["type"] == "error"]
        events = [event for event in log if event["type"] == kind]
        if kind in REPLACED:
            # The last of them says all the others did: few are logged, and little of each.
            assert failed is None and not codes, (failed, codes)
            assert events and all(len(json.dumps(event)) < MIB // 8 for event in events)
            assert taken < MOST_DISK // 3, f"{taken // MIB} MiB on disk"
        else:
            assert failed == "limit_exceeded" and "limit_exceeded" in codes, (failed, codes)
            assert len(events) >= SESSION_LOG_MB // 2 and all(len(json.dumps(event)) < 2 * MIB for event in events)
            assert taken < MOST_DISK, f"{taken // MIB} MiB on disk"
            # The session takes no more; its log stays.
            assert refusal(lambda: attacker.run("agent.say('again')")) == "limit_exceeded"
            assert len(attacker.log()) == len(log)
        memory.check(MOST_MEMORY)
        unharmed(attacker.server, attacker.admin)

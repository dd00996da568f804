"""What an agent says to the server, or leaves unread, fills neither the server's memory nor its database."""

from __future__ import annotations

import contextlib
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
        end = time.monotonic() + 120
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
    open('/workspace/asked', 'w').close()
    wait_for_go()
    answers = [agent.answer(id) for id in asked]
    codes = [(answer['error'].get('data') or {}).get('code') for answer in answers if 'error' in answer]
    agent.say(' '.join(map(str, codes)))
""",
            SIZE=8 * MIB,
            COUNT=100,
        )
        asked = attacker.workspace / "asked"
        wait_until(lambda: asked.exists() or attacker.details["status"] == "failed", "the agent to have asked")
        settled(lambda: memory.peak // MIB, "the answers to be made or refused")
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
            COUNT=24,
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


@pytest.mark.parametrize("kind", ["plan", "usage"])
def test_events_of_one_session_do_not_fill_the_database(kind):
    """An agent reports plans or usage of many megabytes as fast as it can; past the session's share of the log the turn
    fails, and the log stays readable."""
    entry = "{'content': 'x' * SIZE, 'priority': 'high', 'status': 'pending'}"
    reports = {
        "plan": f"agent.update('plan', entries=[{entry}])",
        "usage": "agent.update('usage_update', used=1, size=2, _meta={'x': 'x' * SIZE})",
    }
    text = f"for _ in range(COUNT):\n    {reports[kind]}\nagent.say('over')"
    with small_log() as attacker:
        failed = refusal(lambda: attacker.run(text, SIZE=4 * MIB, COUNT=64))
        taken = disk_use(attacker.server.home)
        assert failed == "limit_exceeded" and taken < MOST_DISK, f"{failed}; {taken // MIB} MiB on disk"
        log = attacker.log()
        assert [event["index"] for event in log] == list(range(len(log)))
        assert "limit_exceeded" in [event["code"] for event in log if event["type"] == "error"]
        unharmed(attacker.server, attacker.admin)

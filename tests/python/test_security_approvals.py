"""What a person is shown of a call that waits is what the tool gets: nothing in its arguments hides or looks like something else."""

from __future__ import annotations

import contextlib

import pytest

import servers
from attack_support import ATTACKS, TRUST
from caller import call
from harness import running

DECEPTIVE = "safe.txt\u202etxt.exe\u200b\u00a0\u2800x"
WRITTEN_OUT = ("202e", "200b", "a0", "2800")
"""The characters that nobody would see, as they must be written out."""


@pytest.fixture(scope="module")
def server():
    with running(TRUST) as server:
        yield server


def put_hostile(server, admin, slug: str, **arguments) -> None:
    """An agent that calls a tool which waits for a person, with these arguments, and takes no for an answer."""
    script = ["-I", "-S", str(ATTACKS / "tool_server.py")]
    server.put_tool("hostile", admin, **servers.stdio("/usr/bin/python3", script, [str(ATTACKS)]))
    turns = [[call("hostile_run", **arguments), {"say": "done"}]]
    server.put_agent(slug, admin, turns, tools={"use": ["hostile"], "ask": ["@hostile/*"]})


def shown_by_run(server, project: str, slug: str) -> str:
    """What `oubliette run` asks at the terminal."""
    return server.cli("run", "--agent", slug, "--project", project, "go", input="n\n").stderr


def test_arguments_do_not_pass_for_the_record_of_longer_ones(server, admin, project):
    """Arguments that look like the beginning of longer ones, which is recorded in place of those, are shown whole."""
    program = "said = open('/workspace/x').read()"
    put_hostile(server, admin, "forger", truncated=True, start="ls", program=program)
    shown = shown_by_run(server, project, "forger")
    assert program in shown, shown


def test_what_nobody_would_see_is_written_out_wherever_a_person_decides(server, admin, project):
    put_hostile(server, admin, "deceiver", program=DECEPTIVE)
    started = server.api("session_message", admin, message="go", project_id=project, agent="deceiver")
    session = started["session_id"]
    with server.events(session, admin) as events:
        id = events.until("approval_requested")["approval_id"]
        listed = server.cli("approvals", "--session", session).stdout
        decided = server.cli("deny", id).stdout
        events.until("turn_completed")
    for shown in (listed, decided, shown_by_run(server, project, "deceiver")):
        assert all(text in shown.lower() for text in WRITTEN_OUT), shown
    with contextlib.suppress(Exception):
        server.api("session_end", admin, session_id=session)

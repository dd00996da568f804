"""People are asked about what waits, also if it waited before they came, and see everything in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from mcp import types

from caller import call
from harness import DEADLINE, MODERN, processes_with

WRITE = {"kind": "builtin", "builtinPolicy": {"name": "fs_write", "allowedPaths": ["."]}}
TOOL = "writer_fs_write"


def put_writer(server, admin, slug, turns, **more):
    server.put_tool("writer", admin, **WRITE)
    server.put_agent(slug, admin, turns, tools={"use": ["writer"], "ask": [TOOL]}, **more)


def write(path):
    return call(TOOL, path=path, content="x")


def start_and_wait(server, admin, project, agent):
    """Starts a session and waits until its first call waits for a person; returns the session and that approval."""
    session = server.api("session_message", admin, message="go", project_id=project, agent=agent)["session_id"]
    with server.events(session, admin) as events:
        return session, events.until("approval_requested")["approval_id"]


def log_of(server, token, session):
    return server.api("session_events", token, session_id=session, max_events=1000)["events"]


def decisions(server, admin, session):
    return [e["decision"] for e in log_of(server, admin, session) if e["type"] == "approval_decided"]


async def test_a_client_is_asked_about_what_waited_before_its_message(server, admin, project, mode):
    """Its message is queued behind the turn that waits: calls of both turns are asked about, and the second is waited for."""
    turns = [[write("a"), write("b"), {"say": "first"}], [write("c"), {"say": "second"}]]
    put_writer(server, admin, "queued", turns)
    session, _ = await asyncio.to_thread(start_and_wait, server, admin, project, "queued")
    asked = []

    async def answer(_, params):
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"decision": "allow"})

    async with server.mcp(admin, mode, elicitation_callback=answer) as mcp:
        done = await asyncio.wait_for(mcp.call("session_message", message="more", session_id=session, wait=True), DEADLINE)
    assert (done["turn"], done["text"]) == (2, "second")
    assert len(asked) == 3 and all(f'"path":"{path}"' in message for path, message in zip("abc", asked))
    assert decisions(server, admin, session) == ["allowed"] * 3


async def test_a_message_is_waited_for_although_the_turn_before_it_failed(server, admin, project):
    mark = f"OUBLIETTE_TEST_MARK_{os.getpid()}"
    put_writer(server, admin, "fails", [[write("a")], [write("b"), {"say": "second"}]], env={mark: "1"})
    session, first = await asyncio.to_thread(start_and_wait, server, admin, project, "fails")
    asked = []

    def lose_agent():
        with server.events(session, admin) as events:
            for process in processes_with(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            events.until("status", status="failed")

    async def answer(_, params):
        asked.append(params.message)
        if first in params.message:
            await asyncio.to_thread(lose_agent)
            return types.ElicitResult(action="cancel")
        return types.ElicitResult(action="accept", content={"decision": "allow"})

    async with server.mcp(admin, MODERN, elicitation_callback=answer) as mcp:
        done = await asyncio.wait_for(mcp.call("session_message", message="more", session_id=session, wait=True), DEADLINE)
    assert (done["turn"], done["text"]) == (2, "second")
    assert len(asked) == 2 and decisions(server, admin, session) == ["cancelled", "allowed"]


async def test_a_client_is_not_asked_about_what_was_decided_while_its_user_answered(server, admin, project):
    """While its user reads the first question, that and the next call are decided elsewhere; it is asked about the third."""
    put_writer(server, admin, "meanwhile", [[write("a"), write("b"), write("c"), {"say": "done"}]])
    asked = []

    def decide_two():
        [first] = server.api("approval_list", admin, project_id=project, status="pending")["approvals"]
        with server.events(first["session_id"], admin) as events:
            for _ in range(2):
                id = events.until("approval_requested")["approval_id"]
                server.api("approval_decide", admin, approval_id=id, decision="allow")
            events.until("approval_requested")

    async def answer(_, params):
        asked.append(params.message)
        if len(asked) == 1:
            await asyncio.to_thread(decide_two)
            return types.ElicitResult(action="cancel")
        return types.ElicitResult(action="accept", content={"decision": "allow"})

    async with server.mcp(admin, MODERN, elicitation_callback=answer) as mcp:
        message = {"message": "go", "project_id": project, "agent": "meanwhile", "wait": True}
        done = await asyncio.wait_for(mcp.call("session_message", **message), DEADLINE)
    assert done["text"].endswith("done")
    assert len(asked) == 2 and '"path":"a"' in asked[0] and '"path":"c"' in asked[1], asked


async def test_an_elicitation_hides_nothing(server, admin, project, mode):
    """Neither behind a long text nor by characters that are not seen."""
    long = call(TOOL, content="x" * 20_000, path="a\u202eb", mode="create")
    put_writer(server, admin, "long", [[long, {"say": "done"}]])
    asked = []

    async def answer(_, params):
        asked.append(params.message)
        return types.ElicitResult(action="decline")

    async with server.mcp(admin, mode, elicitation_callback=answer) as mcp:
        await mcp.call("session_message", message="go", project_id=project, agent="long", wait=True)
    assert r'"path":"a\u202eb"' in asked[0] and '"mode":"create"' in asked[0]
    assert "19000 more characters" in asked[0] and len(asked[0]) < 5_000


def test_run_asks_about_what_waited_before_it(server, admin, project):
    put_writer(server, admin, "resumed", [[write("a"), {"say": "first"}], [write("b"), {"say": "second"}]])
    session, _ = start_and_wait(server, admin, project, "resumed")
    run = server.cli("run", "--session", session, "more", input="y\nn no more\n")
    assert "path: a" in run.stderr and "path: b" in run.stderr and "second" in run.stdout
    assert decisions(server, admin, session) == ["allowed", "denied"]

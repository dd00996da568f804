"""What is read, recorded and received for somebody is bounded as a whole, not only piece by piece."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import sqlite3

import pytest

from attack_support import ANSWERED_WITHIN, MIB, TRUST, Attacker, Memory, answers, refusal, settled, unharmed
from harness import running, wait_until
from wire import Relay

CHILDREN = 24
"""Sessions that an agent starts."""
MESSAGE = 4 * MIB - 4096
"""Just within what one message may be."""
MOST_MEMORY = 160 * MIB
"""What the server may grow by; the messages of all children together are more."""

BODIES = 60
"""Bodies that are sent at once: together 240 MiB."""
BODY = 4 * MIB
"""What one body may be."""


@pytest.fixture(scope="module")
def server():
    with running(TRUST) as server:
        yield server


# -- reading ----------------------------------------------------------------------------------------


def test_the_events_of_many_children_are_read_within_bounds(server, admin, project):
    """An agent without a key starts sessions, sends each large messages and asks for the events of all of them at once."""
    text = "agent.say('x')\n#".ljust(MESSAGE, "x")
    with Attacker(server, admin, project) as attacker, Relay(attacker.details["relay_socket"]) as relay:
        for _ in range(CHILDREN):
            started = relay.call("session_message", message=text, wait=True)["result"]
            again = {"session_id": started["session_id"], "message": text, "wait": True}
            assert relay.call("session_message", **again)["result"]["text"] == "x"
        memory = Memory(server)
        asked = [
            relay.request("session_events", session_id=attacker.session, include_children=True, max_events=1000)
            for _ in range(2)
        ]
        answered = [relay.answer(id) for id in asked]
        memory.check(MOST_MEMORY)
        for answer in answered:
            assert "result" in answer, answer
            children = answer["result"]["children"]
            assert len(children) == CHILDREN
            found = [sum(len(event.get("text", "")) for event in child["events"]) for child in children]
            assert 0 < sum(found) <= 8 * MIB + MESSAGE, found
        unharmed(server, admin)


UNREAD = 60
"""Answers of 8 MiB that a client asks for and does not read: together 480 MiB."""


def test_answers_that_a_client_does_not_read_are_kept_within_the_tokens_budget(server, admin, project):
    """A client that may only read asks for large answers on many connections and reads none; past its budget it is refused,
    and when it is gone the answers are given up."""
    server.put_agent("talkative", admin, [[{"say": "x"}]] * 4)
    ask = {"message": "x" * (MESSAGE - 4096), "project_id": project, "agent": "talkative", "wait": True}
    session = server.api("session_message", admin, **ask)["session_id"]
    server.api("session_message", admin, session_id=session, message=ask["message"], wait=True)
    reader = server.token("read")
    body = json.dumps({"session_id": session, "max_events": 1000}).encode()
    head = (
        f"POST /api/tools/session_events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {reader}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    memory = Memory(server)
    with contextlib.ExitStack() as stack:
        statuses = []
        for _ in range(UNREAD):
            client = stack.enter_context(socket.socket())
            # Before it connects: a small window from the first.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            client.settimeout(ANSWERED_WITHIN)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head + body)
            # One after the other: each is being sent when the next is asked for.
            statuses.append(client.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL)[9:])
        assert b"200" in statuses and set(statuses) != {b"200"}, statuses
        memory.check(MOST_MEMORY)
        unharmed(server, admin)
    events = {"session_id": session, "max_events": 1000}
    wait_until(lambda: refusal(lambda: server.api("session_events", reader, **events)) is None, "its budget to be free again")


REPORTS = 12
"""Reports that a client asks for at once."""
USED = 150_000
"""Rows that each of them sums."""


def test_reports_of_what_was_used_leave_others_the_database():
    """A client that may only read asks for sums of all that was ever used, many at once; somebody else's request is
    answered before nearly all of them."""
    with running() as server:
        admin, reader = server.token("admin"), server.token("read")
        project = server.api("project_create", admin, name="used")["project_id"]
        if not (server.home / "oubliette.db").exists():
            pytest.skip("the rows are written into the file of a database")
        server.stop()
        with contextlib.closing(sqlite3.connect(server.home / "oubliette.db")) as database, database:
            database.execute(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
                " INSERT INTO usage (usage_id, ts, session_id, project_id, agent, model, requests, input_tokens,"
                " output_tokens, cached_tokens, estimated, tool_calls, turns)"
                " SELECT 'u' || i, i * 1000, 's' || i % 5000, ?, 'a', 'p/m', 1, 1, 1, 0, 0, 1, 1 FROM n",
                (USED, project),
            )
        server.start()
        with concurrent.futures.ThreadPoolExecutor(REPORTS) as threads:
            answers(server, reader, "usage_report", group_by="session")
            reports = [threads.submit(answers, server, reader, "usage_report", group_by="session") for _ in range(REPORTS)]
            concurrent.futures.wait(reports, return_when=concurrent.futures.FIRST_COMPLETED)
            before = sum(report.done() for report in reports)
            for _ in range(3):
                answers(server, admin, "session_list")
            done = sum(report.done() for report in reports)
            assert done - before <= REPORTS // 4, f"{done - before} of {REPORTS} reports were answered first"
            assert {report.result()["total"]["requests"] for report in reports} == {USED}


# -- recording --------------------------------------------------------------------------------------


def test_calls_of_one_session_do_not_fill_the_database():
    """An agent calls tools without end, with large arguments, to fill the database with their record."""
    with running(TRUST + "[limits]\nsession_log_mb = 2\n") as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="recorded")["project_id"]
        server.put_tool("reader", admin, kind="builtin", builtinPolicy={"name": "fs_read", "allowedPaths": ["."]})
        with Attacker(server, admin, project, tools={"use": ["reader"]}) as attacker:
            call = {"tool": "@reader/fs_read", "arguments": {"path": "x" * 32 * 1024}}

            def refused(attempts: int) -> bool:
                """Whether calls are refused before so many were made."""
                with Relay(attacker.details["relay_socket"]) as relay:
                    for _ in range(attempts):
                        error = relay.call("agent_call_tool", **call).get("error", {})
                        if error.get("data", {}).get("code") == "limit_exceeded":
                            assert "session_log_mb" in error["message"], error
                            return True
                return False

            # Each has its arguments and an error in the record.
            assert refused(400), "the debugger has more of a session than it may have"
            filter = {"session_id": attacker.session, "kinds": ["limit_exceeded"]}
            told = server.api("debugger_events", admin, **filter)["events"]
            assert [event["limit"] for event in told] == ["debugger"], told
            recorded = server.api("debugger_events", admin, session_id=attacker.session, max_events=1000)["events"]
            size = sum(len(str(event)) for event in recorded)
            assert size < 3 * MIB, f"{size // MIB} MiB"
            unharmed(server, admin)
            # It is not forgotten with the server.
            server.kill()
            server.start()
            server.api("session_message", admin, session_id=attacker.session, message="agent.say('x')", wait=True)
            assert refused(10)
            unharmed(server, admin)


# -- receiving --------------------------------------------------------------------------------------


def send_unfinished(server, token: str, head: str) -> socket.socket:
    """Sends a request with all of its body but the last byte."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(ANSWERED_WITHIN)
    lines = [f"{head} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", f"Authorization: Bearer {token}"]
    lines += ["Content-Type: application/json", "Accept: application/json, text/event-stream", f"Content-Length: {BODY}"]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + b" " * (BODY - 1))
    return connection


@pytest.mark.parametrize("head", ["POST /api/tools/project_list", "POST /mcp", "PUT /api/workspaces/{workspace}/files/x"])
def test_bodies_that_never_end_are_kept_within_the_tokens_budget(server, admin, project, head):
    """A client with a token that may only read sends many large bodies and ends none of them."""
    reader = server.token("read")
    workspace = server.api("workspace_list", admin, project_id=project)["workspaces"][0]["workspace_id"]
    head = head.replace("{workspace}", workspace)
    memory = Memory(server)
    with contextlib.ExitStack() as stack:
        for _ in range(BODIES):
            stack.enter_context(contextlib.closing(send_unfinished(server, reader, head)))
        settled(lambda: memory.peak, "everything to have been received")
        memory.check(MOST_MEMORY)
        answers(server, admin)
        # Nor are small requests of the same token refused.
        answers(server, reader)
    unharmed(server, admin)

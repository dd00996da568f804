"""A caller's schema and an agent's arguments are validated in bounded time and memory, whatever they are."""

from __future__ import annotations

import concurrent.futures
import json

import pytest

from attack_support import MIB, Memory, answers, unharmed
from caller import lend
from harness import DEADLINE, ToolFailed, running
from wire import Relay

CALLS = 4
"""Calls at once: more than the server has threads that could be kept busy."""
MOST_MEMORY = 128 * MIB


@pytest.fixture
def server():
    with running() as server:
        yield server
        # One that is still counting would take long to end in order.
        server.kill()


@pytest.fixture
def admin(server):
    return server.token("admin")


def doubling(keyword: str, levels: int) -> dict:
    """Each definition refers twice to the one before: so many levels are two to that power of ways to be wrong."""
    definitions: dict = {"d0": {"type": "string"}}
    for level in range(1, levels + 1):
        before = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {keyword: [before, before]}
    top = {"$ref": f"#/$defs/d{levels}"}
    return {"type": "object", "$defs": definitions, "properties": {"x": top}}


CASES = {
    "allOf": (doubling("allOf", 19), {"x": 1}),
    "anyOf": (doubling("anyOf", 17), {"x": 1}),
    "oneOf": (doubling("oneOf", 17), {"x": 1}),
    "elements": (
        {"type": "object", "properties": {"x": {"items": {"type": "string"}}}}, {"x": [1] * 500_000},
    ),
}
"""Schemas of some hundred bytes with arguments that are wrong in very many ways."""


@pytest.mark.parametrize("door", ["rest", "relay"])
@pytest.mark.parametrize("case", CASES)
def test_arguments_that_are_wrong_in_many_ways_are_refused_in_bounded_time_and_memory(server, admin, project, case, door):
    """A caller lends a tool whose schema is wrong in exponentially many ways for a small value, and calls it; the schema
    or the call is refused, others are answered meanwhile, and the server's memory stays level."""
    schema, arguments = CASES[case]
    assert len(json.dumps(schema)) < 2000
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    started = {"message": "go", "project_id": project, "agent": "quiet", "wait": True}
    context = lend({"name": "trap", "inputSchema": schema})
    try:
        session = server.api("session_message", admin, **started, context=context)["session_id"]
    except ToolFailed as refused:
        assert refused.code in ("invalid_argument", "limit_exceeded"), refused
        return unharmed(server, admin)
    path = server.api("session_get", admin, session_id=session)["relay_socket"]

    def call() -> str:
        """The error code a call is answered with."""
        if door == "relay":
            with Relay(path) as relay:
                return relay.call("caller_tool", tool="trap", arguments=arguments)["error"]["data"]["code"]
        try:
            return str(server.api("tool_call", admin, session_id=session, tool="myapp_trap", arguments=arguments))
        except ToolFailed as refused:
            return refused.code

    memory = Memory(server)
    with concurrent.futures.ThreadPoolExecutor(CALLS) as pool:
        calls = [pool.submit(call) for _ in range(CALLS)]
        try:
            answers(server, admin)
            codes = {call.result(DEADLINE) for call in calls}
        except BaseException:
            # Whoever waits for an answer learns that none comes.
            server.kill()
            raise
    assert codes <= {"invalid_argument", "limit_exceeded"}, codes
    memory.check(MOST_MEMORY)
    unharmed(server, admin)

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


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server
        # One that is still counting would take long to end in order.
        server.kill()


@pytest.fixture(scope="module")
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


def nested(levels: int, inner: dict, wrap) -> dict:
    """A schema wrapped again and again."""
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def brackets(n: int) -> list:
    """Lists that differ in where their brackets are, and in nothing else."""
    found: list = []
    for bit in range(14):
        found = [found, []] if n >> bit & 1 else [found]
    return found


def lent(definition: dict, **definitions: dict) -> dict:
    """The schema of a tool with one argument."""
    return {"type": "object", "$defs": definitions, "properties": {"x": definition}}


TWICE = {"properties": {"a": {"$ref": "#/$defs/twice"}}}
DEEP = nested(100, {"b": 1}, lambda inner: {"a": inner})
LONG = "ab" * (1 << 20)

SMALL_CASES = {
    "allOf": (doubling("allOf", 19), {"x": 1}),
    "anyOf": (doubling("anyOf", 17), {"x": 1}),
    "oneOf": (doubling("oneOf", 17), {"x": 1}),
    "elements": (
        {"type": "object", "properties": {"x": {"items": {"type": "string"}}}}, {"x": [1] * 250_000},
    ),
}
"""Schemas of some hundred bytes with arguments that are wrong in very many ways."""

CASES = {
    "if": (
        {"type": "object", "$defs": {"d0": {"type": "string"}} | {
            f"d{n}": {"if": {"$ref": f"#/$defs/d{n - 1}"}, "else": {"$ref": f"#/$defs/d{n - 1}"}} for n in range(1, 30)
        }, "properties": {"x": {"$ref": "#/$defs/d29"}}},
        {"x": 1},
    ),
    "not": (doubling("allOf", 29) | {"not": {"properties": {"x": {"$ref": "#/$defs/d29"}}}}, {"x": 1}),
    "a reference to itself": (lent({"$ref": "#/$defs/a"}, a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}), {"x": 1}),
    "a reference to itself among others": (lent({"$ref": "#/$defs/a"}, a={"anyOf": [{"$ref": "#/$defs/a"}] * 2}), {"x": 1}),
    "a dynamic reference to itself": (
        lent({"$dynamicRef": "#a"}, a={"$dynamicAnchor": "a", "allOf": [{"$dynamicRef": "#a"}] * 2}), {"x": 1},
    ),
    "twice for each level, and a wrong end": (
        lent({"$ref": "#/$defs/twice"}, twice={"allOf": [TWICE, TWICE], "properties": {"b": {"type": "string"}}}), {"x": DEEP},
    ),
    "unevaluated in unevaluated": (
        lent(nested(30, {"type": "object"}, lambda inner: {"allOf": [inner], "unevaluatedProperties": False})), {"x": {"a": 1}},
    ),
    "a pattern that goes back": (lent({"pattern": r"^(a|ab|b)*\1$"}), {"x": LONG}),
    "a pattern that would go back": (lent({"pattern": "^(a+|b+|(ab)+)+c$"}), {"x": LONG}),
    "a pattern that follows many ways": (lent({"pattern": "^(a|b)*a(a|b){400}c$"}), {"x": LONG}),
    "a pattern that is huge": (lent({"pattern": "((a{1000}){1000}){1000}"}), {"x": LONG}),
    "a pattern that is long to read": (lent({"pattern": r"\d" * 20_000}), {"x": LONG}),
    "many patterns": (lent({"allOf": [{"pattern": rf"^\p{{L}}{{40}}{n}$"} for n in range(1500)]}), {"x": LONG}),
    "patterns for names": (lent({"patternProperties": {"(a|b)*a(a|b){400}c": False}, "propertyNames": {"maxLength": 3}}), {"x": {LONG: 1}}),
    "many that look alike": (lent({"uniqueItems": True, "contains": {"const": "none"}}), {"x": [brackets(n) for n in range(1 << 12)]}),
    "many that are different": (lent({"uniqueItems": True, "contains": {"const": "none"}}), {"x": list(range(400_000))}),
    "many to choose from": (
        lent({"items": {"enum": [["same", "same", n] for n in range(1000)]}}), {"x": [["same", "same", -1]] * 20_000},
    ),
    "an enum with equals in an old draft": (
        {"$schema": "http://json-schema.org/draft-06/schema#", **lent({"enum": [brackets(n) for n in range(900)]})}, {"x": 1},
    ),
    "a deep schema": (lent(nested(50, {"type": "string"}, lambda inner: {"properties": {"a": inner}})), {"x": {"a": {"b": 1}}}),
    "deep arguments": (lent({"type": "string"}), {"x": DEEP}),
    "nothing, very often": (lent({"items": {"allOf": [{}] * 4000}, "contains": {"const": "none"}}), {"x": [0] * 200_000}),
    "long names with much in them": (
        lent({"properties": {"n" * 30_000: {"properties": {f"p{n}": {"type": "string"} for n in range(500)}}}}),
        {"x": {"n" * 30_000: {"p1": 1}}},
    ),
    "documents in the document": (
        lent({"$ref": "http://a.test/0"}, **{
            f"d{n}": {"$id": f"http://a.test/{n}", "allOf": [{"$ref": f"http://a.test/{n + 1}"}] * 2} for n in range(30)
        }),
        {"x": 1},
    ),
}
"""Schemas and arguments that take much time, memory or stack, each in another way. No arguments fit."""

TOO_MUCH_WORK = {
    "comparing": (
        lent({"items": {"enum": [["same", "same", n] for n in range(1000)]}}),
        {"x": [["same", "same", 999]] * 20_000 + [["same", "same", -1]]},
    ),
    "applying": (lent({"items": {"type": "integer", "allOf": [{}] * 4000}}), {"x": [0] * 20_000 + ["wrong"]}),
}
"""Arguments of which only the last item is wrong, and to come to it takes twice the work that one check may do."""


@pytest.mark.parametrize("door", ["rest", "relay"])
@pytest.mark.parametrize("case", SMALL_CASES)
def test_arguments_that_are_wrong_in_many_ways_are_refused_in_bounded_time_and_memory(server, admin, project, case, door):
    """A caller lends a tool whose schema is wrong in exponentially many ways for a small value, and calls it; the schema
    or the call is refused, others are answered meanwhile, and the server's memory stays level."""
    schema, arguments = SMALL_CASES[case]
    assert len(json.dumps(schema)) < 2000
    refused_in_bounds(server, admin, project, schema, arguments, door)


@pytest.mark.parametrize("case", CASES)
def test_no_schema_and_no_arguments_take_much_time_or_memory(server, admin, project, case):
    """The same for schemas and arguments that are large or odd in other ways."""
    schema, arguments = CASES[case]
    refused_in_bounds(server, admin, project, schema, arguments, "rest")


@pytest.mark.parametrize("door", ["rest", "relay"])
@pytest.mark.parametrize("case", TOO_MUCH_WORK)
def test_a_check_that_takes_too_much_work_is_given_up(server, admin, project, case, door):
    """A caller lends a tool and calls it with arguments that take long to be found wrong. The check ends at its limit of
    work, which is counted, before it finds that out: the error is another."""
    schema, arguments = TOO_MUCH_WORK[case]
    assert refused_in_bounds(server, admin, project, schema, arguments, door) == {"limit_exceeded"}


def refused_in_bounds(server, admin: str, project: str, schema: dict, arguments: dict, door: str) -> set[str]:
    """Declares a tool and calls it; one of both is refused, and the server is none the worse. Returns the error codes of
    the calls, none if the tool was refused."""
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    started = {"message": "go", "project_id": project, "agent": "quiet", "wait": True}
    context = lend({"name": "trap", "inputSchema": schema})
    memory = Memory(server)
    try:
        session = server.api("session_message", admin, **started, context=context)["session_id"]
    except ToolFailed as refused:
        assert refused.code in ("invalid_argument", "limit_exceeded"), refused
        assert "trap" in str(refused) and len(str(refused)) < 4096, refused
        memory.check(MOST_MEMORY)
        answers(server, admin)
        return set()
    path = server.api("session_get", admin, session_id=session)["relay_socket"]

    def call() -> str:
        """The error code a call is answered with."""
        if door == "relay":
            with Relay(path) as relay:
                error = relay.call("caller_tool", tool="trap", arguments=arguments)["error"]
                assert len(error["message"]) < 4096
                return error["data"]["code"]
        try:
            return str(server.api("tool_call", admin, session_id=session, tool="myapp_trap", arguments=arguments))
        except ToolFailed as refused:
            assert len(str(refused)) < 4096
            return refused.code

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
    server.api("session_end", admin, session_id=session)
    return codes


def test_arguments_that_fit_an_ordinary_schema_reach_the_caller(server, admin, project):
    """Schemas as programs write them are taken, and arguments that fit them reach the caller: recursive ones, patterns
    that look ahead, large lists."""
    expression = {"anyOf": [
        {"type": "object", "properties": {"op": {"const": op}, "args": {"type": "array", "items": {"$ref": "#/$defs/e"}}},
         "required": ["op", "args"]} for op in ("and", "or", "not")
    ] + [{"type": "string"}]}
    schema = {
        "type": "object",
        "$defs": {"e": expression},
        "properties": {
            "filter": {"$ref": "#/$defs/e"},
            "email": {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)@[a-z.]+$"},
            "numbers": {"type": "array", "items": {"type": "number"}, "uniqueItems": True},
        },
        "required": ["filter", "email", "numbers"],
    }
    filter = nested(10, {"op": "not", "args": ["x"]}, lambda inner: {"op": "and", "args": [inner, "y"]})
    arguments = {"filter": filter, "email": "a.b@example.org", "numbers": list(range(100_000))}
    server.put_agent("quiet", admin, [[{"say": "hi"}]])
    context = lend({"name": "trap", "inputSchema": schema})
    started = server.api(
        "session_message", admin, message="go", project_id=project, agent="quiet", wait=True, context=context
    )
    session = started["session_id"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(server.api, "tool_call", admin, session_id=session, tool="myapp_trap", arguments=arguments)
        with server.events(session, admin) as events:
            asked = events.until("caller_tool_request")
        assert asked["arguments"]["filter"] == filter
        answer = {"session_id": session, "request_id": asked["request_id"], "result": "done"}
        server.api("caller_tool_response", admin, **answer)
        assert call.result(DEADLINE)["isError"] is False
    wrong = {**arguments, "email": "a..b@example.org"}
    with pytest.raises(ToolFailed) as refused:
        server.api("tool_call", admin, session_id=session, tool="myapp_trap", arguments=wrong)
    assert refused.value.code == "invalid_argument" and "/email" in str(refused.value)

"""Agents that take MCP servers only over HTTP: `"mcp_transport": "http"`. The agent in the sandbox uses the real MCP SDK."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from harness import LEGACY, MODERN, ROOT, Server, ToolFailed, running

AGENTS = ROOT / "tests" / "python" / "agents"
SMALL = ROOT / "tests" / "python" / "small_server.py"
PYTHON = [prefix for prefix in (sys.prefix, sys.base_prefix) if not prefix.startswith("/usr")]
"""Where the Python of the tests and the MCP SDK are."""
CONFIG = f"[trust]\nread_only = {json.dumps([str(AGENTS), str(SMALL.parent), *PYTHON])}\n"


@pytest.fixture(scope="module")
def served():
    with running(CONFIG) as server:
        admin = server.token("admin")
        server.put_tool("small", admin, kind="mcp", transport="stdio", command="/usr/bin/python3", args=[str(SMALL)], read_only=[str(SMALL.parent)])
        yield server, admin


def put(server: Server, admin: str, slug: str, config: dict[str, Any], transport: str | None = "http", **more: Any) -> None:
    command = [f"{sys.prefix}/bin/python", str(AGENTS / "http_agent.py"), json.dumps(config)]
    runtime = {"kind": "acp", "command": command, "read_only": [str(AGENTS), *PYTHON]}
    if transport:
        runtime["mcp_transport"] = transport
    definition = {"name": slug, "prompt": "Be brief.", "runtime": runtime, "tools": {"use": ["small"]}, **more}
    server.api("agent_put", admin, slug=slug, definition=definition)


class Session:
    """A session with the agent."""

    def __init__(self, server: Server, admin: str, agent: str):
        self.server, self.admin, self.agent = server, admin, agent
        self.project = server.api("project_create", admin, name=f"p-{agent}")["project_id"]
        self.id: str | None = None

    def send(self, message: str, **more: Any) -> dict[str, Any]:
        where = {"session_id": self.id} if self.id else {"project_id": self.project, "agent": self.agent}
        done = self.server.api("session_message", self.admin, message=message, **where, **more)
        self.id = done["session_id"]
        return done

    def tell(self, message: str, **more: Any) -> str:
        return self.send(message, wait=True, **more)["text"]


def lend(*names: str) -> dict[str, Any]:
    return {"caller_id": "myapp", "caller_tools": [{"name": name} for name in names]}


@pytest.mark.parametrize("mode", [LEGACY, MODERN])
def test_an_agent_gets_its_tools_over_http_on_the_sandboxs_loopback(served, mode):
    server, admin = served
    put(server, admin, f"over-http-{mode}", {"mode": mode})
    session = Session(server, admin, f"over-http-{mode}")
    listed = session.tell("tools", context=lend("notify")).split()
    assert {"myapp_notify", "small_echo", "session_message"} <= set(listed), listed
    given = json.loads(session.tell("server"))
    assert (given["type"], given["url"], given["headers"]) == ("http", "http://127.0.0.1:19997/mcp", ["Authorization"])
    # A catalog tool.
    answer = json.loads(session.tell('call small_echo {"x": 1}'))
    assert (answer["error"], json.loads(answer["text"])) == (False, {"x": 1})
    # A lent tool, answered by the caller while the call waits.
    with server.events(session.id, admin) as events:
        session.send('call myapp_notify {"text": "hi"}')
        request = events.until("caller_tool_request")
        assert (request["tool"], request["arguments"]) == ("notify", {"text": "hi"})
        server.api("caller_tool_response", admin, session_id=session.id, request_id=request["request_id"], result="told")
        events.until("caller_tool_done", request_id=request["request_id"])
        assert "told" in events.until("turn_completed")["text"]
    # A tool lent later is listed by the same process before the next prompt.
    before = int(session.tell("prompts"))
    assert "myapp_late" in session.tell("tools", context=lend("notify", "late")).split()
    assert int(session.tell("prompts")) == before + 2
    # A blocked tool says so.
    assert "no_such_tool" in json.loads(session.tell("call no_such_tool {}"))["text"]
    kinds = server.api("debugger_events", admin, session_id=session.id, kinds=["agent_without_tools"])["events"]
    assert not kinds


@pytest.mark.parametrize("mode", [LEGACY, MODERN])
def test_progress_and_cancellation_pass_over_http(served, mode):
    server, admin = served
    put(server, admin, f"patient-{mode}", {"mode": mode})
    session = Session(server, admin, f"patient-{mode}")
    session.tell("tools", context=lend("notify"))
    with server.events(session.id, admin) as events:
        # The agent gives the call up when it has heard that the call is still open.
        session.send("abandon myapp_notify {}")
        request = events.until("caller_tool_request")
        done = events.until("caller_tool_done", request_id=request["request_id"])
        assert done["outcome"] == "cancelled", done
    # The turn may end before or after the call does.
    session.tell("prompts")
    log = server.api("session_events", admin, session_id=session.id, max_events=1000)["events"]
    assert "abandoned" in [event["text"] for event in log if event["type"] == "turn_completed"]


def test_the_endpoint_needs_its_token_which_is_not_in_the_environment(served):
    server, admin = served
    put(server, admin, "stranger", {})
    session = Session(server, admin, "stranger")
    assert session.tell("unauthorized") == "401 401"
    assert session.tell("env OUBLIETTE_MCP_TOKEN") == "unset"


def test_an_agent_that_does_not_take_http_is_refused_with_the_remedy(served):
    server, admin = served
    put(server, admin, "stdio-only", {"http": False})
    session = Session(server, admin, "stdio-only")
    with pytest.raises(ToolFailed) as refused:
        session.tell("tools")
    assert "mcpCapabilities.http" in refused.value.message and "http-fake 1" in refused.value.message


def test_an_agent_that_does_not_connect_over_http_is_noticed(served):
    server, admin = served
    put(server, admin, "deaf", {"connect": False})
    session = Session(server, admin, "deaf")
    assert session.tell("tools") == "none"
    with server.events(session.id, admin) as events:
        error = events.until("error")
    assert "without its tools" in error["message"] and "127.0.0.1:19997" in error["message"]


def test_a_program_that_is_not_there_says_so(served):
    server, admin = served
    runtime = {"kind": "acp", "command": ["/opt/no/such-agent"], "mcp_transport": "http"}
    server.api("agent_put", admin, slug="missing", definition={"name": "m", "prompt": "p", "runtime": runtime})
    with pytest.raises(ToolFailed) as failed:
        Session(server, admin, "missing").tell("tools")
    assert "/opt/no/such-agent" in failed.value.message
    with pytest.raises(ToolFailed) as unknown:
        put(server, admin, "wrong", {}, transport="smoke-signals")
    assert unknown.value.code == "invalid_argument" and "`stdio` or `http`" in unknown.value.message


def test_without_a_network_namespace_tools_over_http_are_refused(tmp_path):
    # Bubblewrap is installed and does not work.
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\nexit 1\n")
    bwrap.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with running(CONFIG + '[sandbox]\nminimum = "landlock"\n', env) as server:
        admin = server.token("admin")
        server.put_tool("small", admin, kind="mcp", transport="stdio", command="/usr/bin/python3", args=[str(SMALL)], read_only=[str(SMALL.parent)])
        put(server, admin, "bare", {})
        with pytest.raises(ToolFailed) as refused:
            Session(server, admin, "bare").tell("tools")
        assert "landlock" in refused.value.message and "stdio" in refused.value.message

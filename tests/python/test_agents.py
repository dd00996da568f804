"""How sessions work with ACP agents: permissions, history, tools that change, events, starts that fail.

The agent is a fake (`agents/fake_agent.py`), which does exactly what each test needs; real agents are in
`test_real_agents.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import ROOT, Server, ToolFailed, running

FOLDER = ROOT / "tests" / "python" / "agents"
CONFIG = f'[trust]\nread_only = ["{FOLDER}"]\n'
ESCAPE = "\u001b"


def fake(server: Server, admin: str, slug: str = "fake", config: dict[str, Any] | None = None, files: dict[str, str] | None = None, **more: Any) -> None:
    """Stores an agent that the fake runs."""
    command = ["/usr/bin/python3", "-I", "-S", str(FOLDER / "fake_agent.py"), json.dumps(config or {}), *more.pop("args", [])]
    runtime = {"kind": "acp", "command": command, "read_only": [str(FOLDER)], "env": more.pop("runtime_env", {})}
    definition = {"name": slug, "prompt": "Be brief.", "runtime": runtime, **more}
    server.api("agent_put", admin, slug=slug, definition=definition, files=files or {})


class Session:
    """A session with the fake, one waiting message at a time."""

    def __init__(self, server: Server, admin: str, agent: str = "fake", project: str | None = None):
        self.server, self.admin, self.agent = server, admin, agent
        self.project = project or server.api("project_create", admin, name=f"p-{agent}")["project_id"]
        self.id: str | None = None

    def tell(self, message: str, **more: Any) -> str:
        where = {"session_id": self.id} if self.id else {"project_id": self.project, "agent": self.agent}
        done = self.server.api("session_message", self.admin, message=message, wait=True, **where, **more)
        self.id = done["session_id"]
        return done["text"]

    def events(self, *types: str) -> list[dict[str, Any]]:
        events = self.server.api("session_events", self.admin, session_id=self.id, max_events=1000)["events"]
        return [event for event in events if not types or event["type"] in types]

    def debug(self, *kinds: str) -> list[dict[str, Any]]:
        return self.server.api("debugger_events", self.admin, session_id=self.id, kinds=list(kinds), max_events=1000)["events"]


def lend(*names: str) -> dict[str, Any]:
    return {"caller_id": "myapp", "caller_tools": [{"name": name} for name in names]}


@pytest.fixture(scope="module")
def served():
    with running(CONFIG) as server:
        yield server, server.token("admin")


def test_a_permission_request_about_a_gated_tool_is_allowed_and_others_follow_the_policy(served):
    server, admin = served
    fake(server, admin, "denying", permissions="deny")
    session = Session(server, admin, "denying")
    session.tell("say hello", context=lend("notify"))
    path = "oubliette/myapp_notify"
    announced = {"sessionUpdate": "tool_call", "toolCallId": "f", "title": path, "kind": "execute", "status": "pending"}
    for call, outcome in [
        ({"toolCallId": "a", "name": "mcp__oubliette__myapp_notify", "title": "x"}, "allow_once"),
        ({"toolCallId": "b", "title": "oubliette_project_list", "kind": "other"}, "allow_once"),
        ({"toolCallId": "c", "title": "rm -rf /", "kind": "execute", "rawInput": {"command": "rm -rf /"}}, "reject_once"),
        ({"toolCallId": "d", "title": "mcp__oubliette__myapp_notify", "kind": "execute"}, "reject_once"),
        ({"toolCallId": "e", "name": "mcp__oubliette__no_such_tool"}, "reject_once"),
        # A program of the workspace whose path reads like a tool; the kind was said before, or not at all.
        ([announced, {"toolCallId": "f", "title": path}], "reject_once"),
        ({"toolCallId": "g", "title": path, "rawInput": {"command": path}}, "reject_once"),
    ]:
        assert json.loads(session.tell("ask " + json.dumps(call)))["optionId"] == outcome, call
    recorded = [(e["tool"], e["gated"], e["answer"]) for e in session.debug("permission")]
    assert recorded == [
        ("myapp_notify", True, "allow"),
        ("project_list", True, "allow"),
        ("execute", False, "deny"),
        ("mcp__oubliette__myapp_notify", False, "deny"),
        ("mcp__oubliette__no_such_tool", False, "deny"),
        (path, False, "deny"),
        (path, False, "deny"),
    ]


def test_the_next_prompt_waits_until_the_agent_has_listed_changed_tools(served):
    server, admin = served
    fake(server, admin, "listing")
    session = Session(server, admin, "listing")
    session.tell("say hello")
    before = session.tell("prompts")
    assert "myapp_late" in session.tell("tools", context=lend("late")).split()
    assert "myapp_late" not in session.tell("tools", context={"caller_id": "myapp", "caller_tools": []}).split()
    # It was the same process all the time.
    assert int(session.tell("prompts")) == int(before) + 3


def test_an_agent_that_does_not_list_changed_tools_is_opened_again_with_its_history(served):
    server, admin = served
    fake(server, admin, "stubborn", {"relist": False, "load": "ok"})
    session = Session(server, admin, "stubborn")
    session.tell("say first")
    assert "myapp_late" in session.tell("tools", context=lend("late")).split()
    assert session.tell("prompts") == "2", "the process was started again for the changed tools"
    assert not session.events("error")


def test_history_replayed_late_does_not_reach_the_next_turn(served):
    server, admin = served
    fake(server, admin, "late", {"relist": False, "load": "late"})
    session = Session(server, admin, "late")
    session.tell("say first answer")
    session.tell("say second answer")
    assert session.tell("say third", context=lend("x")) == "third"
    texts = [event["text"] for event in session.events("message") if event["role"] == "assistant"]
    assert texts == ["first answer", "second answer", "third"]
    # The same message once more: its earlier answer is no part of the new one.
    assert session.tell("say third", context=lend("x", "y")) == "third"
    # An earlier answer of two messages, with a tool call between them.
    def said(text):
        return {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}

    call = {"sessionUpdate": "tool_call", "toolCallId": "1", "title": "look", "kind": "read", "status": "completed"}
    assert session.tell("updates " + json.dumps([said("before"), call, said("after")])) == "before\nafter"
    assert session.tell("say fifth", context=lend("x", "y", "z")) == "fifth"


def test_a_load_that_fails_is_an_event_and_the_agent_is_told_the_conversation(served):
    server, admin = served
    fake(server, admin, "forgetful", {"relist": False, "load": "fail"})
    session = Session(server, admin, "forgetful")
    session.tell("say the word is plum")
    told = session.tell("blocks", context=lend("x"))
    assert "the word is plum" in told and "Be brief." in told, told
    failed = session.events("error")
    assert len(failed) == 1 and "could not load" in failed[0]["message"] and "that file is gone" in failed[0]["message"]
    # Once: the next message is only itself.
    assert session.tell("blocks") == "blocks"


def test_the_prompt_is_given_once(served):
    server, admin = served
    fake(server, admin, "instructed")
    session = Session(server, admin, "instructed")
    assert session.tell("blocks") == "Be brief.|blocks"
    assert session.tell("blocks") == "blocks"


def test_an_agent_without_its_tools_is_noticed(served):
    server, admin = served
    fake(server, admin, "toolless", {"connect": False})
    session = Session(server, admin, "toolless")
    assert session.tell("tools") == "none"
    with server.events(session.id, admin) as events:
        error = events.until("error")
    assert "without its tools" in error["message"] and "MCP server" in error["message"]
    reasons = session.debug("agent_without_tools")
    assert len(reasons) == 1 and "fake 1" in reasons[0]["reason"]
    # An agent that has them is not reported.
    fake(server, admin, "equipped")
    other = Session(server, admin, "equipped")
    assert "session_message" in other.tell("tools").split()
    assert not other.debug("agent_without_tools")


def test_events_tell_what_happened(served):
    server, admin = served
    fake(server, admin, "telling")
    session = Session(server, admin, "telling")
    updates = [
        {"sessionUpdate": "tool_call", "toolCallId": "1", "title": f"ls {ESCAPE}[1m-la", "kind": "execute", "status": "pending", "rawInput": {"command": "l"}, "_meta": {"x": {"toolName": "Bash"}}},
        {"sessionUpdate": "tool_call_update", "toolCallId": "1", "rawInput": {"command": "ls -la"}},
        {"sessionUpdate": "tool_call_update", "toolCallId": "1", "_meta": {"terminal_output": {"terminal_id": "t", "data": f"{ESCAPE}[32mtotal"}}},
        {"sessionUpdate": "tool_call_update", "toolCallId": "1", "_meta": {"terminal_output": {"terminal_id": "t", "data": f" 0{ESCAPE}[0m"}}},
        {"sessionUpdate": "tool_call_update", "toolCallId": "1", "status": "completed"},
        {"sessionUpdate": "plan", "entries": [{"content": f"{ESCAPE}[1mlook", "priority": "low", "status": "pending"}]},
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": f"done {ESCAPE}[3"}},
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "1mnow"}},
    ]
    assert session.tell("updates " + json.dumps(updates)) == "done now"
    call, result = session.events("tool_call", "tool_result")
    assert (call["tool"], call["arguments"]) == ("Bash", {"command": "ls -la"})
    assert result["ok"] and result["result"] == "total 0"
    assert "\\u001b" not in json.dumps([event for event in session.events() if event.get("role") != "user"])


def test_a_start_that_fails_says_why(served):
    server, admin = served
    fake(server, admin, "noisy", {"noise": f"{ESCAPE}[31mno licence found", "dies": True})
    with pytest.raises(ToolFailed) as refused:
        Session(server, admin, "noisy").tell("say x")
    assert "its stdout ends: no licence found" in refused.value.message and ESCAPE not in refused.value.message
    hidden = server.home / "hidden-agent"
    hidden.write_text("#!/bin/sh\n")
    hidden.chmod(0o755)
    for slug, command, why in [
        ("hidden", [str(hidden)], "exists on the host, but the sandbox does not see it"),
        ("runner", ["npx", "-y", "some-agent"], "npx needs the network"),
    ]:
        server.api("agent_put", admin, slug=slug, definition={"name": slug, "prompt": "p", "runtime": {"kind": "acp", "command": command}})
        with pytest.raises(ToolFailed) as refused:
            Session(server, admin, slug).tell("say x")
        assert why in refused.value.message, refused.value.message


def test_an_agent_that_offers_an_api_key_method_is_authenticated(served):
    server, admin = served
    fake(server, admin, "locked", {"auth": True})
    assert Session(server, admin, "locked").tell("say open") == "open"


def test_home_beside_agent_json_is_copied_at_the_start_of_each_session(served):
    server, admin = served
    files = {"home/.config/fake/settings.json": '{"url":"${model_url:some}/v1"}'}
    fake(server, admin, "seeded", files=files)
    session = Session(server, admin, "seeded")
    assert session.tell("read /home/agent/.config/fake/settings.json") == '{"url":"http://127.0.0.1:19999/some/v1"}'
    for name in ["home/../x", "home//x", "/home/x", "home/"]:
        with pytest.raises(ToolFailed) as refused:
            fake(server, admin, "seeded", files={name: "x"})
        assert refused.value.code == "invalid_argument"


PROVIDERS = """
[providers.open]
base_url = "http://127.0.0.1:1"

[providers.keyless]
base_url = "http://127.0.0.1:1"
api_key_env = "KEY_THAT_IS_NOT_SET"
"""


def test_a_provider_that_is_missing_or_has_no_key_refuses_the_start():
    with running(CONFIG + PROVIDERS) as server:
        admin = server.token("admin")
        url = "http://127.0.0.1:19999/open"
        fake(server, admin, "good", model="open/m", runtime_env={"URL": "${model_url:open}/v1"}, args=["--at=${model_url:open}"])
        session = Session(server, admin, "good")
        assert session.tell("env URL") == f"{url}/v1"
        assert session.tell("argv") == f"--at={url}"
        for slug, more, why in [
            ("missing", {"model": "nowhere/m"}, "[providers.nowhere]"),
            ("keyless", {"model": "keyless/m"}, "KEY_THAT_IS_NOT_SET"),
            ("unknown", {"runtime_env": {"URL": "${model_url:nowhere}"}}, "[providers.nowhere]"),
        ]:
            fake(server, admin, slug, **more)
            with pytest.raises(ToolFailed) as refused:
                Session(server, admin, slug).tell("say x")
            assert why in refused.value.message, refused.value.message
            with pytest.raises(ToolFailed) as refused:
                server.api("session_switch_agent", admin, session_id=session.id, agent=slug)
            assert why in refused.value.message
        assert session.tell("say still here") == "still here"


def test_an_agent_that_asks_again_where_nobody_listens_is_told_so_that_it_stops():
    with running(CONFIG + PROVIDERS) as server:
        admin = server.token("admin")
        fake(server, admin, "asking", model="open/m")
        session = Session(server, admin, "asking")
        url = "http://127.0.0.1:19999/open/v1/messages"
        assert json.loads(session.tell(f"model {url} 3")) == [502, 400, 400]
        # Each turn is a new attempt.
        assert json.loads(session.tell(f"model {url} 2")) == [502, 400]
        # One that asks on all the same is stopped, and the log has the reason.
        with pytest.raises(ToolFailed) as stopped:
            session.tell(f"storm {url} 5")
        assert stopped.value.code == "unavailable" and "cannot be reached" in stopped.value.message, stopped.value
        assert "cannot be reached" in session.events("error")[-1]["message"]


def test_doctor_says_of_each_agent_what_would_refuse_its_start():
    with running(CONFIG + PROVIDERS) as server:
        admin = server.token("admin")
        hidden = server.home / "hidden-agent"
        hidden.write_text("#!/bin/sh\n")
        hidden.chmod(0o755)
        fake(server, admin, "good", model="open/m")
        fake(server, admin, "missing", model="nowhere/m")
        fake(server, admin, "unknown", runtime_env={"URL": "${model_url:nowhere}"})
        fake(server, admin, "keyless", model="keyless/m")
        fake(server, admin, "serviceless", sandbox={"upstreams": ["forge"]})
        for slug, runtime in [
            ("hidden", {"command": [str(hidden)]}),
            ("absent", {"command": ["no-such-agent"]}),
            ("runner", {"command": ["npx", "-y", "some-agent"]}),
            ("packed", {"program": {"npm": "some-agent@1.0.0"}}),
        ]:
            server.api("agent_put", admin, slug=slug, definition={"name": slug, "prompt": "p", "runtime": {"kind": "acp", **runtime}})
        checks = {check["name"]: check for check in server.api("doctor", admin)["checks"]}
        for slug, said in [
            ("missing", "[providers.nowhere]"),
            ("unknown", "[providers.nowhere]"),
            ("keyless", "KEY_THAT_IS_NOT_SET"),
            ("serviceless", "[upstreams.forge]"),
            ("hidden", "the sandbox does not see it"),
            ("absent", "oubliette agent presets"),
            ("runner", "npx needs the network"),
        ]:
            check = checks[f"agent {slug}"]
            assert not check["ok"] and said in check["detail"] + check["remedy"], check
        assert checks["agent good"]["ok"] and "oubliette agent test good" in checks["agent good"]["detail"]
        assert checks["agent packed"]["ok"] and "npm:some-agent@1.0.0, which its first start installs" in checks["agent packed"]["detail"]

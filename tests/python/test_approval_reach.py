"""How far a decision reaches, and until when people are asked."""

from __future__ import annotations

import json

from caller import call
from harness import running
from test_approvals import TOOL, decide, log_of, put_writer, start


def test_what_is_remembered_is_one_rule_of_one_agent_in_one_session(server, admin, project):
    """Another rule asks, another agent with the same rule asks, another session asks. Switched back to, the agent asks no more."""
    rule = {"tool": "@writer/*", "when": {"properties": {"path": {"pattern": "^etc/"}}, "required": ["path"]}}
    steps = [call(TOOL, path="etc/a", content="x"), call("project_list")]
    for slug in ("first", "second"):
        put_writer(server, admin, slug, [steps], ask=[rule, "project_list"])

    def rules_asked(session, remembered):
        """Sends a message; allows what is asked, and remembers these rules. Returns the rules that asked."""
        with server.events(session, admin, since=log_of(server, admin, session)[-1]["index"]) as events:
            server.api("session_message", admin, message="go", session_id=session)
            asked = []
            while (event := events.next())["type"] != "turn_completed":
                if event["type"] == "approval_requested":
                    asked.append(event["rule"])
                    remember = {"remember": "session"} if event["rule"] in remembered else {}
                    decide(server, admin, event["approval_id"], **remember)
            return asked

    server.put_agent("quiet", admin, [[{"say": "hi"}]])

    def session_of(agent):
        done = server.api("session_message", admin, message="go", project_id=project, agent="quiet", wait=True)
        server.api("session_switch_agent", admin, session_id=done["session_id"], agent=agent)
        return done["session_id"]

    session = session_of("first")
    assert rules_asked(session, [rule]) == [rule, "project_list"]
    assert rules_asked(session, []) == ["project_list"]
    server.api("session_switch_agent", admin, session_id=session, agent="second")
    assert rules_asked(session, []) == [rule, "project_list"]
    server.api("session_switch_agent", admin, session_id=session, agent="first")
    assert rules_asked(session, []) == ["project_list"]
    assert rules_asked(session_of("first"), []) == [rule, "project_list"]


def test_a_server_that_stops_asks_nobody_any_more():
    """The agent hears that its call was cancelled and makes the next one, which would wait and hold up the stop."""
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        put_writer(server, admin, "next", [[call(TOOL, path="a", content="x"), call(TOOL, path="b", content="x"), {"say": "ended"}]])
        session = start(server, admin, project, "next")
        with server.events(session, admin) as events:
            id = events.until("approval_requested")["approval_id"]
        server.stop()
        server.start()
        [asked] = server.api("approval_list", admin, session_id=session)["approvals"]
        assert (asked["approval_id"], asked["status"]) == (id, "cancelled")
        assert asked["reason"] == "the server stopped while it was pending"
        log = log_of(server, admin, session)
        assert "the server is stopping" in json.dumps([e for e in log if e["type"] == "tool_result"][1])
        assert [e["text"] for e in log if e["type"] == "turn_completed"] == ["ended"]

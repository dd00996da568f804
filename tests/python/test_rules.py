"""Rules that look at the arguments of a call: for every source of tools, and as they are explained."""

from __future__ import annotations

import json

import pytest

from harness import ToolFailed

WRITE = {"kind": "builtin", "builtinPolicy": {"name": "fs_write", "allowedPaths": ["."]}}


def with_text(field, **text):
    """A condition on a text that has to be there."""
    return {"properties": {field: text}, "required": [field]}


SECRET = with_text("path", pattern="secret")
ALLOWED = {"tool": "w", "when": with_text("path", pattern="^ok/")}
DENIED = [
    {"tool": "@writer/*", "when": SECRET},
    {"tool": "project_list", "when": with_text("name_contains", const="no")},
    {"tool": "oubliette_project_list", "when": with_text("name_contains", const="no")},
    {"tool": "myapp_*", "when": with_text("word", const="no")},
]
ASK = [{"tool": "myapp_*", "when": with_text("word", const="perhaps")}]


@pytest.fixture
def session(server, admin, project):
    server.put_tool("writer", admin, **WRITE)
    tools = {"use": ["writer"], "aliases": {"w": "@writer/fs_write"}, "allowed": [ALLOWED], "denied": DENIED, "ask": ASK}
    server.put_agent("ruled", admin, [[{"say": "hi"}]], tools=tools)
    context = {"caller_id": "myapp", "caller_tools": [{"name": "x"}]}
    message = {"message": "go", "project_id": project, "agent": "ruled", "context": context, "wait": True}
    return server.api("session_message", admin, **message)["session_id"]


def test_conditions_hold_for_every_source_and_by_every_name(server, admin, session):
    def outcome(tool, **arguments):
        try:
            server.api("tool_call", admin, session_id=session, tool=tool, arguments=arguments)
        except ToolFailed as failed:
            return failed.code
        return "made"

    for name in ("w", "writer_fs_write", "@writer/fs_write"):
        assert outcome(name, path="ok/a", content="x") == "made"
        assert outcome(name, path="elsewhere/a", content="x") == "not_allowed"
        assert outcome(name, path="ok/secret", content="x") == "not_allowed"
        assert outcome(name, content="x") == "not_allowed"
    for name in ("project_list", "oubliette_project_list"):
        assert outcome(name, name_contains="no") == "not_allowed"
        assert outcome(name, name_contains="yes") == "made"
    assert outcome("myapp_x", word="no") == "not_allowed"
    # Nobody is asked about a call that is denied all the same.
    assert server.api("approval_list", admin, session_id=session)["approvals"] == []
    rules = {tool["name"]: tool["rules"] for tool in server.api("tool_list", admin, session_id=session)["tools"]}
    assert rules["w"] == [{"list": "denied", "entry": DENIED[0]}, {"list": "allowed", "entry": ALLOWED}]
    assert rules["project_list"] == [{"list": "denied", "entry": DENIED[1]}]
    assert rules["myapp_x"] == [{"list": "denied", "entry": DENIED[3]}, {"list": "ask", "entry": ASK[0]}]
    assert rules["session_message"] == []


def test_a_call_of_any_source_is_explained(server, admin, session):
    """By the command line and by `tool_explain`, with a session and without one."""

    def said(tool, arguments, *options):
        explained = server.cli_json("tool", "explain", "ruled", tool, "--arguments", json.dumps(arguments), *options)["explanation"]
        more = {"session_id": session} if options else {}
        found = server.api("tool_explain", admin, agent="ruled", tool=tool, arguments=arguments, **more)["explanation"]
        assert explained == found, tool
        return explained

    for tool, denied in [
        ("w", {"path": "ok/secret"}),
        ("project_list", {"name_contains": "no"}),
        ("oubliette_project_list", {"name_contains": "no"}),
        ("myapp_x", {"word": "no"}),
    ]:
        assert "With these arguments it may not be called" in said(tool, denied), tool
    assert "it may be called." in said("w", {"path": "ok/a"})
    waits = "it may be called once a person has allowed it"
    assert waits in said("myapp_x", {"word": "perhaps"})
    lent = said("myapp_x", {"word": "perhaps"}, "--session", session)
    assert "lent by its caller's declaration" in lent and waits in lent

"""Calls that wait for a person to allow them: who is asked, who may decide, and how an approval ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal

import httpx
import pytest
from mcp import types

from caller import call
from harness import DEADLINE, LEGACY, ToolFailed, processes_with, running, wait_until
from terminal import Terminal
from wire import Relay

WRITE = {"kind": "builtin", "builtinPolicy": {"name": "fs_write", "allowedPaths": ["."]}}
TOOL = "writer_fs_write"


def put_writer(server, admin, slug, turns, ask=(TOOL,), **tools):
    server.put_tool("writer", admin, **WRITE)
    server.put_agent(slug, admin, turns, tools={"use": ["writer"], "ask": list(ask), **tools})


def start(server, admin, project, agent):
    started = server.api("session_message", admin, message="go", project_id=project, agent=agent)
    return started["session_id"]


def decide(server, token, approval_id, decision="allow", **more):
    return server.api("approval_decide", token, approval_id=approval_id, decision=decision, **more)


def pending(server, token, session):
    return server.api("approval_list", token, session_id=session, status="pending")["approvals"]


def log_of(server, token, session):
    return server.api("session_events", token, session_id=session, max_events=1000)["events"]


def fails(code, server, tool, token, /, **arguments):
    with pytest.raises(ToolFailed) as failed:
        server.api(tool, token, **arguments)
    assert failed.value.code == code, failed.value
    return str(failed.value)


@pytest.fixture
def background():
    """Runs calls that wait."""
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        yield threads.submit


def test_a_call_under_ask_waits_until_a_person_allows_it(server, admin, project):
    arguments = {"path": "a.txt", "content": "hello"}
    put_writer(server, admin, "asker", [[call(TOOL, **arguments), {"say": "done"}]])
    session = start(server, admin, project, "asker")
    with server.events(session, admin) as events:
        asked = events.until("approval_requested")
        id = asked["approval_id"]
        assert id.startswith("appr_") and asked["expires_at"] > asked["ts"]
        assert (asked["tool"], asked["canonical"], asked["source"]) == (TOOL, "@writer/fs_write", "catalog")
        assert (asked["arguments"], asked["rule"]) == (arguments, TOOL)
        assert server.api("session_get", admin, session_id=session)["pending_approvals"] == [id]
        listed = pending(server, admin, session)[0]
        assert listed["status"] == "pending" and listed["agent"] == "asker" and listed["project_id"] == project
        assert {k: listed[k] for k in ("tool", "canonical", "source", "arguments", "rule", "expires_at")} == {
            k: asked[k] for k in ("tool", "canonical", "source", "arguments", "rule", "expires_at")
        }
        decided = decide(server, admin, id, reason="fine")
        assert decided["status"] == "allowed" and decided["reason"] == "fine" and decided["decided_at"]
        seen = events.until("approval_decided")
        assert (seen["approval_id"], seen["decision"], seen["reason"]) == (id, "allowed", "fine")
        assert seen["by"] == decided["decided_by"]
        assert events.until("tool_result")["ok"] is True
        events.until("turn_completed")
    assert server.api("session_get", admin, session_id=session)["pending_approvals"] == []
    kinds = ["approval_requested", "approval_decided", "tool_call"]
    recorded = server.api("debugger_events", admin, session_id=session, kinds=kinds)["events"]
    assert [e["kind"] for e in recorded] == kinds
    assert recorded[0]["approval_id"] == id and recorded[0]["rule"] == TOOL and recorded[1]["decision"] == "allowed"
    entry = server.api("audit_list", admin, action="approval_decide")["entries"][0]
    assert entry["target"] == id and entry["outcome"] == "ok" and entry["project_id"] == project
    assert entry["detail"]["decision"] == "allow" and entry["detail"]["reason"] == "fine"


def test_a_denied_call_tells_the_agent_why(server, admin, project):
    put_writer(server, admin, "denied", [[call(TOOL, path="a", content="x")]])
    session = start(server, admin, project, "denied")
    with server.events(session, admin) as events:
        id = events.until("approval_requested")["approval_id"]
        assert decide(server, admin, id, "deny", reason="not on a Friday")["status"] == "denied"
        result = events.until("tool_result")
        assert result["ok"] is False and "not on a Friday" in json.dumps(result)
    blocked = server.api("debugger_events", admin, session_id=session, kinds=["tool_blocked"])["events"]
    assert "not on a Friday" in blocked[0]["reason"]


def test_only_calls_that_fit_when_ask_and_remember_lets_the_same_rule_pass(server, admin, project):
    rule = {"tool": "@writer/*", "when": {"properties": {"path": {"pattern": "^etc/"}}, "required": ["path"]}}
    steps = [call(TOOL, path=path, content="x") for path in ("notes", "etc/a", "etc/b")]
    put_writer(server, admin, "some", [steps, [call(TOOL, path="etc/c", content="x")]], ask=[rule])
    session = start(server, admin, project, "some")
    with server.events(session, admin) as events:
        asked = events.until("approval_requested")
        assert asked["arguments"]["path"] == "etc/a" and asked["rule"] == rule
        decide(server, admin, asked["approval_id"], remember="session")
        events.until("turn_completed")
    assert [e["type"] for e in log_of(server, admin, session)].count("approval_requested") == 1
    again = server.api("session_message", admin, message="on", session_id=session, wait=True)
    assert again["turn"] == 2
    assert [e["type"] for e in log_of(server, admin, session)].count("approval_requested") == 1
    row = next(t for t in server.api("tool_list", admin, session_id=session)["tools"] if t["name"] == TOOL)
    assert row["rules"] == [{"list": "ask", "entry": rule}] and row["allowed"] is True


def test_ask_governs_every_source_and_calls_from_outside_wait_too(server, admin, project, background):
    put_writer(server, admin, "all", [[{"say": "hi"}]], ask=["*"])
    context = {"caller_id": "myapp", "caller_tools": [{"name": "x"}]}
    done = server.api("session_message", admin, message="go", project_id=project, agent="all", context=context, wait=True)
    session = done["session_id"]
    sources = {"catalog": TOOL, "base": "project_list", "oubliette": "oubliette_project_list", "caller": "myapp_x"}
    for source, tool in sources.items():
        with server.events(session, admin, since=log_of(server, admin, session)[-1]["index"]) as events:
            waiting = background(server.api, "tool_call", admin, session_id=session, tool=tool, arguments={})
            asked = events.until("approval_requested")
            assert (asked["source"], asked["tool"], asked["rule"]) == (source, tool, "*")
            decide(server, admin, asked["approval_id"], "deny", reason=f"no {source}")
            with pytest.raises(ToolFailed) as denied:
                waiting.result(60)
            assert denied.value.code == "not_allowed" and f"no {source}" in str(denied.value)


def test_secrets_in_arguments_are_masked_wherever_an_approval_is_shown(server, admin, project, background):
    put_writer(server, admin, "secretive", [[{"say": "hi"}]], ask=["*"])
    done = server.api("session_message", admin, message="go", project_id=project, agent="secretive", wait=True)
    session, secret = done["session_id"], "open-sesame-42"
    arguments = {"project_id": project, "env": {"DATABASE": secret}}
    with server.events(session, admin, since=log_of(server, admin, session)[-1]["index"]) as events:
        call = {"session_id": session, "tool": "oubliette_project_update", "arguments": arguments}
        waiting = background(server.api, "tool_call", admin, **call)
        asked = events.until("approval_requested")
        assert asked["arguments"]["env"] == {"DATABASE": "•••"}
        decide(server, admin, asked["approval_id"], "deny")
        with pytest.raises(ToolFailed):
            waiting.result(60)
    shown = [
        log_of(server, admin, session),
        server.api("approval_list", admin, session_id=session),
        server.api("debugger_events", admin, session_id=session),
        server.api("audit_list", admin, limit=100),
        server.log(),
    ]
    assert all(secret not in json.dumps(each) for each in shown)


def test_denied_wins_over_ask_and_ask_does_not_allow(server, admin, project):
    put_writer(server, admin, "neither", [[{"say": "hi"}]], ask=["*"], denied=["@writer/*"])
    put_writer(server, admin, "unlisted", [[{"say": "hi"}]], ask=["*"], allowed=["@writer/nothing"])
    for agent in ("neither", "unlisted"):
        done = server.api("session_message", admin, message="go", project_id=project, agent=agent, wait=True)
        fails("not_allowed", server, "tool_call", admin, session_id=done["session_id"], tool=TOOL, arguments={})
        assert server.api("approval_list", admin, session_id=done["session_id"])["approvals"] == []


def test_of_two_who_decide_at_once_one_wins(server, admin, project, background):
    put_writer(server, admin, "race", [[call(TOOL, path="a", content="x")]])
    session = start(server, admin, project, "race")
    with server.events(session, admin) as events:
        id = events.until("approval_requested")["approval_id"]
        answers = [background(decide, server, admin, id, decision) for decision in ["allow", "deny"] * 4]
        outcomes = []
        for answer in answers:
            try:
                outcomes.append(answer.result(60)["status"])
            except ToolFailed as failed:
                outcomes.append(failed.code)
        assert outcomes.count("conflict") == 7
        won = next(outcome for outcome in outcomes if outcome != "conflict")
        assert events.until("approval_decided")["decision"] == won
        assert events.until("tool_result")["ok"] is (won == "allowed")
    assert [e["type"] for e in log_of(server, admin, session)].count("approval_decided") == 1
    assert "decided already" in fails("conflict", server, "approval_decide", admin, approval_id=id, decision="allow")


def test_who_may_not_decide(server, admin, project):
    """Not the agent, whatever its key; not with a session's key from outside; not another project's token."""
    keyed = server.api("project_create", admin, name="keyed", api_key={"scope": "admin"})["project_id"]
    put_writer(server, admin, "inner", [[call(TOOL, path="a", content="x")]])
    session = start(server, admin, keyed, "inner")
    with server.events(session, admin) as events:
        id = events.until("approval_requested")["approval_id"]
        own = server.token("admin", keyed)
        with Relay(server.api("session_get", admin, session_id=session)["relay_socket"]) as relay:
            params = {"tool": "approval_decide", "arguments": {"approval_id": id, "decision": "allow"}}
            refused = relay.call("oubliette_call_tool", api_key=own, **params)
            assert refused["error"]["data"]["code"] == "permission_denied", refused
            listed = relay.call("oubliette_call_tool", api_key=own, tool="approval_list", arguments={})
            assert [a["approval_id"] for a in listed["result"]["approvals"]] == [id]
            made = {"tool": "token_create", "arguments": {"name": "x", "scope": "write", "project_id": keyed}}
            minted = relay.call("oubliette_call_tool", api_key=own, **made)["result"]["token"]
        fails("permission_denied", server, "approval_decide", minted, approval_id=id, decision="allow")
        stranger = server.token("write", project)
        fails("not_found", server, "approval_decide", stranger, approval_id=id, decision="allow")
        assert all(a["project_id"] == project for a in server.api("approval_list", stranger)["approvals"])
        fails("not_found", server, "approval_list", stranger, session_id=session)
        fails("permission_denied", server, "approval_decide", server.token("read"), approval_id=id, decision="allow")
        unknown = "appr_" + "0" * 26
        fails("not_found", server, "approval_decide", admin, approval_id=unknown, decision="allow")
        for bad in ({"approval_id": "x"}, {"decision": "maybe"}, {"remember": "for ever"}, {"reason": "x" * 3000}):
            given = {"approval_id": id, "decision": "allow", **bad}
            fails("invalid_argument", server, "approval_decide", admin, **given)
        assert [a["approval_id"] for a in pending(server, own, session)] == [id]
        decide(server, server.token("write", keyed), id)
        assert events.until("tool_result")["ok"] is True


def test_a_cancel_a_switch_an_end_and_a_lost_agent_cancel_it(server, admin, project):
    mark = f"OUBLIETTE_TEST_MARK_{os.getpid()}"
    server.put_tool("writer", admin, **WRITE)
    turns, tools = [[call(TOOL, path="a", content="x"), {"say": "on"}]], {"use": ["writer"], "ask": [TOOL]}
    server.put_agent("waits", admin, turns, tools=tools, env={mark: "1"})
    server.put_agent("next", admin, [[{"say": "next"}]])

    def waiting():
        session = start(server, admin, project, "waits")
        events = server.events(session, admin)
        return session, events, events.until("approval_requested")["approval_id"]

    session, events, id = waiting()
    server.api("session_cancel", admin, session_id=session)
    assert events.until("approval_decided", approval_id=id)["decision"] == "cancelled"
    events.close()

    session, events, id = waiting()
    switched = server.api("session_switch_agent", admin, session_id=session, agent="next")
    assert switched["drained"] is False
    assert events.until("approval_decided", approval_id=id)["decision"] == "cancelled"
    drain = server.api("debugger_events", admin, session_id=session, kinds=["drain_started"])["events"][0]
    assert drain["in_flight"] == 2  # the turn and the call
    events.close()

    session, events, id = waiting()
    server.api("session_end", admin, session_id=session)
    ended = events.until("approval_decided", approval_id=id)
    assert (ended["decision"], ended["reason"]) == ("cancelled", "the session was ended")
    events.until("status", status="ended")
    fails("conflict", server, "approval_decide", admin, approval_id=id, decision="allow")
    events.close()

    session, events, id = waiting()
    for process in processes_with(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert events.until("approval_decided", approval_id=id)["decision"] == "cancelled"
    events.until("status", status="failed")
    events.close()


def test_an_approval_expires_and_does_not_survive_a_restart(background):
    with running('[approval]\ntimeout = "1s"\n') as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        put_writer(server, admin, "late", [[call(TOOL, path="a", content="x")]])
        session = start(server, admin, project, "late")
        with server.events(session, admin) as events:
            id = events.until("approval_requested")["approval_id"]
            assert events.until("approval_decided")["decision"] == "expired"
            assert events.until("tool_result")["ok"] is False
            events.until("status", status="idle")
        fails("conflict", server, "approval_decide", admin, approval_id=id, decision="allow")
        late = fails("timeout", server, "tool_call", admin, session_id=session, tool=TOOL, arguments={"path": "b"})
        assert "expired" in late
        server.stop()
        (server.home / "oubliette.toml").write_text(
            (server.home / "oubliette.toml").read_text().replace('timeout = "1s"', 'timeout = "10m"')
        )
        server.start()
        session = start(server, admin, project, "late")
        with server.events(session, admin) as events:
            id = events.until("approval_requested")["approval_id"]
        server.kill()
        server.start()
        cancelled = server.api("approval_list", admin, session_id=session)["approvals"][0]
        assert (cancelled["approval_id"], cancelled["status"]) == (id, "cancelled")
        assert "restarted" in cancelled["reason"] and "decided_by" not in cancelled
        assert "restarted" in fails("conflict", server, "approval_decide", admin, approval_id=id, decision="allow")
        ends = [e for e in log_of(server, admin, session) if e["type"] == "approval_decided"]
        assert [(e["approval_id"], e["decision"]) for e in ends] == [(id, "cancelled")]
        assert server.api("session_get", admin, session_id=session)["pending_approvals"] == []
        session = start(server, admin, project, "late")
        with server.events(session, admin) as events:
            events.until("approval_requested")
        server.stop()
        server.start()
        stopped = server.api("approval_list", admin, session_id=session)["approvals"][0]
        assert stopped["status"] == "cancelled" and "the server stopped" in stopped["reason"], stopped


def test_large_arguments_are_cut_in_the_approval_and_whole_in_the_call(server, admin, project, background):
    put_writer(server, admin, "large", [[{"say": "hi"}]])
    done = server.api("session_message", admin, message="go", project_id=project, agent="large", wait=True)
    session = done["session_id"]
    content = "x" * 3_900_000
    with server.events(session, admin) as events:
        # The long one first: nothing hides behind it.
        arguments = {"content": content, "path": "big"}
        waiting = background(server.api, "tool_call", admin, session_id=session, tool=TOOL, arguments=arguments)
        asked = events.until("approval_requested")
        assert asked["arguments"]["path"] == "big"
        assert asked["arguments"]["content"].endswith("… (3900000 bytes in all)")
        assert len(json.dumps(asked)) < 100_000
        assert pending(server, admin, session)[0]["arguments"] == asked["arguments"]
        decide(server, admin, asked["approval_id"])
        assert waiting.result(60)["isError"] is False
    url = f"{server.url}/api/workspaces/{done_workspace(server, admin, session)}/files/big"
    read = httpx.get(url, headers={"Authorization": f"Bearer {admin}"}, timeout=60)
    assert len(read.content) == len(content), "the call was made with the whole of its arguments"


def test_four_mebibytes_of_arguments_from_inside_wait_for_a_person_too(server, admin, project):
    put_writer(server, admin, "huge", [[{"say": "hi"}]])
    done = server.api("session_message", admin, message="go", project_id=project, agent="huge", wait=True)
    session = done["session_id"]
    with Relay(server.api("session_get", admin, session_id=session)["relay_socket"]) as relay:
        id = relay.request("agent_call_tool", tool=TOOL, arguments={"path": "big", "content": "x" * (4 << 20)})
        relay.notice("progress")
        [asked] = pending(server, admin, session)
        assert asked["arguments"]["path"] == "big" and "bytes in all" in asked["arguments"]["content"]
        assert len(json.dumps(log_of(server, admin, session))) < 1_000_000
        decide(server, admin, asked["approval_id"])
        assert relay.answer(id)["result"]["isError"] is False
    read = httpx.get(
        f"{server.url}/api/workspaces/{done_workspace(server, admin, session)}/files/big",
        headers={"Authorization": f"Bearer {admin}"},
        timeout=60,
    )
    assert len(read.content) == 4 << 20


def done_workspace(server, admin, session):
    return server.api("session_get", admin, session_id=session)["workspace_id"]


def test_a_waiting_call_reports_progress_on_the_relay_socket(server, admin, project):
    put_writer(server, admin, "progress", [[{"say": "hi"}]])
    done = server.api("session_message", admin, message="go", project_id=project, agent="progress", wait=True)
    session = done["session_id"]
    with Relay(server.api("session_get", admin, session_id=session)["relay_socket"]) as relay:
        id = relay.request("agent_call_tool", tool=TOOL, arguments={"path": "a", "content": "x"})
        first, second = relay.notice("progress"), relay.notice("progress")
        assert first["params"]["id"] == id and second["params"]["progress"] > first["params"]["progress"]
        approval = pending(server, admin, session)[0]
        assert approval["approval_id"] in first["params"]["message"]
        decide(server, admin, approval["approval_id"])
        assert relay.answer(id)["result"]["isError"] is False
        # A connection that closes gives its calls up.
        relay.request("agent_call_tool", tool=TOOL, arguments={"path": "b", "content": "x"})
        relay.notice("progress")
        gone = pending(server, admin, session)[0]["approval_id"]
    with server.events(session, admin) as events:
        assert events.until("approval_decided", approval_id=gone)["decision"] == "cancelled"


def test_a_rule_edited_while_a_call_waits_still_holds(server, admin, project):
    put_writer(server, admin, "edited", [[call(TOOL, path="a", content="x")]])
    session = start(server, admin, project, "edited")
    with server.events(session, admin) as events:
        id = events.until("approval_requested")["approval_id"]
        put_writer(server, admin, "edited", [[call(TOOL, path="a", content="x")]], denied=["@writer/*"])
        with server.debugger(admin, session_id=session) as debugger:
            debugger.until("tool_registered", allowed=False)
        decide(server, admin, id)
        result = events.until("tool_result")
        assert result["ok"] is False and "denied" in json.dumps(result)


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def exponential(depth):
    """Each definition refers to the next one twice."""
    defs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return {"$defs": {**defs, f"d{depth}": {"required": ["never there"]}}, "$ref": "#/$defs/d0"}


def test_bad_rules_are_refused_by_field(server, admin):
    for entry, field in [
        ({"tool": "x"}, "tools.ask[0]"),
        ({"tool": "x", "when": {"type": "string"}}, "tools.ask[0].when"),
        ({"tool": "x", "when": {"$ref": "https://example.com/x"}}, "tools.ask[0].when"),
        ({"tool": "x", "when": {"$ref": "file:///etc/passwd"}}, "tools.ask[0].when"),
        ({"tool": "x", "when": {"$ref": "#/$defs/missing"}}, "tools.ask[0].when"),
        ({"tool": "x", "when": 7}, "tools.ask[0]"),
        ({"tool": "x", "when": {"properties": []}}, "tools.ask[0].when"),
        ({"tool": "x", "when": {"properties": {"a": {"type": "nothing"}}}}, "tools.ask[0].when"),
        ({"tool": "x", "when": {"properties": {"a": {"pattern": "("}}}}, "tools.ask[0].when"),
        # Bombs: nested too deeply, a billion ways through it, too large, a pattern that would be compiled to gigabytes.
        ({"tool": "x", "when": nested(40)}, "tools.ask[0].when"),
        ({"tool": "x", "when": exponential(30)}, "tools.ask[0].when"),
        ({"tool": "x", "when": exponential(60)}, "tools.ask[0].when"),
        ({"tool": "x", "when": {"required": [f"field {n}" for n in range(10_000)]}}, "tools.ask[0].when"),
        ({"tool": "x", "when": {"properties": {"a": {"pattern": "((a{1000}){1000}){1000}"}}}}, "tools.ask[0].when"),
        ({"tool": "x", "when": {}, "then": 1}, "tools.ask[0]"),
        (7, "tools.ask[0]"),
        ("", "tools.ask[0]"),
    ]:
        definition = {"name": "Bad", "prompt": "p", "tools": {"ask": [entry]}}
        said = fails("invalid_argument", server, "agent_put", admin, slug="bad", definition=definition)
        assert field in said, said


def test_the_command_line_lists_and_decides(server, admin, project):
    put_writer(server, admin, "cli", [[call(TOOL, path="a", content="x")], [call(TOOL, path="b", content="x")]])
    session = start(server, admin, project, "cli")
    with server.events(session, admin) as events:
        id = events.until("approval_requested")["approval_id"]
        listed = server.cli_json("approvals", "--session", session)["approvals"]
        assert [a["approval_id"] for a in listed] == [id]
        assert id in server.cli("approvals", "--session", session).stdout
        assert server.cli_json("approve", id)["status"] == "allowed"
        events.until("turn_completed")
        server.api("session_message", admin, message="on", session_id=session)
        id = events.until("approval_requested")["approval_id"]
        denied = server.cli_json("deny", id, "--reason", "no")
        assert (denied["status"], denied["reason"], denied["decided_by"]) == ("denied", "no", "owner")
        again = server.cli("deny", id, check=False)
        assert again.returncode == 1 and "decided already" in again.stderr
    assert "No call waits" in server.cli("approvals", "--session", session).stdout
    line = next(line for line in server.cli("audit", "--action", "approval_decide").stdout.splitlines() if id in line and " ok " in line)
    assert "the owner" in line and 'decision="deny" reason="no"' in line, line


async def test_a_client_with_elicitation_is_asked_in_its_own_form(server, admin, project, mode):
    """2025-11-25: `elicitation/create`; 2026-07-28: the input-required result and retry. The message is sent once."""
    steps = [call(TOOL, path=path, content="x") for path in ("a", "b")]
    put_writer(server, admin, "elicit", [[*steps, {"say": "done"}]])
    asked = []

    async def answer(_, params):
        asked.append(params)
        assert params.requested_schema["properties"]["decision"]["enum"] == ["allow", "deny"]
        decision = {"decision": "allow"} if len(asked) == 1 else {"decision": "deny", "reason": "enough"}
        return types.ElicitResult(action="accept", content=decision)

    async with server.mcp(admin, mode, elicitation_callback=answer) as mcp:
        done = await mcp.call("session_message", message="go", project_id=project, agent="elicit", wait=True)
    assert done["text"].endswith("done") and len(asked) == 2
    assert TOOL in asked[0].message and '"path":"a"' in asked[0].message
    log = log_of(server, admin, done["session_id"])
    assert [e["decision"] for e in log if e["type"] == "approval_decided"] == ["allowed", "denied"]
    assert [e["ok"] for e in log if e["type"] == "tool_result"] == [True, False]
    assert [e["type"] for e in log].count("turn_completed") == 1


async def test_an_elicitation_that_is_decided_elsewhere_is_withdrawn(server, admin, project):
    put_writer(server, admin, "elsewhere", [[call(TOOL, path="a", content="x"), {"say": "done"}]])
    asked, withdrawn = asyncio.Event(), asyncio.Event()

    async def answer(_, params):
        asked.set()
        try:
            await asyncio.sleep(DEADLINE)
        except asyncio.CancelledError:
            withdrawn.set()
            raise

    async with server.mcp(admin, LEGACY, elicitation_callback=answer) as mcp:
        message = {"message": "go", "project_id": project, "agent": "elsewhere", "wait": True}
        waiting = asyncio.create_task(mcp.call("session_message", **message))
        await asyncio.wait_for(asked.wait(), 60)
        [listed] = server.api("approval_list", admin, project_id=project, status="pending")["approvals"]
        decide(server, admin, listed["approval_id"])
        await asyncio.wait_for(withdrawn.wait(), 60)
        assert (await asyncio.wait_for(waiting, 60))["text"].endswith("done")


async def test_a_cancelled_elicitation_leaves_the_approval_pending(server, admin, project, mode):
    """Two are asked about: the first is cancelled, then the second is allowed, so that the first answer was heard."""
    both = [{"tool": TOOL, "arguments": {"path": path, "content": "x"}} for path in ("a", "b")]
    put_writer(server, admin, "undecided", [[{"parallel": both}, {"say": "done"}]])
    asked = []

    async def answer(_, params):
        asked.append(params.message)
        if len(asked) == 1:
            return types.ElicitResult(action="cancel")
        return types.ElicitResult(action="accept", content={"decision": "allow"})

    def listed(status):
        return server.api("approval_list", admin, project_id=project, status=status)["approvals"]

    async with server.mcp(admin, mode, elicitation_callback=answer) as mcp:
        message = {"message": "go", "project_id": project, "agent": "undecided", "wait": True}
        waiting = asyncio.create_task(mcp.call("session_message", **message))
        await asyncio.to_thread(wait_until, lambda: listed("allowed"), "the second to be allowed")
        [left] = listed("pending")
        assert left["approval_id"] in asked[0]
        decide(server, admin, left["approval_id"])
        done = await asyncio.wait_for(waiting, 60)
    assert done["text"].endswith("done") and len(asked) == 2


def test_run_asks_at_the_terminal(server, admin, project):
    steps = [call(TOOL, path=path, content="x") for path in ("a", "b")]
    put_writer(server, admin, "terminal", [[*steps, {"say": "done"}]])
    run = server.cli("run", "--agent", "terminal", "--project", project, "go", input="y\nn not that\n")
    assert "done" in run.stdout and "allow " + TOOL in run.stderr
    session = server.api("session_list", admin, project_id=project)["sessions"][0]["session_id"]
    decided = [e for e in log_of(server, admin, session) if e["type"] == "approval_decided"]
    assert [(e["decision"], e["by"]) for e in decided] == [("allowed", "owner"), ("denied", "owner")]
    assert decided[1]["reason"] == "not that"


def decisions(server, admin, session):
    return [(e["decision"], e.get("reason")) for e in log_of(server, admin, session) if e["type"] == "approval_decided"]


def test_chat_asks_in_a_real_terminal_and_takes_lines_typed_before_as_messages(server, admin, project):
    steps = [call(TOOL, path=path, content=f"first of {path}\nsecond\x1b[2K") for path in ("a", "b")]
    put_writer(server, admin, "chatter", [[*steps, {"say": "all done"}], [{"say": "the next turn"}]])
    with Terminal(server, "chat", "--agent", "chatter", "--project", project) as terminal:
        terminal.until("›")
        terminal.type("go")
        asked = terminal.until("y or n, a for all of this session")
        assert f"allow {TOOL}?" in asked and "path: a" in asked
        # What is to be written is laid out, and acts on nothing.
        assert "| first of a" in asked and "| second\\u{1b}[2K" in asked
        # A line that is no answer decides nothing, and is asked again.
        terminal.type("hello?")
        terminal.until("y or n, a for all of this session")
        session = server.api("session_list", admin, project_id=project)["sessions"][0]["session_id"]
        assert decisions(server, admin, session) == []
        terminal.type("y")
        asked = terminal.until("y or n, a for all of this session")
        assert "path: b" in asked
        terminal.type("n not that one")
        terminal.until("all done")
        terminal.until("›")
        assert decisions(server, admin, session) == [("allowed", None), ("denied", "not that one")]
        terminal.type("go on")
        terminal.until("the next turn")
        terminal.until("›")
        terminal.type("/end")
        assert terminal.wait() == 0


def test_a_question_that_is_decided_elsewhere_is_no_longer_asked_at_the_terminal(server, admin, project):
    """The next one takes its place; a line typed for the first does not answer the second."""
    put_writer(server, admin, "elsewhere", [[call(TOOL, path="a", content="x"), call(TOOL, path="b", content="x"), {"say": "all done"}]])
    with Terminal(server, "run", "--agent", "elsewhere", "--project", project, "go") as terminal:
        terminal.until("path: a")
        [first] = server.api("approval_list", admin, project_id=project, status="pending")["approvals"]
        decide(server, admin, first["approval_id"])
        assert "allowed" in terminal.until("path: b")
        terminal.until("y or n")
        # A line that comes too soon to be an answer to the new question is not taken for one.
        while True:
            terminal.type("n")
            if "all done" in terminal.until("nothing was decided", "all done"):
                break
        assert terminal.wait() == 0
    assert [decision for decision, _ in decisions(server, admin, first["session_id"])] == ["allowed", "denied"]


def test_approvals_watch_shows_them_as_they_come_and_go(server, admin, project):
    put_writer(server, admin, "watched", [[call(TOOL, path="seen", content="x")]])
    with Terminal(server, "approvals", "--watch", "--project", project) as terminal:
        session = start(server, admin, project, "watched")
        with server.events(session, admin) as events:
            id = events.until("approval_requested")["approval_id"]
            assert "pending" in terminal.until('path="seen"') and id in terminal.text
            decide(server, admin, id, "deny", reason="not today")
            terminal.until("not today")
            assert f"{id} denied" in terminal.text


async def test_a_call_from_outside_that_waits_for_a_person_reports_progress(server, admin, project, mode):
    put_writer(server, admin, "outer", [[{"say": "hi"}]])
    done = server.api("session_message", admin, message="go", project_id=project, agent="outer", wait=True)
    session, heard, twice = done["session_id"], [], asyncio.Event()

    async def progress(value, total, message):
        heard.append((value, message))
        if len(heard) == 3:
            twice.set()

    arguments = {"session_id": session, "tool": TOOL, "arguments": {"path": "a", "content": "x"}}
    async with server.mcp(admin, mode) as mcp:
        waiting = asyncio.create_task(mcp.client.call_tool("tool_call", arguments, progress_callback=progress))
        await asyncio.wait_for(twice.wait(), DEADLINE)
        approval = (await asyncio.to_thread(pending, server, admin, session))[0]["approval_id"]
        assert approval in heard[0][1]
        values = [value for value, _ in heard]
        assert values == sorted(set(values)), "each is above the last"
        await asyncio.to_thread(decide, server, admin, approval)
        result = await asyncio.wait_for(waiting, DEADLINE)
        assert result.structured_content["isError"] is False
        # So does a message whose turn waits.
        heard.clear()
        twice.clear()
        put_writer(server, admin, "outer", [[{"say": "hi"}]])
        message = {"message": "go", "project_id": project, "agent": "slow", "wait": True}
        put_writer(server, admin, "slow", [[call(TOOL, path="b", content="x")]])
        waiting = asyncio.create_task(mcp.client.call_tool("session_message", message, progress_callback=progress))
        await asyncio.wait_for(twice.wait(), DEADLINE)
        listed = await asyncio.to_thread(server.api, "approval_list", admin, project_id=project, status="pending")
        await asyncio.to_thread(decide, server, admin, listed["approvals"][0]["approval_id"])
        assert (await asyncio.wait_for(waiting, DEADLINE)).is_error is False


def test_a_call_from_outside_does_not_outlive_its_token(server, admin, project, background):
    put_writer(server, admin, "revoked", [[{"say": "hi"}]])
    done = server.api("session_message", admin, message="go", project_id=project, agent="revoked", wait=True)
    session, token = done["session_id"], server.api("token_create", admin, name="short", scope="write")
    with server.events(session, admin) as events:
        arguments = {"path": "a", "content": "x"}
        waiting = background(server.api, "tool_call", token["token"], session_id=session, tool=TOOL, arguments=arguments)
        id = events.until("approval_requested")["approval_id"]
        server.api("token_revoke", admin, token_id=token["token_id"])
        assert events.until("approval_decided", approval_id=id)["decision"] == "cancelled"
        with pytest.raises(ToolFailed) as ended:
            waiting.result(DEADLINE)
        assert ended.value.code == "unauthenticated"
    fails("conflict", server, "approval_decide", admin, approval_id=id, decision="allow")


def test_nobody_is_asked_about_a_call_that_the_turns_budget_refuses(server, admin):
    """The place is taken before anybody is asked, and kept if the call is denied; only calls that are made are counted."""
    limited = server.api("project_create", admin, name="limited", limits={"tool_calls_per_turn": 2})["project_id"]
    steps = [call(TOOL, path=path, content="x") for path in ("a", "b", "c")]
    put_writer(server, admin, "limited", [[*steps, {"say": "done"}]])
    session = start(server, admin, limited, "limited")
    with server.events(session, admin) as events:
        for decision in ("allow", "deny"):
            decide(server, admin, events.until("approval_requested")["approval_id"], decision)
        events.until("turn_completed")
    log = log_of(server, admin, session)
    assert [e["type"] for e in log].count("approval_requested") == 2
    results = [e for e in log if e["type"] == "tool_result"]
    assert [result["ok"] for result in results] == [True, False, False]
    assert "tool_calls_per_turn" in json.dumps(results[2])
    assert server.api("usage_report", admin, session_id=session)["total"]["tool_calls"] == 1

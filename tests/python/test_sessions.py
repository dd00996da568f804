"""Sandboxed sessions: lifecycle, event log, restart, children."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import httpx
import pytest

import harness
from caller import call
from harness import LEGACY, MODERN, ToolFailed, processes_with, running, wait_until


def talk(server, token, project, agent, message="go", **more):
    return server.api("session_message", token, message=message, project_id=project, agent=agent, wait=True, **more)


def log_of(server, token, session_id):
    return server.api("session_events", token, session_id=session_id, max_events=1000)["events"]


def test_a_turn_is_told_in_order(server, admin, project):
    server.put_agent("hello", admin, [[{"say": "Hello "}, {"say": "there."}]])
    done = talk(server, admin, project, "hello")
    assert done["session_id"].startswith("gogol_") and done["turn"] == 1 and done["text"] == "Hello there."
    log = log_of(server, admin, done["session_id"])
    assert [e["index"] for e in log] == list(range(len(log)))
    types = [e["type"] for e in log if e["type"] != "delta"]
    assert types[0] == "status" and log[0]["status"] == "starting"
    assert types[-2:] == ["turn_completed", "status"] and log[-1]["status"] == "idle"
    messages = [(e["role"], e["text"]) for e in log if e["type"] == "message"]
    assert messages == [("user", "go"), ("assistant", "Hello there.")]
    assert "".join(e["text"] for e in log if e["type"] == "delta") == "Hello there."
    completed = next(e for e in log if e["type"] == "turn_completed")
    assert (completed["turn"], completed["stop_reason"], completed["text"]) == (1, "end_turn", "Hello there.")


def test_the_next_message_goes_on(server, admin, project):
    server.put_agent("two", admin, [[{"say": "one"}], [{"say": "two"}]])
    first = talk(server, admin, project, "two")
    second = server.api("session_message", admin, message="on", session_id=first["session_id"], wait=True)
    third = server.api("session_message", admin, message="on", session_id=first["session_id"], wait=True)
    assert [first["text"], second["text"], third["text"]] == ["one", "two", "two"]
    assert [first["turn"], second["turn"], third["turn"]] == [1, 2, 3]


def test_messages_to_a_busy_session_queue_in_order(server, admin, project):
    server.put_agent("busy", admin, [[{"sleep_ms": 300}, {"say": "1"}], [{"say": "2"}], [{"say": "3"}]])
    first = server.api("session_message", admin, message="a", project_id=project, agent="busy")
    id = first["session_id"]
    server.api("session_message", admin, message="b", session_id=id)
    last = server.api("session_message", admin, message="c", session_id=id, wait=True)
    assert last["turn"] == 3 and last["text"] == "3"
    log = log_of(server, admin, id)
    assert [e["text"] for e in log if e["type"] == "turn_completed"] == ["1", "2", "3"]
    assert [e["text"] for e in log if e["type"] == "message" and e["role"] == "user"] == ["a", "b", "c"]


def test_cancel_cancels_the_turn(server, admin, project):
    server.put_agent("long", admin, [[{"say": "start"}, {"sleep_ms": 600_000}], [{"say": "again"}]])
    started = server.api("session_message", admin, message="a", project_id=project, agent="long")
    with server.events(started["session_id"], admin) as events:
        events.until("delta")
        cancelled = server.api("session_cancel", admin, session_id=started["session_id"])
        assert cancelled["cancelled"] is True and cancelled["turn"] == 1
        assert events.until("turn_completed")["stop_reason"] == "cancelled"
        events.until("status", status="idle")
    again = server.api("session_message", admin, message="b", session_id=started["session_id"], wait=True)
    assert again["text"] == "again"
    assert server.api("session_cancel", admin, session_id=started["session_id"])["cancelled"] is False


def test_end_stops_at_once_and_frees_everything(server, admin, project):
    server.put_agent("long", admin, [[{"say": "start"}, {"sleep_ms": 600_000}]])
    started = server.api("session_message", admin, message="a", project_id=project, agent="long")
    id = started["session_id"]
    with server.events(id, admin) as events:
        events.until("delta")
        socket = server.api("session_get", admin, session_id=id)["relay_socket"]
        server.api("session_end", admin, session_id=id)
        events.until("status", status="ended")
    wait_until(lambda: not pathlib.Path(socket).exists(), "the socket to go")
    assert server.api("session_get", admin, session_id=id)["status"] == "ended"
    with pytest.raises(ToolFailed):
        server.api("session_message", admin, message="x", session_id=id)


def test_replay_then_live_without_gap_or_repeat(server, admin, project):
    server.put_agent("chatty", admin, [[step for i in range(50) for step in ({"say": f"{i} "}, {"sleep_ms": 2})]])
    started = server.api("session_message", admin, message="a", project_id=project, agent="chatty")
    with server.events(started["session_id"], admin) as events:
        events.until("status", status="idle")
        assert [e["index"] for e in events.seen] == list(range(len(events.seen)))
        assert events.ids == [str(e["index"]) for e in events.seen]
        middle = len(events.seen) // 2
    with server.events(started["session_id"], admin, since=middle) as events:
        assert events.next()["index"] == middle + 1


def test_last_event_id_resumes(server, admin, project):
    server.put_agent("hello", admin, [[{"say": "hi"}]])
    done = talk(server, admin, project, "hello")
    headers = {"Authorization": f"Bearer {admin}", "Last-Event-ID": "2"}
    with httpx.stream("GET", f"{server.url}/api/sessions/{done['session_id']}/events", headers=headers, timeout=harness.DEADLINE) as answer:
        first = next(line for line in answer.iter_lines() if line.startswith("id:"))
    assert first.split(":")[1].strip() == "3"


async def test_a_long_poll_returns_at_the_first_event(server, admin, project, mode):
    server.put_agent("hello", admin, [[{"say": "hi"}]])
    async with server.mcp(admin, mode) as mcp:
        started = await mcp.call("session_message", message="go", project_id=project, agent="hello")
        since, types = -1, []
        while "turn_completed" not in types:
            page = await mcp.call("session_events", session_id=started["session_id"], since_index=since, wait_ms=20_000)
            types += [e["type"] for e in page["events"]]
            since = page["last_index"]
        nothing = await mcp.call("session_events", session_id=started["session_id"], since_index=10_000)
        assert nothing["events"] == [] and nothing["last_index"] == 10_000


async def test_a_legacy_client_hears_its_sessions_on_the_get_stream(server, admin, project):
    import asyncio

    from caller import calling

    server.put_agent("hello", admin, [[{"say": "hi"}]])
    async with calling(server, admin, LEGACY) as caller:
        await caller.mcp.client.set_logging_level("error")
        await caller.start(project_id=project, agent="hello")
        await caller.until("turn_completed")
        assert not {"delta", "thought", "plan", "usage"} & {e["type"] for e in caller.events}


async def test_the_log_is_a_resource(server, admin, project, mode):
    server.put_agent("hello", admin, [[{"say": "hi"}]])
    done = talk(server, admin, project, "hello")
    async with server.mcp(admin, mode) as mcp:
        read = await mcp.client.read_resource(f"oubliette://sessions/{done['session_id']}/events")
        assert "turn_completed" in read.contents[0].text


def test_an_agent_that_cannot_start_is_a_failed_session_with_a_reason(server, admin, project):
    server.put_agent("absent", admin, runtime={"kind": "acp", "command": ["/no/such/agent"]})
    with pytest.raises(ToolFailed) as failed:
        talk(server, admin, project, "absent")
    assert failed.value.code == "unavailable"
    session = server.api("session_list", admin, project_id=project)["sessions"][0]
    assert session["status"] == "failed"
    log = log_of(server, admin, session["session_id"])
    assert any(e["type"] == "error" for e in log)


@pytest.mark.parametrize(
    "name, program",
    [
        ("dies", "echo oops >&2; exit 3"),
        ("rubbish", "yes rubbish"),
        ("mute", "exec sleep 600"),
        ("flood", "head -c 200000000 /dev/zero | tr '\\0' 'x'; sleep 600"),
    ],
)
def test_a_hostile_agent_never_hurts_the_server(name, program):
    # The start timeout applies only to the silent agent; it is long enough for the working agent after it on a busy
    # machine.
    with running("[session]\nstart_timeout = '10s'\n" if name == "mute" else "") as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent(name, admin, runtime={"kind": "acp", "command": ["/bin/sh", "-c", program]})
        with pytest.raises(ToolFailed) as failed:
            talk(server, admin, project, name)
        assert failed.value.code in ("unavailable", "timeout")
        if name == "dies":
            assert "oops" in failed.value.message
        server.put_agent("hello", admin, [[{"say": "hi"}]])
        assert talk(server, admin, project, "hello")["text"] == "hi"


# -- the sandbox, from an agent's side ---------------------------------------------------------------


def shell(server, admin, project, script):
    """The output of a shell script that runs in the agent's sandbox in place of an ACP agent."""
    server.put_tool("probe", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["sh"], "timeoutMs": 20000})
    server.put_agent("prober", admin, [[call("@probe/shell_exec", argv=["sh", "-c", script])]], tools={"use": ["probe"]})
    done = talk(server, admin, project, "prober")
    log = log_of(server, admin, done["session_id"])
    return json.dumps(next(e for e in log if e["type"] == "tool_result"))


def test_nothing_of_the_host_is_visible(server, admin, project):
    secret = server.home / "oubliette.db"
    out = shell(server, admin, project, f"id -u; ls {server.home} {pathlib.Path.home()} 2>&1; ls /proc | grep -c '^[0-9]'; cat {secret} 2>&1 | head -c 20")
    assert "No such file" in out and "SQLite" not in out
    out = shell(server, admin, project, "id -u; pwd; touch made; ls")
    assert "/workspace" in out and "made" in out and '"0\\n' not in out


def test_the_hosts_loopback_is_out_of_reach(server, admin, project):
    out = shell(server, admin, project, f"(exec 3<>/dev/tcp/127.0.0.1/{server.port}) 2>&1 && echo CONNECTED; true")
    out += shell(server, admin, project, f"timeout 5 bash -c 'exec 3<>/dev/tcp/127.0.0.1/{server.port} && echo CONN''ECTED' 2>&1; true")
    assert "CONNECTED" not in out.replace("CONN''ECTED", "")


# -- restart -----------------------------------------------------------------------------------------


def test_after_kill_9_everything_acknowledged_is_there_and_the_session_resumes():
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("long", admin, [[{"say": "working"}, {"sleep_ms": 600_000}], [{"say": "resumed"}]])
        started = server.api("session_message", admin, message="a", project_id=project, agent="long")
        id = started["session_id"]
        with server.events(id, admin) as events:
            events.until("delta")
            seen = list(events.seen)
        server.kill()
        wait_until(lambda: not processes_with(id), "the agent's processes to die with the server")
        server.start()
        log = log_of(server, admin, id)
        assert log[: len(seen)] == seen
        assert [e["index"] for e in log] == list(range(len(log)))
        last = [e for e in log if e["type"] == "status"][-1]
        assert last["status"] in ("idle", "failed") and "restart" in last["reason"]
        again = server.api("session_message", admin, message="b", session_id=id, wait=True)
        assert again["turn"] == 2 and again["text"] == "resumed"


def test_messages_that_were_accepted_run_after_kill_9():
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("long", admin, [[{"say": "working"}, {"sleep_ms": 600_000}], [{"say": "two"}], [{"say": "three"}]])
        id = server.api("session_message", admin, message="a", project_id=project, agent="long")["session_id"]
        with server.events(id, admin) as events:
            events.until("delta")
        for turn, message in ((2, "b"), (3, "c")):
            assert server.api("session_message", admin, message=message, session_id=id)["turn"] == turn
        server.kill()
        server.start()
        with server.events(id, admin) as events:
            events.until("turn_completed", turn=3)
            told = [e["text"] for e in events.seen if e["type"] == "message"]
        assert [text for text in told if text in "abc"] == ["a", "b", "c"]
        assert told[-1] == "three", "in order, and the one that was cut short is not run again"


# -- children ----------------------------------------------------------------------------------------


def test_an_agent_starts_a_child_and_ending_the_parent_ends_it(server, admin, project):
    server.put_agent("child", admin, [[{"say": "from the child"}]])
    server.put_agent("parent", admin, [[call("session_message", message="hi", agent="child", wait=True)]], children=["child"])
    done = talk(server, admin, project, "parent")
    log = log_of(server, admin, done["session_id"])
    result = next(e for e in log if e["type"] == "tool_result")
    assert result["ok"] and "from the child" in json.dumps(result)
    sessions = server.api("session_list", admin, project_id=project)["sessions"]
    child = next(s for s in sessions if s["agent"] == "child")
    assert child["parent_id"] == done["session_id"] and child["depth"] == 1
    tree = server.api("session_events", admin, session_id=done["session_id"], include_children=True)
    assert tree["children"][0]["session_id"] == child["session_id"]
    server.api("session_end", admin, session_id=done["session_id"])
    wait_until(lambda: server.api("session_get", admin, session_id=child["session_id"])["status"] == "ended", "the child to end")


def test_a_child_runs_only_agents_it_may(server, admin, project):
    server.put_agent("other", admin, [[{"say": "x"}]])
    server.put_agent("lonely", admin, [[call("session_message", message="hi", agent="other")]])
    done = talk(server, admin, project, "lonely")
    result = next(e for e in log_of(server, admin, done["session_id"]) if e["type"] == "tool_result")
    assert not result["ok"] and "not_allowed" in json.dumps(result)


def test_depth_is_limited(server, admin, project):
    server.put_agent("deep", admin, [[call("session_message", message="deeper", wait=True)]])
    done = talk(server, admin, project, "deep")
    sessions = server.api("session_list", admin, project_id=project)["sessions"]
    assert max(s["depth"] for s in sessions) == 3
    log = [e for s in sessions for e in log_of(server, admin, s["session_id"])]
    assert any("limit_exceeded" in json.dumps(e) for e in log if e["type"] == "tool_result")
    assert done["status"] == "idle"


def test_the_number_of_sessions_is_limited(server, admin):
    project = server.api("project_create", admin, name="few", limits={"max_sessions": 2})["project_id"]
    server.put_agent("hello", admin, [[{"say": "hi"}]])
    ids = [talk(server, admin, project, "hello")["session_id"] for _ in range(2)]
    with pytest.raises(ToolFailed) as failed:
        talk(server, admin, project, "hello")
    assert failed.value.code == "limit_exceeded"
    with pytest.raises(ToolFailed) as active:
        server.api("project_delete", admin, project_id=project)
    assert active.value.code == "conflict"
    server.api("session_end", admin, session_id=ids[0])
    talk(server, admin, project, "hello")


def test_run_streams_to_the_terminal(server, admin, project):
    server.put_agent("hello", admin, [[{"say": "hi from run"}, call("project_list")]])
    done = server.cli("run", "--agent", "hello", "--project", project, "go")
    assert "hi from run" in done.stdout and "project_list" in done.stdout + done.stderr

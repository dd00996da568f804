"""What sessions use, what it costs, and budgets that hold. The model is a fake; agents, sandboxes and forwarder are real."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import os
import signal
import threading
import time

import pytest

import harness
import opencode
from harness import ToolFailed, processes_with, running
from model_apis import CACHED, INPUT, OUTPUT, TEXT, ModelApis
from model_server import ModelServer

PRICES = """
[prices."anthropic/*"]
input = 1.0
output = 10.0
cached = 0.5
"""
# 60 fresh, 40 cached, 20 output.
COST = (60 * 1.0 + 40 * 0.5 + 20 * 10.0) / 1e6


def config(model: ModelApis, more: str = "") -> str:
    names = ["openai", "anthropic", "gemini", "local"]
    return "".join(f'[providers.{name}]\nbase_url = "http://127.0.0.1:{model.port}"\n' for name in names) + more


def say(server, token, project, agent, **more):
    return server.api("session_message", token, message="hi", project_id=project, agent=agent, wait=True, **more)


def turn_usage(server, token, session):
    log = server.api("session_events", token, session_id=session, max_events=1000)["events"]
    return [event["usage"] for event in log if event["type"] == "turn_completed"]


def model_requests(server, token, session):
    return server.api("debugger_events", token, session_id=session, kinds=["model_request"], max_events=1000)["events"]


def ended_turn(server, token, project, agent):
    """Starts a session and waits until its turn has ended, well or not; returns the session."""
    session = server.api("session_message", token, message="hi", project_id=project, agent=agent)["session_id"]
    with server.events(session, token) as events:
        while (event := events.next())["type"] != "status" or event["status"] not in ("idle", "failed"):
            pass
    return session


@pytest.fixture
def one_day():
    """Keeps a test of a day's budget off midnight, when the budget opens again."""
    now = datetime.datetime.now(datetime.timezone.utc)
    midnight = (now + datetime.timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    if midnight - now < datetime.timedelta(minutes=6):
        time.sleep((midnight - now).total_seconds() + 1)


def test_what_each_api_says_is_counted_and_what_has_a_price_costs():
    """The built-in agent, streamed, with each of the four APIs; then everything that reports it."""
    model = ModelApis()
    with running(config(model, PRICES)) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        before = server.api("usage_report", admin, project_id=project)
        assert before["rows"] == [] and before["total"]["requests"] == 0 and "cost_usd" not in before["total"]
        models = {"chat": "local/m", "responses": "openai/gpt-5-codex", "messages": "anthropic/m", "gemini": "gemini/m"}
        sessions = {}
        for api, name in models.items():
            server.put_agent(api, admin, name=api, prompt="p", model=name)
            sessions[api] = say(server, admin, project, api)["session_id"]
            [used] = turn_usage(server, admin, sessions[api])
            cost = {"cost_usd": COST} if api == "messages" else {}
            assert used == {"requests": 1, "input_tokens": INPUT, "output_tokens": OUTPUT, "cached_tokens": CACHED, "estimated": False, **cost}, api
            [request] = model_requests(server, admin, sessions[api])
            provider, model_name = name.split("/")
            assert (request["provider"], request["model"], request["status"]) == (provider, model_name, 200)
            assert {key: request[key] for key in used if key != "requests"} == {key: used[key] for key in used if key != "requests"}
            assert server.api("session_get", admin, session_id=sessions[api])["usage"] == used
        assert {path.rsplit("/", 1)[-1] for path in model.requests} == {"completions", "responses", "messages", "m:streamGenerateContent"}

        total = {"requests": 4, "input_tokens": 4 * INPUT, "output_tokens": 4 * OUTPUT, "cached_tokens": 4 * CACHED, "cost_usd": COST, "tool_calls": 0, "turns": 4, "estimated": False}
        for group, keys in {
            "project": {project},
            "session": set(sessions.values()),
            "agent": set(models),
            "model": set(models.values()),
        }.items():
            report = server.api("usage_report", admin, project_id=project, group_by=group)
            assert {row["key"] for row in report["rows"]} == keys and report["total"] == total, group
        [by_token] = server.api("usage_report", admin, group_by="token")["rows"]
        assert by_token["key"].startswith("tok_") and by_token["turns"] == 4
        days = server.api("usage_report", admin, group_by="day")["rows"]
        last = server.api("session_get", admin, session_id=sessions["gemini"])["updated_at"]
        # Two if midnight passed meanwhile.
        assert all(row["key"] <= last[:10] and len(row["key"]) == 10 for row in days) and sum(row["turns"] for row in days) == 4
        # From exactly one moment on, and before it.
        began = server.api("session_get", admin, session_id=sessions["messages"])["created_at"]
        after = server.api("usage_report", admin, group_by="agent", since=began)
        earlier = server.api("usage_report", admin, group_by="agent", until=began)
        assert {row["key"] for row in after["rows"]} == {"messages", "gemini"}
        assert {row["key"] for row in earlier["rows"]} == {"chat", "responses"}

        # Who may see what.
        other = server.api("project_create", admin, name="other")["project_id"]
        bound = server.token("read", project=other)
        assert server.api("usage_report", bound)["rows"] == []
        for arguments in ({"project_id": project}, {"session_id": sessions["chat"]}):
            with pytest.raises(ToolFailed, match="not_found"):
                server.api("usage_report", bound, **arguments)
        for arguments in ({"since": "yesterday"}, {"group_by": "moon"}):
            with pytest.raises(ToolFailed, match="invalid_argument"):
                server.api("usage_report", admin, **arguments)

        assert server.metric(admin, "oubliette_model_tokens_total", provider="anthropic", kind="cached") == CACHED
        assert server.metric(admin, "oubliette_model_requests_total", provider="gemini") == 1
        listed = server.cli("session", "list").stdout
        assert "TOKENS" in listed and str(INPUT + OUTPUT) in listed
        assert "anthropic/m" in server.cli("usage", "--by", "model").stdout

        # It is all there after a kill.
        server.kill()
        server.start()
        assert server.api("usage_report", admin, project_id=project, group_by="model")["total"] == total
        assert server.api("session_get", admin, session_id=sessions["messages"])["usage"]["cost_usd"] == COST
    model.close()


@pytest.mark.parametrize("style", ["silent", "bad"])
def test_where_an_answer_says_nothing_or_nonsense_it_is_estimated(style):
    model = ModelApis(style)
    with running(config(model)) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        for name in ("local/m", "anthropic/m", "gemini/m"):
            slug = name.split("/")[0]
            server.put_agent(slug, admin, name=slug, prompt="p", model=name)
            # An agent may take offence at counts that cannot be; what it used counts all the same.
            asked = model_requests(server, admin, ended_turn(server, admin, project, slug))
            assert asked
            for used in asked:
                assert used["estimated"] and used["output_tokens"] == len(TEXT) // 4 and used["input_tokens"] > 5, (name, used)
    model.close()


@pytest.mark.parametrize("name", ["anthropic/m", "gemini/m"])
def test_a_stream_that_breaks_off_is_counted_for_each_attempt_and_no_more(name):
    """Cut after its text: the agent has shown it and does not ask again, or asks again; each request is counted once."""
    model = ModelApis("cut")
    with running(config(model)) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("a", admin, name="a", prompt="p", model=name)
        session = ended_turn(server, admin, project, "a")
        asked = model_requests(server, admin, session)
        assert len(asked) == len(model.requests) >= 1
        for request in asked:
            assert request["estimated"] and request["input_tokens"] == INPUT and request["output_tokens"] == len(TEXT) // 4
        used = server.api("session_get", admin, session_id=session)["usage"]
        assert (used["requests"], used["input_tokens"]) == (len(asked), INPUT * len(asked))
    model.close()


def test_twenty_sessions_overshoot_a_budget_by_the_requests_under_way_and_no_more(one_day):
    model = ModelApis()
    # Twenty agents that start at once on a busy machine take their time.
    with running(config(model, '[session]\nstart_timeout = "10m"\n')) as server:
        admin, write = server.token("admin"), server.token("write")
        project = server.api("project_create", write, name="p")["project_id"]
        server.put_agent("a", admin, name="a", prompt="p", model="local/m")
        # Something was used before: a request uses 120. Of the budget the last thousand is left.
        say(server, admin, project, "a")
        server.api("project_update", write, project_id=project, limits={"tokens_per_day": 1120})
        model.gate = threading.Event()
        sessions = [server.api("session_message", admin, message="hi", project_id=project, agent="a")["session_id"] for _ in range(20)]
        for _ in sessions:
            assert model.waiting.acquire(timeout=harness.DEADLINE)
        model.gate.set()
        for session in sessions:
            with server.events(session, admin) as events:
                events.until("turn_completed")
        total = server.api("usage_report", admin, project_id=project)["total"]
        assert total["requests"] == 21 and total["input_tokens"] + total["output_tokens"] == 21 * (INPUT + OUTPUT)

        def refused(session):
            with pytest.raises(ToolFailed) as failed:
                server.api("session_message", admin, message="more", session_id=session, wait=True)
            assert failed.value.code == "limit_exceeded"
            log = server.api("session_events", admin, session_id=session, max_events=1000)["events"]
            error = next(event for event in log if event["type"] == "error")
            assert error["code"] == "limit_exceeded"
            for part in ("tokens_per_day", project, "2520 of 1120", "opens again at", "T00:00:00Z"):
                assert part in error["message"], error

        refused(sessions[0])
        assert len(model.requests) == 21
        assert [r["status"] for r in model_requests(server, admin, sessions[0])] == [200, 429]
        # Only models are refused; and a kill does not open it.
        server.kill()
        server.start()
        refused(sessions[1])
        assert len(model.requests) == 21
        # An admin raises it; a write token cannot, nor remove it.
        for limits in ({"tokens_per_day": 5000}, {"tokens_per_day": None}):
            with pytest.raises(ToolFailed, match="permission_denied"):
                server.api("project_update", write, project_id=project, limits=limits)
        assert server.api("project_update", admin, project_id=project, limits={"tokens_per_day": 5000})["limits"] == {"tokens_per_day": 5000}
        server.api("session_message", admin, message="more", session_id=sessions[2], wait=True)
        assert len(model.requests) == 22
        # The last thousand again, and all twenty ask as fast as they can, as often as they may: after the ninth request
        # nothing is left, and only what was under way by then is still answered: one request of each.
        server.api("project_update", admin, project_id=project, limits={"tokens_per_day": 22 * (INPUT + OUTPUT) + 1000})

        def ask_until_refused(session):
            with pytest.raises(ToolFailed) as failed:
                while True:
                    server.api("session_message", admin, message="more", session_id=session, wait=True)
            return failed.value.code

        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            assert set(threads.map(ask_until_refused, sessions)) == {"limit_exceeded"}
        asked = len(model.requests) - 22
        assert 9 <= asked <= 8 + len(sessions), asked
        assert server.api("usage_report", admin, project_id=project)["total"]["requests"] == 22 + asked
        server.api("project_update", write, project_id=project, limits={"tokens_per_day": 10})
        refused_again = server.api("project_update", admin, project_id=project, limits={"tokens_per_day": None})
        assert refused_again["limits"] == {}
        for bad in ({"tokens_per_day": -1}, {"cost_usd_per_day": -0.1}, {"cost_usd_per_day": 1e300}, {"tokens_per_day": "1"}):
            with pytest.raises(ToolFailed, match="invalid_argument"):
                server.api("project_update", admin, project_id=project, limits=bad)
    model.close()


def test_a_cost_budget_of_the_server_holds_beside_a_projects(one_day):
    model = ModelApis()
    more = PRICES + f"[budget]\ncost_usd_per_day = {COST * 1.5}\n"
    with running(config(model, more)) as server:
        admin = server.token("admin")
        projects = [server.api("project_create", admin, name=name)["project_id"] for name in "pq"]
        server.put_agent("a", admin, name="a", prompt="p", model="anthropic/m")
        server.put_agent("free", admin, name="free", prompt="p", model="local/m")
        for project in projects:
            say(server, admin, project, "a")
        with pytest.raises(ToolFailed) as failed:
            say(server, admin, projects[0], "a")
        assert failed.value.code == "limit_exceeded" and "cost_usd_per_day" in failed.value.message
        # It is the whole server's: what has no price is refused too.
        with pytest.raises(ToolFailed, match="limit_exceeded"):
            say(server, admin, projects[0], "free")
        assert len(model.requests) == 2
    model.close()


def test_a_turn_has_so_many_tool_calls_and_the_next_one_again():
    calls = [{"call": {"tool": "project_list", "arguments": {}}} for _ in range(3)]
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p", limits={"tool_calls_per_turn": 2})["project_id"]
        server.put_agent("a", admin, [calls], name="a", prompt="p")
        session = say(server, admin, project, "a")["session_id"]
        server.api("session_message", admin, message="again", session_id=session, wait=True)
        log = server.api("session_events", admin, session_id=session, max_events=1000)["events"]
        results = [event for event in log if event["type"] == "tool_result"]
        assert [result["ok"] for result in results] == [True, True, False, True, True, False]
        assert "limit_exceeded" in json.dumps(results[2]) or "tool_calls_per_turn" in json.dumps(results[2])
        blocked = server.api("debugger_events", admin, session_id=session, kinds=["tool_blocked"])["events"]
        assert len(blocked) == 2 and "tool_calls_per_turn" in blocked[0]["reason"]
        errors = [event for event in log if event["type"] == "error"]
        assert all(e["code"] == "limit_exceeded" and "2 calls" in e["message"] and "next turn" in e["message"] for e in errors)
        # Each is said before its turn ends.
        assert [e["type"] for e in log if e["type"] in ("error", "turn_completed")] == ["error", "turn_completed"] * 2
        # From outside they are not the agent's.
        server.api("tool_call", admin, session_id=session, tool="project_list", arguments={})
        total = server.api("usage_report", admin, session_id=session)["total"]
        assert (total["tool_calls"], total["turns"], total["requests"]) == (5, 2, 0)


def test_by_model_rows_have_the_turns_and_tool_calls_of_each_model():
    """Two agents with two models of one provider; a third has none. The total has everything once."""
    model = ModelServer([("project_list", {}), ("project_list", {})])
    provider = f'[providers.local]\nbase_url = "http://127.0.0.1:{model.port}"\n'
    with running(provider) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        for slug in ("one", "two"):
            server.put_agent(slug, admin, name=slug, prompt="p", model=f"local/{slug}")
        server.put_agent("none", admin, [[{"call": {"tool": "project_list", "arguments": {}}}]], name="none", prompt="p")
        session = say(server, admin, project, "one")["session_id"]
        say(server, admin, project, "two")
        say(server, admin, project, "none")
        server.api("tool_call", admin, session_id=session, tool="project_list", arguments={})
        report = server.api("usage_report", admin, project_id=project, group_by="model")
        rows = {row["key"]: (row["requests"], row["tool_calls"], row["turns"]) for row in report["rows"]}
        assert rows == {"local/one": (3, 2, 1), "local/two": (3, 2, 1)}
        total = report["total"]
        assert (total["requests"], total["tool_calls"], total["turns"]) == (6, 6, 3)
        for group in ("project", "session", "agent", "token", "day"):
            by_group = server.api("usage_report", admin, project_id=project, group_by=group)
            assert by_group["total"] == total, group
            for field in ("requests", "tool_calls", "turns", "input_tokens", "output_tokens"):
                assert sum(row[field] for row in by_group["rows"]) == total[field], (group, field)
    model.close()


def test_a_session_below_another_project_spends_the_budget_above(one_day):
    """An agent that makes a project of its own and starts a session there does not get a new budget with it."""
    model = ModelApis()
    with running(config(model)) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p", api_key={"scope": "write"}, limits={"tokens_per_day": 100})["project_id"]
        server.put_agent("worker", admin, name="w", prompt="p", model="local/m")
        turns = [[{"call": {"tool": "oubliette_session_message", "arguments": {"message": "hi", "agent": "worker", "project_id": "PROJECT", "wait": True}}}]]
        elsewhere = server.api("project_create", admin, name="q")["project_id"]
        turns[0][0]["call"]["arguments"]["project_id"] = elsewhere
        # The key of a session is bound to its project: an unbound one stands for what an operator may give an agent.
        unbound = server.token("write")
        server.api("project_update", admin, project_id=project, api_key=None, env={"OUBLIETTE_API_KEY": unbound})
        server.put_agent("boss", admin, turns, name="b", prompt="p", children=["worker"])
        say(server, admin, project, "boss")
        assert len(model.requests) == 1
        assert server.api("usage_report", admin, project_id=elsewhere)["total"]["requests"] == 1
        say(server, admin, project, "boss")
        assert len(model.requests) == 1, "the budget of the project above is used up"
    model.close()


def test_a_session_does_not_delete_the_project_above_with_its_budget():
    """The session above has failed, so its project could be deleted; the one below in another project may not do that."""
    mark = f"OUBLIETTE_TEST_MARK_{os.getpid()}"
    with running() as server:
        admin = server.token("admin")
        key = {"OUBLIETTE_API_KEY": server.token("write")}
        above = server.api("project_create", admin, name="p", env=key, limits={"tokens_per_day": 100})["project_id"]
        below = server.api("project_create", admin, name="q", env=key)["project_id"]
        delete = [{"call": {"tool": "oubliette_project_delete", "arguments": {"project_id": above}}}]
        server.put_agent("worker", admin, [delete], tools={"ask": ["oubliette_project_delete"]})
        message = {"message": "hi", "agent": "worker", "project_id": below}
        steps = [{"call": {"tool": "oubliette_session_message", "arguments": message}}, {"call": {"tool": "project_list", "arguments": {}}}]
        server.put_agent("boss", admin, [steps], children=["worker"], env={mark: "1"}, tools={"ask": ["project_list"]})
        boss = server.api("session_message", admin, message="hi", project_id=above, agent="boss")["session_id"]
        with server.events(boss, admin) as events:
            events.until("approval_requested", tool="project_list")
            for process in processes_with(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            events.until("status", status="failed")
        [worker] = server.api("session_list", admin, project_id=below)["sessions"]
        with server.events(worker["session_id"], admin) as events:
            id = events.until("approval_requested")["approval_id"]
            server.api("approval_decide", admin, approval_id=id, decision="allow")
            result = events.until("tool_result")
            assert result["ok"] is False and "budgets" in json.dumps(result), result
        assert server.api("project_get", admin, project_id=above)["limits"] == {"tokens_per_day": 100}


def test_opencode_is_told_and_does_not_ask_for_ever(one_day):
    model = ModelServer([])
    with running(opencode.config(model), {"SCRIPTED_MODEL_KEY": "sk-x"}) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.api("agent_put", admin, slug="opencode", definition=opencode.definition())
        first = say(server, admin, project, "opencode")
        [used] = turn_usage(server, admin, first["session_id"])
        assert used["requests"] >= 1 and used["input_tokens"] >= 7 and not used["estimated"]
        server.api("project_update", admin, project_id=project, limits={"tokens_per_day": 1})
        # It asks again and again; the server ends that.
        with pytest.raises(ToolFailed) as failed:
            server.api("session_message", admin, message="more", session_id=first["session_id"], wait=True)
        assert failed.value.code == "limit_exceeded" and "tokens_per_day" in failed.value.message
        statuses = [r["status"] for r in model_requests(server, admin, first["session_id"])]
        assert statuses.count(429) >= 1
        log = server.api("session_events", admin, session_id=first["session_id"], max_events=1000)["events"]
        assert [e["code"] for e in log if e["type"] == "error"][0] == "limit_exceeded"
    model.close()

"""What SIGHUP puts into force while the server serves: nothing is dropped, and what is open stays."""

from __future__ import annotations

import json
import signal
import threading

import pytest

from attack_support import TRUST, Attacker
from egress_support import ASK_PROXY, SAY, WebServer
from harness import ToolFailed, get, running, wait_until
from model_apis import TEXT, ModelApis
from test_webhooks import SECRET, Receiver

TURNS = [[{"say": "done"}]]


def reload(server, config: str, said: str = "read again") -> None:
    """Writes the configuration, sends SIGHUP and waits for the outcome in the log."""
    (server.home / "oubliette.toml").write_text(config)
    before = server.log().count(said)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: server.log().count(said) > before, f"{said!r} in the log")


def say(server, token, project, agent, **more):
    return server.api("session_message", token, message="hi", project_id=project, agent=agent, wait=True, **more)


def test_a_reload_adds_a_provider_and_its_price():
    model = ModelApis()
    provider = f'[providers.anthropic]\nbase_url = "http://127.0.0.1:{model.port}"\n'
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("asker", admin, model="anthropic/m")
        with pytest.raises(ToolFailed, match="not configured"):
            say(server, admin, project, "asker")
        reload(server, provider)
        first = say(server, admin, project, "asker")
        assert TEXT in first["text"]
        assert "cost_usd" not in server.api("session_get", admin, session_id=first["session_id"])["usage"]
        assert any(check["name"] == "provider anthropic" for check in server.api("doctor", admin)["checks"])
        reload(server, provider + '[prices."anthropic/*"]\ninput = 1\noutput = 1\n')
        second = say(server, admin, project, "asker")
        assert server.api("session_get", admin, session_id=second["session_id"])["usage"]["cost_usd"] > 0
        # A budget that is used up already, then none again, for a session that runs.
        reload(server, provider + "[budget]\ntokens_per_day = 1\n")
        with pytest.raises(ToolFailed):
            say(server, admin, project, "asker")
        reload(server, provider)
        say(server, admin, project, "asker")


def test_a_reload_changes_hosts_rates_limits_and_the_log():
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("quick", admin, TURNS)
        health = lambda: get(f"{server.url}/api/openapi.json", headers={"Host": "other.example"}).status_code
        assert health() == 403 and "DEBUG" not in server.log()
        reload(server, '[server]\nallowed_hosts = ["other.example"]\n[session]\nmax_sessions = 1\n[log]\nlevel = "debug"\n')
        assert health() == 200
        assert server.api("server_info", admin)["limits"]["max_sessions"] == 1
        say(server, admin, project, "quick")
        with pytest.raises(ToolFailed, match="limit_exceeded"):
            say(server, admin, project, "quick")
        assert "DEBUG" in server.log()
        reload(server, "[server]\nrate_limit = { per_second = 1, burst = 2 }\n")
        assert health() == 403
        say(server, admin, project, "quick")
        with pytest.raises(ToolFailed) as error:
            for _ in range(10):
                server.api("project_list", admin)
        assert error.value.status == 429
        assert "DEBUG" not in server.log().split("configuration and certificates read again")[2]


def test_a_reload_opens_and_closes_what_the_proxy_reaches():
    with WebServer() as web, running(TRUST) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        opened = f'{TRUST}[egress]\nallow = ["127.0.0.1:{web.port}"]\n'
        with Attacker(server, admin, project, "asker", sandbox={"network": "proxy"}) as agent:
            status = lambda: json.loads(agent.run(ASK_PROXY + SAY, hosts=[f"127.0.0.1:{web.port}"]))[0][0]
            assert status() == 403
            reload(server, opened)
            assert status() == 200
            reload(server, TRUST)
            assert status() == 403


def test_a_reload_begins_and_ends_webhooks():
    receiver = Receiver()
    hook = f'[[webhook]]\nurl = "http://127.0.0.1:{receiver.port}/hook"\nevents = ["turn_completed"]\nsecret_env = "HOOK_SECRET"\n'
    with running(env={"HOOK_SECRET": SECRET}) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("quick", admin, TURNS)
        say(server, admin, project, "quick")
        reload(server, hook)
        session = say(server, admin, project, "quick")["session_id"]
        wait_until(lambda: receiver.taken, "the event")
        assert session in receiver.taken[0][1].decode() and len(receiver.taken) == 1
        reload(server, "")
        say(server, admin, project, "quick")
        assert not [check for check in server.api("doctor", admin)["checks"] if check["name"].startswith("webhook")]
        assert len(receiver.taken) == 1


def test_reloads_under_load_drop_no_request_and_no_turn():
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("quick", admin, TURNS)
        failures, answered, stop = [], [0], threading.Event()

        def load(work):
            while not stop.is_set():
                try:
                    work()
                    answered[0] += 1
                except Exception as error:
                    failures.append(error)

        session = say(server, admin, project, "quick")["session_id"]
        works = [
            lambda: server.api("project_list", admin),
            lambda: server.api("session_message", admin, session_id=session, message="more", wait=True),
            lambda: get(f"{server.url}/health").raise_for_status(),
        ]
        threads = [threading.Thread(target=load, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for round in range(10):
            reload(server, f"[session]\nmax_sessions = {10 + round}\n[prices.\"a/b\"]\ninput = {round}\noutput = 1\n")
        # Broken in each of the ways that are found late: nothing of it may be in force.
        for broken in ("x", '[egress]\nallow = ["1.2.3.4/99"]\n', '[providers.a]\nbase_url = "ftp://x"\n'):
            reload(server, "[session]\nmax_sessions = 1\n" + broken, "the old one stays in use")
            assert server.api("server_info", admin)["limits"]["max_sessions"] == 19
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures and answered[0] > 5, failures[:3]

"""What holds for all servers of a cluster together: budgets, rates, webhooks, retention, tokens."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import pathlib
import subprocess
import time
from collections.abc import Iterator

import pytest

import stores
from cluster_support import Servers, cluster
from fault_history import Connection
from harness import ToolFailed, wait_until
from model_apis import INPUT, OUTPUT, ModelApis
from test_webhooks import EVENTS, SECRET, Receiver
from test_webhooks import config as webhook_config

pytestmark = pytest.mark.skipif(not stores.ON_POSTGRES, reason="several servers share a PostgreSQL database")

WORKSPACES = "[workspaces]\ndir = 'ROOT/projects'\n"
FAKETIME = next(pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@pytest.fixture
def one_day():
    """Keeps a test of a day's budget off midnight, when the budget opens again."""
    now = datetime.datetime.now(datetime.timezone.utc)
    midnight = (now + datetime.timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    if midnight - now < datetime.timedelta(minutes=6):
        time.sleep((midnight - now).total_seconds() + 1)


def say(server, token, project, **more):
    return server.api("session_message", token, message="hi", project_id=project, agent="a", wait=True, **more)


def refuses(server, token, session) -> str | None:
    """Why another turn of a session is refused; none if it is not."""
    try:
        server.api("session_message", token, message="more", session_id=session, wait=True)
    except ToolFailed as error:
        assert error.code == "limit_exceeded", error
        return error.message
    return None


def sql(servers: Servers, text: str) -> str:
    schema = servers[0].env["OUBLIETTE_STORE_URL"].rpartition("=")[2]
    return stores.execute(text.replace("SCHEMA", schema))


def owner_address(servers: Servers, session: str) -> str:
    """Where the server is that runs a session."""
    join = "SELECT s.address FROM SCHEMA.session_owners o JOIN SCHEMA.servers s USING (server_id)"
    return sql(servers, f"{join} WHERE o.root_id = '{session}'")


# -- budgets -----------------------------------------------------------------------------------------


def providers(model: ModelApis) -> str:
    return f'{WORKSPACES}[providers.local]\nbase_url = "http://127.0.0.1:{model.port}"\n'


@pytest.mark.parametrize("of", ["project", "server"])
def test_a_budget_is_spent_by_all_servers_together(one_day, of):
    """Each server spends a third of a day's budget, which none of them would refuse by itself."""
    model, tokens = ModelApis(), 3 * (INPUT + OUTPUT)
    whole = f"[budget]\ntokens_per_day = {tokens}\n" if of == "server" else ""
    with cluster(3, providers(model) + whole) as servers:
        admin = servers[0].token("admin")
        limits = {"tokens_per_day": tokens} if of == "project" else {}
        project = servers[0].api("project_create", admin, name="p", limits=limits)["project_id"]
        servers.put_agent("a", admin, model="local/m")
        sessions = [say(server, admin, project)["session_id"] for server in servers]
        assert [owner_address(servers, session) for session in sessions] == [server.url for server in servers]
        assert len(model.requests) == 3
        # What the others have spent is known within a second.
        for server, session in zip(servers, sessions):
            why = wait_until(lambda: refuses(server, admin, session), "the budget to be spent")
            assert "tokens_per_day" in why and "opens again at" in why, why
        asked = len(model.requests)
        for server, session in zip(servers, sessions):
            assert refuses(server, admin, session)
        assert len(model.requests) == asked
        used = [server.api("usage_report", admin, project_id=project)["total"] for server in servers]
        assert [total["requests"] for total in used] == [asked] * 3
    model.close()


# -- rates -------------------------------------------------------------------------------------------


def allowed_of(server, token: str, count: int) -> int:
    """How many of so many requests, made as fast as possible, are within the token's rate."""
    connection = Connection(server.port, token)
    statuses = [connection.request("POST", "/api/tools/project_list", b"{}")[0] for _ in range(count)]
    assert set(statuses) <= {200, 429}
    return statuses.count(200)


def test_a_tokens_rate_is_that_of_all_servers_together():
    """A token asks all servers at once: together they allow its burst, and not one burst each."""
    burst = 90
    with cluster(3, f"[server]\nrate_limit = {{ per_second = 1, burst = {burst} }}\n") as servers:
        # Servers count each other every few seconds; that they have is seen by tokens of their own.
        for server in servers:
            shares = lambda: allowed_of(server, servers[0].token("read"), burst - 20) < burst - 20
            wait_until(shares, "the servers to share the rate")
        token = servers[0].token("read")
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            allowed = sum(threads.map(lambda server: allowed_of(server, token, burst), servers))
        # Meanwhile each server lets one in every second.
        gained = 3 * (time.monotonic() - began + 1)
        assert burst <= allowed <= burst + gained


# -- webhooks ----------------------------------------------------------------------------------------


def sent_events(servers: Servers, admin: str, sessions: list[str]) -> list[dict]:
    logs = [servers[2].api("session_events", admin, session_id=id, max_events=1000)["events"] for id in sessions]
    return [event for log in logs for event in log if event["type"] in EVENTS]


def test_each_event_is_sent_to_a_webhook_once_by_one_server(monkeypatch):
    """All servers have the webhook, and sessions run on all; when the server that sends is killed another goes on."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    receiver = Receiver()
    with cluster(3, WORKSPACES + webhook_config(f"http://127.0.0.1:{receiver.port}/hook")) as servers:
        admin = servers[0].token("admin")
        project = servers[0].api("project_create", admin, name="p")["project_id"]
        servers.put_agent("a", admin, [[{"say": "hello"}]])
        sessions = [say(server, admin, project)["session_id"] for server in servers for _ in range(2)]
        for session in sessions:
            servers[0].api("session_message", admin, message="more", session_id=session, wait=True)

        def arrived() -> bool:
            return len(receiver.taken) >= len(sent_events(servers, admin, sessions))

        wait_until(arrived, "all events to arrive")
        wait_until(lambda: sql(servers, "SELECT COUNT(*) FROM SCHEMA.webhook_outbox") == "0", "the outbox to be empty")
        for session in sessions:
            got = [event for event in receiver.events() if event["session_id"] == session]
            assert got == sent_events(servers, admin, [session]), "each once, in order"
        sender = duty_of(servers)
        sender.kill()
        others = [server for server in servers if server is not sender]
        rest = [id for id in sessions if owner_address(servers, id) != sender.url]
        for session in rest:
            others[0].api("session_message", admin, message="again", session_id=session, wait=True)
        expected = [e for id in rest for e in log_of(others[0], admin, id)]
        wait_until(lambda: all(event in receiver.events() for event in expected), "another server to send")
        for session in rest:
            got = [event for event in receiver.events() if event["session_id"] == session]
            assert got == log_of(others[0], admin, session), "each once, in order"
    receiver.close()


def log_of(server, admin: str, session: str) -> list[dict]:
    log = server.api("session_events", admin, session_id=session, max_events=1000)["events"]
    return [event for event in log if event["type"] in EVENTS]


def duty_of(servers: Servers):
    """The server that does what one does for all: it holds the lock of it."""
    locked = (
        "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory'"
        " AND l.granted AND l.classid = 2835 AND l.objid::bigint = (hashtext('SCHEMA')::bigint & 4294967295)"
    )
    name = wait_until(lambda: sql(servers, locked), "a server to have the duty")
    address = sql(servers, f"SELECT address FROM SCHEMA.servers WHERE '{name}' LIKE '%' || server_id")
    return next(server for server in servers if server.url == address)


@pytest.mark.skipif(not FAKETIME, reason="needs faketime")
def test_webhooks_are_sent_in_time_by_a_server_whose_clock_is_an_hour_behind(monkeypatch):
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    receiver = Receiver()
    with cluster(2, WORKSPACES + webhook_config(f"http://127.0.0.1:{receiver.port}/hook"), start=False) as servers:
        late, right = servers
        late.env |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "-1h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        late.start()
        assert duty_of(servers) is late
        right.start()
        admin = right.token("admin")
        project = right.api("project_create", admin, name="p")["project_id"]
        servers.put_agent("a", admin, [[{"say": "hello"}]])
        sessions = [say(server, admin, project)["session_id"] for server in servers]
        expected = [event for id in sessions for event in log_of(right, admin, id)]
        wait_until(lambda: len(receiver.taken) >= len(expected), "the events to arrive", 60)
        assert duty_of(servers) is late
    receiver.close()


# -- retention ---------------------------------------------------------------------------------------


def test_old_sessions_of_all_servers_are_deleted_by_one():
    day = 24 * 3600 * 1000
    with cluster(3, f"{WORKSPACES}[retention]\nsessions = '30d'\n") as servers:
        admin = servers[0].token("admin")
        project = servers[0].api("project_create", admin, name="p")["project_id"]
        servers.put_agent("a", admin, [[{"say": "hello"}]])
        old, young, active = ([say(server, admin, project)["session_id"] for server in servers] for _ in range(3))
        for session in old + young:
            servers[0].api("session_end", admin, session_id=session)
        ids = ", ".join(f"'{session}'" for session in old + active)
        sql(servers, f"UPDATE SCHEMA.sessions SET updated_at = updated_at - {31 * day} WHERE session_id IN ({ids})")
        # It is done when a server gets the duty, and every minute.
        sender = duty_of(servers)
        sender.stop()
        left = [server for server in servers if server is not sender]

        def listed(server) -> set[str]:
            return {row["session_id"] for row in server.api("session_list", admin, project_id=project)["sessions"]}

        for server in left:
            wait_until(lambda: not listed(server) & set(old), "old sessions to be deleted")
            # One that is active stays however long nothing has happened in it.
            assert listed(server) == set(young + active)
        log = "".join(server.log() for server in left)
        assert "deleting" not in log or "failed" not in log, log
        for session in active:
            assert left[0].api("session_message", admin, message="x", session_id=session, wait=True)["text"] == "hello"


# -- sessions ----------------------------------------------------------------------------------------


def test_a_session_whose_first_message_is_not_accepted_ends():
    """The database takes the new session and not its message: the client is told, and nothing stays active for ever."""
    with cluster(2, WORKSPACES) as servers:
        admin = servers[0].token("admin")
        project = servers[0].api("project_create", admin, name="p", limits={"max_sessions": 1})["project_id"]
        servers.put_agent("a", admin, [[{"say": "hello"}]])
        with locked_table(servers, "queue"):
            with pytest.raises(ToolFailed) as refused:
                say(servers[0], admin, project)
            assert refused.value.code == "unavailable"

        def statuses() -> list[str]:
            return [row["status"] for row in servers[1].api("session_list", admin, project_id=project)["sessions"]]

        wait_until(lambda: statuses() == ["ended"], "the session to end")
        assert say(servers[1], admin, project)["text"] == "hello"


@contextlib.contextmanager
def locked_table(servers: Servers, name: str) -> Iterator[None]:
    """Nothing is read from a table or written to it meanwhile."""
    command = ["psql", "-h", stores.socket_dir(), "-U", "oubliette", "-d", "postgres", "-AtqX"]
    psql = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    schema = servers[0].env["OUBLIETTE_STORE_URL"].rpartition("=")[2]
    psql.stdin.write(f"BEGIN; LOCK TABLE {schema}.{name}; SELECT 'locked';\n")
    psql.stdin.flush()
    assert psql.stdout.readline().strip() == "locked"
    try:
        yield
    finally:
        psql.stdin.close()
        psql.wait()


# -- tokens ------------------------------------------------------------------------------------------


def test_a_token_revoked_anywhere_is_refused_everywhere_at_once():
    """By the first request that is sent after the answer, at each server, over a connection that was used before."""
    with cluster(3) as servers:
        admin = servers[0].token("admin")
        for revoker in servers:
            made = servers[0].cli_json("token", "create", "--name", "t", "--scope", "read")
            for server in servers:
                assert "projects" in server.api("project_list", made["token"])
            revoker.api("token_revoke", admin, token_id=made["token_id"])
            for server in servers:
                with pytest.raises(ToolFailed) as refused:
                    server.api("project_list", made["token"])
                assert refused.value.status == 401

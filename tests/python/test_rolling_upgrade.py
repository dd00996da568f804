"""Old and new servers side by side: a server works on tables that a newer version has added to, and is refused where it cannot.

With `OUBLIETTE_OLDER_PROGRAMS`, a folder with the programs of an older version, servers of that version really run beside those
that are tested.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
import subprocess
import tempfile

import pytest

import harness
import stores
from caller import call, lend
from cluster_support import Member, cluster
from harness import DEADLINE, Server, ToolFailed, running, wait_until

OLDER = os.environ.get("OUBLIETTE_OLDER_PROGRAMS")
TABLES = ("sessions", "projects", "workspaces", "tokens", "approvals", "audit", "events", "queue", "definitions", "usage")
ASK = "myapp_ask"
TURNS = [[{"say": f"turn {number}"}] for number in range(1, 9)]
CONFIG = "[workspaces]\ndir = 'ROOT/projects'\n"
ON_POSTGRES = pytest.mark.skipif(not stores.ON_POSTGRES, reason="several servers share a PostgreSQL database")
WITH_OLDER = pytest.mark.skipif(
    not stores.ON_POSTGRES or not OLDER,
    reason="runs on PostgreSQL, with the programs of an older version in the folder that OUBLIETTE_OLDER_PROGRAMS names",
)


def newer_migration() -> str:
    """What a version to come might do to the tables: columns that nobody has to write, and a table."""
    no_bytes = "''" if stores.ON_POSTGRES else "x''"
    sql = [f"ALTER TABLE {table} ADD COLUMN of_tomorrow TEXT" for table in TABLES]
    sql += [f"ALTER TABLE {table} ADD COLUMN with_default BIGINT NOT NULL DEFAULT 7" for table in TABLES]
    sql += ["CREATE TABLE of_tomorrow (id TEXT NOT NULL PRIMARY KEY)", "INSERT INTO of_tomorrow (id) VALUES ('a')"]
    columns = "version, description, success, checksum, execution_time"
    sql += [f"INSERT INTO _sqlx_migrations ({columns}) VALUES (9000, 'of tomorrow', true, {no_bytes}, 0)"]
    return ";\n".join(sql)


def execute(home: pathlib.Path, sql: str) -> str:
    """Runs statements in the database of a home."""
    if stores.ON_POSTGRES:
        schema = stores.url(home).rpartition("=")[2]
        return stores.execute(f"SET search_path = {schema}; {sql}")
    with contextlib.closing(sqlite3.connect(home / "oubliette.db")) as db:
        rows = [db.execute(statement).fetchall() for statement in sql.split(";")]
        db.commit()
        return "\n".join("|".join(str(value) for value in row) for row in rows[-1])


def refused_start(server: Server) -> str:
    command = [server.programs / "oubliette", "--home", server.home, "serve", "--listen", f"127.0.0.1:{server.port}"]
    env = {**os.environ, **stores.env(server.home), **server.env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=env)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_a_server_works_on_tables_that_a_newer_version_has_added_to():
    with running() as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("talks", admin, TURNS)
        first = server.api("session_message", admin, message="a", project_id=project, agent="talks", wait=True)
        assert server.stop() == 0
        execute(server.home, newer_migration())
        server.start()
        again = server.api("session_message", admin, session_id=first["session_id"], message="b", wait=True)
        assert again["text"] == "turn 2"
        second = server.api("session_message", admin, message="c", project_id=project, agent="talks", wait=True)
        assert second["text"] == "turn 1"
        server.token("read")
        assert {row["session_id"] for row in server.api("session_list", admin)["sessions"]} == {
            first["session_id"],
            second["session_id"],
        }
        log = server.api("session_events", admin, session_id=first["session_id"], max_events=1000)["events"]
        assert [event["index"] for event in log] == list(range(len(log)))
        assert server.api("audit_list", admin)["entries"]
        assert execute(server.home, "SELECT COUNT(*) FROM sessions WHERE with_default = 7") == "2"
        database = next(check for check in server.api("doctor", admin)["checks"] if check["name"] == "database")
        assert database["ok"], database
        # A version that this one cannot work with says so in the tables.
        assert server.stop() == 0
        execute(server.home, "UPDATE schema_compatibility SET min_schema = 9000")
        said = refused_start(server)
        assert "newer oubliette (schema 9000)" in said and "use that version, or a backup" in said, said


@ON_POSTGRES
def test_servers_go_on_while_a_newer_one_adds_to_their_tables():
    with cluster(2, CONFIG) as servers:
        one, two = servers
        admin = one.token("admin")
        project = one.api("project_create", admin, name="p")["project_id"]
        servers.put_agent("talks", admin, TURNS)
        start = {"project_id": project, "agent": "talks", "wait": True}
        sessions = [member.api("session_message", admin, message="a", **start)["session_id"] for member in servers]
        shared = one.home.parent
        execute(shared, newer_migration())
        for member in servers:
            for session in sessions:
                assert member.api("session_get", admin, session_id=session)["session_id"] == session
            assert len(member.api("session_list", admin)["sessions"]) == 2
            assert member.api("project_get", admin, project_id=project)["project_id"] == project
            member.token("read")
            member.put_agent(f"by-{member.port}", admin, TURNS)
        # Each through the other.
        for turn, member in ((2, two), (3, one)):
            for session in sessions:
                said = member.api("session_message", admin, session_id=session, message="b", wait=True)
                assert said["text"] == f"turn {turn}"
        third = Member(shared / "h2", shared, CONFIG.replace("ROOT", str(shared)))
        servers.members.append(third.start())
        assert len(third.api("server_list", admin)["servers"]) == 3
        one.kill()
        say = {"session_id": sessions[0], "message": "c", "wait": True}
        assert wait_until(lambda: text_of(third, admin, say), "the session to be another's") == "turn 4"
        # What would break the servers that run is refused, and they go on.
        with pytest.raises(subprocess.CalledProcessError) as refused:
            execute(shared, "UPDATE schema_compatibility SET min_schema = 9000")
        assert two.url in refused.value.stderr and third.url in refused.value.stderr, refused.value.stderr
        assert two.api("session_message", admin, message="d", **start)["text"] == "turn 1"


def text_of(server: Server, token: str, message: dict) -> str:
    """What an agent says; nothing while the session's server is being replaced."""
    try:
        return server.api("session_message", token, **message)["text"]
    except ToolFailed as error:
        assert error.code == "unavailable", error
        return ""


@contextlib.contextmanager
def of_two_versions(older_first: bool):
    """An older server and a newer one, on one database."""
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        root = pathlib.Path(folder)
        config = CONFIG.replace("ROOT", folder)
        older, newer = Member(root / "h0", root, config), Member(root / "h1", root, config)
        older.programs = pathlib.Path(OLDER)
        try:
            for member in (older, newer) if older_first else (newer,):
                member.start()
            yield older, newer
        finally:
            for member in (older, newer):
                if member.process and member.process.poll() is None:
                    member.stop()


def work_through_each_other(older: Member, newer: Member) -> tuple[str, str, str]:
    """Messages, callers' tools and approvals pass between the two. Returns a token and a session of each."""
    admin = older.token("admin")
    project = newer.api("project_create", admin, name="p")["project_id"]
    found = []
    for number, (here, there) in enumerate(((older, newer), (newer, older))):
        turns = [[call(ASK, n=1), {"say": "asked"}], [{"say": "two"}], [{"say": "three"}]]
        here.put_agent(f"asks-{number}", admin, turns)
        agent = f"asks-{number}"
        wait_until(lambda: agent in {a["slug"] for a in there.api("agent_list", admin)["agents"]}, "the agent to be known")
        begun = here.api("session_message", admin, message="a", project_id=project, agent=agent, context=lend("ask"))
        session = begun["session_id"]
        with there.events(session, admin, caller_id="myapp") as events:
            request = events.until("caller_tool_request")
            there.api("caller_tool_response", admin, session_id=session, request_id=request["request_id"], result=1)
            assert events.until("turn_completed")["text"] == "asked"
        assert there.api("session_message", admin, session_id=session, message="b", wait=True)["text"] == "two"
        logs = [member.api("session_events", admin, session_id=session, max_events=1000)["events"] for member in (here, there)]
        assert logs[0] == logs[1] and [event["index"] for event in logs[0]] == list(range(len(logs[0])))
        found.append(session)
    return admin, found[0], found[1]


@WITH_OLDER
def test_a_newer_server_joins_an_older_one_and_takes_over_from_it():
    with of_two_versions(older_first=True) as (older, newer):
        admin, of_older, _ = work_through_each_other(older, newer)
        versions = {server["address"]: server["version"] for server in newer.api("server_list", admin)["servers"]}
        assert versions.keys() == {older.url, newer.url}
        older.kill()
        say = {"session_id": of_older, "message": "c", "wait": True}
        assert wait_until(lambda: text_of(newer, admin, say), "the session to be the newer server's") == "three"


@WITH_OLDER
def test_an_older_server_starts_beside_a_newer_one_and_takes_over_from_it():
    with of_two_versions(older_first=False) as (older, newer):
        try:
            older.start()
        except AssertionError as failed:
            if "made by a newer oubliette" in str(failed) and "cannot use its tables" not in str(failed):
                pytest.skip("these programs are from before older servers started on newer tables")
            raise
        admin, _, of_newer = work_through_each_other(older, newer)
        newer.kill()
        say = {"session_id": of_newer, "message": "c", "wait": True}
        assert wait_until(lambda: text_of(older, admin, say), "the session to be the older server's") == "three"

"""What is deleted, by `session_delete` and by `[retention]`, and what stays; where sessions work; who started them."""

from __future__ import annotations

import sqlite3
import subprocess

import pytest

from harness import BIN, DEADLINE, ToolFailed, running, wait_until

TURNS = [[{"say": "done"}]]
DAY_MS = 24 * 3600 * 1000


def start(server, token, project, **more) -> str:
    said = server.api("session_message", token, message="hi", project_id=project, agent="quick", wait=True, **more)
    return said["session_id"]


def end(server, token, session) -> str:
    server.api("session_end", token, session_id=session)
    return session


def is_gone(server, token, session) -> bool:
    try:
        server.api("session_get", token, session_id=session)
        return False
    except ToolFailed as error:
        assert error.code == "not_found"
        return True


def rows(server, table: str, where: str = "1 = 1", *values) -> int:
    """How many rows a table has; read beside the running server."""
    with sqlite3.connect(f"file:{server.home}/oubliette.db?mode=ro", uri=True) as db:
        return db.execute(f"SELECT COUNT(*) FROM {table} WHERE {where}", values).fetchone()[0]


def backdate(server, days: int, statement: str, *values) -> None:
    """Changes times in the database of a stopped server, as if the rows had been written days ago."""
    with sqlite3.connect(server.home / "oubliette.db") as db:
        db.execute("DROP TRIGGER audit_never_changes")
        db.execute(statement, (days * DAY_MS, *values))
        db.execute(
            "CREATE TRIGGER audit_never_changes BEFORE UPDATE ON audit "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append only'); END"
        )


def test_an_ended_session_is_deleted_with_all_that_is_kept_of_it(server, admin, project):
    server.put_agent("quick", admin, TURNS)
    session = start(server, admin, project)
    with pytest.raises(ToolFailed, match="conflict"):
        server.api("session_delete", admin, session_id=session)
    kept = end(server, admin, start(server, admin, project))
    end(server, admin, session)
    home = server.home / "sessions" / session
    logs = rows(server, "event_logs", "session_id = ?", session)
    assert logs == 1 and rows(server, "debug_events", "session_id = ?", session) > 0
    usage = server.api("usage_report", admin, project_id=project)["total"]
    gone = server.api("session_delete", admin, session_id=session)
    assert gone == {"session_id": session, "deleted": True, "sessions": 1, "workspace_deleted": False}
    assert is_gone(server, admin, session) and not home.exists()
    assert [row["session_id"] for row in server.api("session_list", admin, project_id=project)["sessions"]] == [kept]
    with pytest.raises(ToolFailed, match="not_found"):
        server.api("session_events", admin, session_id=session)
    with pytest.raises(ToolFailed, match="not_found"):
        server.api("session_message", admin, session_id=session, message="again")
    with pytest.raises(ToolFailed, match="not_found"):
        server.api("session_delete", admin, session_id=session)
    wait_until(lambda: not rows(server, "debug_events", "session_id = ?", session), "the debugger events to go")
    wait_until(lambda: not rows(server, "purge_events"), "the events to go")
    # What was spent stays spent, and the other session has its log.
    assert server.api("usage_report", admin, project_id=project)["total"] == usage
    assert server.api("session_events", admin, session_id=kept)["events"]
    assert any(e["action"] == "session_delete" and e["outcome"] == "ok" for e in server.api("audit_list", admin)["entries"])


def test_a_session_is_deleted_with_its_workspace_only_where_nobody_else_needs_it(server, admin, project):
    server.put_agent("quick", admin, TURNS)
    first = end(server, admin, start(server, admin, project))
    # The default workspace stays, and so does everything else of a refused deletion.
    with pytest.raises(ToolFailed, match="conflict"):
        server.api("session_delete", admin, session_id=first, workspace=True)
    assert not is_gone(server, admin, first)
    own = start(server, admin, project, create_workspace=True)
    workspace = server.api("session_get", admin, session_id=own)["workspace_id"]
    folder = server.home / "projects" / project / "workspaces" / workspace
    other = start(server, admin, project, workspace_id=workspace)
    end(server, admin, own)
    with pytest.raises(ToolFailed, match="working in this workspace"):
        server.api("session_delete", admin, session_id=own, workspace=True)
    end(server, admin, other)
    assert folder.exists()
    assert server.cli_json("session", "delete", "--workspace", own)["workspace_deleted"] is True
    assert not folder.exists() and is_gone(server, admin, own)
    listed = server.api("workspace_list", admin, project_id=project)["workspaces"]
    assert workspace not in [row["workspace_id"] for row in listed]


def test_a_project_can_give_each_session_a_workspace_of_its_own(server, admin):
    server.put_agent("quick", admin, TURNS)
    project = server.api("project_create", admin, name="own", workspaces="own")
    assert project["workspaces"] == "own"
    id = project["project_id"]
    used = [server.api("session_get", admin, session_id=start(server, admin, id))["workspace_id"] for _ in range(2)]
    assert len({*used, project["default_workspace_id"]}) == 3
    named = start(server, admin, id, workspace_id=project["default_workspace_id"])
    assert server.api("session_get", admin, session_id=named)["workspace_id"] == project["default_workspace_id"]
    assert server.api("project_update", admin, project_id=id, workspaces="shared")["workspaces"] == "shared"
    shared = server.api("session_get", admin, session_id=start(server, admin, id))["workspace_id"]
    assert shared == project["default_workspace_id"]
    with pytest.raises(ToolFailed, match="invalid_argument"):
        server.api("project_update", admin, project_id=id, workspaces="each")


def test_a_session_says_who_started_it(server, admin, project):
    server.put_agent("quick", admin, TURNS)
    made = server.api("token_create", admin, name="night build", scope="write")
    session = start(server, made["token"], project)
    expected = {"token_id": made["token_id"], "name": "night build"}
    assert server.api("session_get", admin, session_id=session)["created_by"] == expected
    owned = server.cli_json("run", "--project", project, "--agent", "quick", "hi")["session_id"]
    listed = {s["session_id"]: s["created_by"] for s in server.api("session_list", admin, project_id=project)["sessions"]}
    assert listed == {session: expected, owned: {"name": "owner"}}


def test_what_is_older_than_retention_says_goes_and_the_rest_stays():
    kept = '[retention]\nsessions = "30d"\ndebugger = "30d"\naudit = "30d"\nusage = "30d"\n'
    with running() as server:
        admin = server.token("admin")
        server.put_agent("quick", admin, TURNS)
        project = server.api("project_create", admin, name="p")["project_id"]
        old = end(server, admin, start(server, admin, project))
        young = end(server, admin, start(server, admin, project))
        active = start(server, admin, project)
        audited = len(server.api("audit_list", admin, limit=1000)["entries"])
        server.stop()
        for statement in (
            "UPDATE sessions SET updated_at = updated_at - ? WHERE session_id IN (?, ?)",
            "UPDATE usage SET ts = ts - ? WHERE session_id IN (?, ?)",
            "UPDATE debug_events SET ts = ts - ? WHERE session_id IN (?, ?)",
        ):
            backdate(server, 31, statement, old, active)
        backdate(server, 31, "UPDATE audit SET ts = ts - ? WHERE idx < 2")
        (server.home / "oubliette.toml").write_text(kept)
        server.start()
        wait_until(lambda: is_gone(server, admin, old), "the old session to go")
        assert not is_gone(server, admin, young)
        # An active session stays however long nothing has happened in it.
        assert server.api("session_get", admin, session_id=active)["status"] == "idle"
        wait_until(lambda: not rows(server, "usage", "session_id = ?", active), "old usage to go")
        assert rows(server, "usage", "session_id = ?", young) > 0
        assert rows(server, "debug_events", "session_id = ?", young) > 0
        remaining = server.api("audit_list", admin, limit=1000)["entries"]
        assert min(entry["index"] for entry in remaining) == 2 and len(remaining) == audited - 2
        # Nothing but retention makes the audit log shorter.
        server.stop()
        with sqlite3.connect(server.home / "oubliette.db") as db, pytest.raises(sqlite3.IntegrityError):
            db.execute("DELETE FROM audit")


def test_a_wrong_retention_is_refused_with_its_field(tmp_path):
    for text, field in (('sessions = "1ms"', "retention.sessions"), ('logs = "1d"', "logs")):
        home = tmp_path / field.replace(".", "-")
        home.mkdir()
        (home / "oubliette.toml").write_text(f"[retention]\n{text}\n")
        done = subprocess.run([BIN / "oubliette", "--home", home, "serve"], capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 1 and field in done.stderr, done.stderr

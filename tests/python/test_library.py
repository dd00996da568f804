"""`library push` and `pull`: agents and catalog entries exchanged with a directory; and definitions in PostgreSQL."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import time

import pytest

import harness
import stores
from harness import BIN, DEADLINE, Server, ToolFailed, get, post, running, wait_until

on_postgres = pytest.mark.skipif(not stores.ON_POSTGRES, reason="runs with OUBLIETTE_TEST_STORE=postgres")
on_files = pytest.mark.skipif(stores.ON_POSTGRES, reason="definitions are in the database")

READER = {"id": "reader", "kind": "builtin", "builtinPolicy": {"name": "fs_read", "allowedPaths": ["."]}}
BINARY = bytes(range(256)) * 20
SECRET = "sk-value-of-the-definition"


def write(root: pathlib.Path, path: str, content: str | bytes | dict, mode: int = 0o644) -> pathlib.Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps(content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    file.chmod(mode)
    return file


def agent(**more) -> dict:
    return {"name": "Writer", "prompt": "Follow the script.", "model": "script:script.json", **more}


def script(said: str) -> dict:
    return {"turns": [[{"say": said}]]}


def fill(root: pathlib.Path, said: str = "from the directory") -> pathlib.Path:
    """A directory as a team's repository has it."""
    write(root, "agents/writer/agent.json", agent(env={"KEY": SECRET}, tools={"use": ["reader"]}), 0o640)
    write(root, "agents/writer/script.json", script(said))
    write(root, "agents/writer/home/.config/tool/run.sh", "#!/bin/sh\n", 0o755)
    write(root, "agents/writer/home/data.bin", BINARY, 0o600)
    write(root, "tools/reader/tool.json", READER)
    write(root, "README.md", "not a definition")
    return root


def tree(root: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    """Every file of the definitions in a directory, with its mode."""
    return {
        str(file.relative_to(root)): (stat.S_IMODE(file.stat().st_mode), file.read_bytes())
        for kind in ("agents", "tools")
        for file in sorted((root / kind).rglob("*"))
        if file.is_file()
    }


def names(rows: list[dict]) -> list[str]:
    return sorted(f"{row['kind']}/{row['id']}" for row in rows)


def say(server: Server, admin: str, slug: str) -> str:
    project = server.api("project_create", admin, name="p")["project_id"]
    done = server.api("session_message", admin, project_id=project, agent=slug, message="go", wait=True)
    events = server.api("session_events", admin, session_id=done["session_id"], max_events=1000)["events"]
    return "".join(event["text"] for event in events if event["type"] == "delta")


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def admin(server):
    return server.token("admin")


@pytest.fixture
def empty(server, admin):
    """The module's server without definitions."""
    for row in server.api("agent_list", admin)["agents"]:
        server.api("agent_delete", admin, slug=row["slug"])
    for row in server.api("catalog_list", admin)["entries"]:
        server.api("catalog_delete", admin, id=row["id"])
    return server


def unbound(server, admin):
    """Ends what uses an agent, so that it can be deleted."""
    for session in server.api("session_list", admin)["sessions"]:
        if session["status"] not in ("ended", "failed"):
            server.api("session_end", admin, session_id=session["session_id"])


# -- push and pull -------------------------------------------------------------------------------------


def test_what_is_pushed_is_used_and_pulled_as_it_was(empty, admin, tmp_path):
    source = fill(tmp_path / "source")
    pushed = empty.cli_json("library", "push", str(source))
    assert names(pushed["added"]) == ["agent/writer", "tool/reader"] and not pushed["changed"] and not pushed["deleted"]
    assert say(empty, admin, "writer") == "from the directory"
    unbound(empty, admin)
    pulled = empty.cli_json("library", "pull", str(tmp_path / "target"))
    assert names(pulled["written"]) == ["agent/writer", "tool/reader"]
    # Every byte and every mode, also secrets and binary files.
    assert tree(tmp_path / "target") == tree(source)
    assert SECRET.encode() in tree(tmp_path / "target")["agents/writer/agent.json"][1]
    again = empty.cli_json("library", "push", str(tmp_path / "target"))
    assert not again["added"] and not again["changed"] and names(again["unchanged"]) == ["agent/writer", "tool/reader"]
    assert empty.cli_json("library", "pull", str(tmp_path / "target"))["unchanged"] == 2
    assert SECRET not in empty.log()


def test_push_shows_what_it_changes_and_deletes_only_with_prune(empty, admin, tmp_path):
    source = fill(tmp_path / "source")
    empty.put_agent("other", admin, [])
    shown = empty.cli("library", "push", str(source), "--dry-run")
    assert "+ agents/writer" in shown.stdout and "Nothing was changed" in shown.stdout
    assert names(empty.api("library_list", admin)["definitions"]) == ["agent/other"]
    done = empty.cli("library", "push", str(source))
    assert "+ agents/writer" in done.stdout and "agents/other" in done.stderr and "--prune" in done.stderr
    write(source, "agents/writer/script.json", script("changed"))
    (source / "agents/writer/home/data.bin").unlink()
    done = empty.cli("library", "push", str(source), "--prune", "--dry-run")
    assert "~ agents/writer" in done.stdout and "- agents/other" in done.stdout, done.stdout
    done = empty.cli_json("library", "push", str(source), "--prune")
    assert names(done["changed"]) == ["agent/writer"] and names(done["deleted"]) == ["agent/other"]
    assert say(empty, admin, "writer") == "changed"
    unbound(empty, admin)
    files = empty.api("library_read", admin, kind="agent", id="writer")["files"]
    assert "home/data.bin" not in {file["path"] for file in files}, "a definition is replaced whole"


def test_nothing_changes_if_anything_is_wrong(empty, admin, tmp_path):
    source = fill(tmp_path / "source")
    write(source, "agents/broken/agent.json", '{"name": "B", "prompt": "p", "oops": 1}')
    done = empty.cli("library", "push", str(source), check=False)
    assert done.returncode == 1 and "agents/broken/agent.json" in done.stderr and "oops" in done.stderr
    write(source, "agents/broken/agent.json", {"name": "B", "prompt": "p", "tools": {"use": ["absent"]}})
    done = empty.cli("library", "push", str(source), check=False)
    assert "agents/broken/agent.json: tools.use[0]" in done.stderr and "absent" in done.stderr
    write(source, "agents/broken/agent.json", '{"name": ')
    assert "agents/broken/agent.json" in empty.cli("library", "push", str(source), check=False).stderr
    assert empty.api("library_list", admin)["definitions"] == []
    shutil.rmtree(source / "agents/broken")
    empty.cli("library", "push", str(source))
    # A catalog entry that an agent uses, and an agent that a project has, stay.
    shutil.rmtree(source / "tools/reader")
    done = empty.cli("library", "push", str(source), "--prune", check=False)
    assert done.returncode == 1 and "used by writer" in done.stderr
    project = empty.api("project_create", admin, name="has", agent="writer")["project_id"]
    shutil.rmtree(source / "agents/writer")
    (source / "agents").mkdir(exist_ok=True)
    done = empty.cli("library", "push", str(source), "--prune", check=False)
    assert done.returncode == 1 and project in done.stderr
    assert len(empty.api("library_list", admin)["definitions"]) == 2
    empty.api("project_delete", admin, project_id=project)
    empty.cli("library", "push", str(source), "--prune")
    assert empty.api("library_list", admin)["definitions"] == []


def hard(root: pathlib.Path, kind: str) -> None:
    folder = root / "agents" / "writer"
    if kind == "a link outside":
        (folder / "script2.json").symlink_to("/etc/passwd")
    elif kind == "a link in home":
        (folder / "home" / "etc").symlink_to("/etc")
    elif kind == "a linked folder":
        (root / "agents" / "linked").symlink_to("/etc")
    elif kind == "a socket":
        here = os.getcwd()
        os.chdir(folder)
        try:
            socket.socket(socket.AF_UNIX).bind("s")
        finally:
            os.chdir(here)
    elif kind == "a pipe":
        os.mkfifo(folder / "home" / "pipe")
    elif kind == "a huge file":
        with (folder / "home" / "huge").open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "a name that is no slug":
        write(root, "agents/Not_A_Slug/agent.json", agent())
    elif kind == "a file called ..":
        (folder / "home" / "..\\..").write_text("an odd name, but one name")
        (folder / "..x").mkdir()
        write(root, "agents/writer/more/..x", "in a folder that is not home")
    elif kind == "no definition":
        write(root, "tools/none/readme", "x")
    elif kind == "a file in the place of a folder":
        write(root, "agents/loose.json", agent())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a link outside", "agents/writer/script2.json: is a symbolic link"),
        ("a link in home", "agents/writer/home/etc: is a symbolic link"),
        ("a linked folder", "not a folder"),
        ("a socket", "agents/writer/s: is not a plain file"),
        ("a pipe", "agents/writer/home/pipe: is not a plain file"),
        ("a huge file", "agents/writer/home/huge: is too large"),
        ("a name that is no slug", "Not_A_Slug"),
        ("a file called ..", "agents/writer/more: is in a folder"),
        ("no definition", "tools/none/tool.json: is missing"),
        ("a file in the place of a folder", "loose.json"),
    ],
)
def test_a_hostile_directory_is_refused_with_the_path(empty, admin, tmp_path, kind, said):
    source = fill(tmp_path / "source")
    hard(source, kind)
    done = empty.cli("library", "push", str(source), check=False)
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert empty.api("library_list", admin)["definitions"] == []


def test_a_directory_that_is_none_is_refused(empty, tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        done = empty.cli("library", "push", str(path), check=False)
        assert done.returncode == 1 and str(path) in done.stderr


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"path": "../x", "text": ""}, "agents/a/../x"),
        ({"path": "home/../../x", "text": ""}, "home/"),
        ({"path": "..", "text": ""}, "agents/a/.."),
        ({"path": "home/\u0000", "text": ""}, "agents/a/home"),
        ({"path": "/etc/x", "text": ""}, "agents/a//etc/x"),
        ({"path": "x", "base64": "!"}, "base64"),
        ({"path": "x", "text": "", "mode": "4755"}, "mode"),
        ({"path": "x"}, "text or base64"),
        ({"path": "x", "text": "", "link": "/etc"}, "link"),
        ({"path": "x", "text": "y" * (1024 * 1024 + 1)}, "1024 KiB"),
    ],
)
def test_a_hostile_push_over_the_wire_is_refused(empty, admin, file, said):
    main = {"path": "agent.json", "text": json.dumps({"name": "A", "prompt": "p"})}
    with pytest.raises(ToolFailed) as failed:
        empty.api("library_push", admin, puts=[{"kind": "agent", "id": "a", "files": [main, file]}])
    assert failed.value.code == "invalid_argument" and said in failed.value.message, failed.value.message
    assert empty.api("library_list", admin)["definitions"] == []


def test_large_pushes_are_bounded_and_only_for_those_who_may(empty, admin):
    url, big = f"{empty.url}/api/tools/library_push", "x" * (6 << 20)
    main = {"path": "agent.json", "text": json.dumps({"name": "A", "prompt": "p"})}
    files = [main, {"path": "home/big", "text": big}]
    body = {"puts": [{"kind": "agent", "id": "a", "files": files}]}
    for token, status in ((empty.token("write"), 413), (admin, 200)):
        assert post(url, json=body, headers={"Authorization": f"Bearer {token}"}).status_code == status
    body = {"puts": [{"kind": "agent", "id": "b", "files": [main, {"path": "home/big", "text": "x" * (33 << 20)}]}]}
    assert post(url, json=body, headers={"Authorization": f"Bearer {admin}"}).status_code == 413
    with pytest.raises(ToolFailed) as failed:
        empty.api("library_push", admin, puts=[{"kind": "agent", "id": "b", "files": [main, {"path": "home/big", "text": "x" * (17 << 20)}]}])
    assert "16 MiB" in failed.value.message
    with pytest.raises(ToolFailed) as failed:
        puts = [{"kind": "agent", "id": f"b{n}", "files": [main, {"path": "home/big", "text": "x" * (11 << 20)}]} for n in range(2)]
        empty.api("library_push", admin, puts=puts)
    assert "20 MiB" in failed.value.message
    assert names(empty.api("library_list", admin)["definitions"]) == ["agent/a"]


def test_a_pull_keeps_local_changes_unless_forced(empty, admin, tmp_path):
    source = fill(tmp_path / "source")
    empty.cli("library", "push", str(source))
    target = tmp_path / "target"
    empty.cli("library", "pull", str(target))
    write(target, "notes.txt", "mine")
    write(target, "agents/writer/script.json", script("mine"))
    write(target, "agents/mine/agent.json", {"name": "M", "prompt": "p"})
    before = tree(target)
    done = empty.cli("library", "pull", str(target), check=False)
    assert done.returncode == 1 and "agents/writer" in done.stderr and "agents/mine" in done.stderr and "--force" in done.stderr
    assert tree(target) == before
    # A link is replaced, not followed.
    (target / "agents/writer/script.json").unlink()
    outside = write(tmp_path, "outside", "untouched")
    (target / "agents/writer/script.json").symlink_to(outside)
    done = empty.cli_json("library", "pull", str(target), "--force")
    assert names(done["written"]) == ["agent/writer"] and names(done["removed"]) == ["agent/mine"]
    assert tree(target) == tree(source) and (target / "notes.txt").read_text() == "mine"
    assert outside.read_text() == "untouched"


def test_push_and_pull_work_without_a_server(tmp_path):
    home = Server(tmp_path / "h")
    source = fill(tmp_path / "source")
    assert names(home.cli_json("library", "push", str(source))["added"]) == ["agent/writer", "tool/reader"]
    home.cli("library", "pull", str(tmp_path / "target"))
    assert tree(tmp_path / "target") == tree(source)
    if not stores.ON_POSTGRES:
        assert tree(home.home) == tree(source)


def test_push_and_pull_work_on_a_server_elsewhere(empty, admin, tmp_path):
    source = fill(tmp_path / "source")
    env = {**os.environ, "OUBLIETTE_TOKEN": admin, "OUBLIETTE_HOME": str(tmp_path / "no-home")}

    def remote(*args: str) -> subprocess.CompletedProcess:
        command = [BIN / "oubliette", "--url", empty.url, "library", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=True)

    remote("push", str(source))
    remote("pull", str(tmp_path / "target"))
    assert tree(tmp_path / "target") == tree(source)


def test_who_may_exchange_definitions(empty, admin, tmp_path):
    source = fill(tmp_path / "source")
    empty.cli("library", "push", str(source))
    project = empty.api("project_create", admin, name="bound")["project_id"]
    for token in (empty.token("write"), empty.token("read"), empty.token("admin", project)):
        for tool, arguments in (
            ("library_list", {}),
            ("library_read", {"kind": "agent", "id": "writer"}),
            ("library_push", {"deletes": [{"kind": "agent", "id": "writer"}]}),
        ):
            with pytest.raises(ToolFailed) as failed:
                empty.api(tool, token, **arguments)
            assert failed.value.code == "permission_denied", (tool, failed.value.message)
    empty.api("library_read", admin, kind="agent", id="writer")
    entries = empty.api("audit_list", admin, limit=200)["entries"]
    done = {(entry["action"], entry.get("target")) for entry in entries if entry["outcome"] == "ok"}
    assert ("library_read", "agents/writer") in done
    assert any(action == "library_push" and "agents/writer" in (target or "") for action, target in done)


# -- definitions in the database -----------------------------------------------------------------------


@on_postgres
def test_definitions_are_in_the_database_and_their_copy_is_made_anew(tmp_path):
    with running() as server:
        admin = server.token("admin")
        server.api("catalog_put", admin, id="reader", definition=READER)
        server.put_agent("kept", admin, [[{"say": "kept"}]], tools={"use": ["reader"]})
        server.put_agent("gone", admin, [])
        server.api("agent_delete", admin, slug="gone")
        assert not any((server.home / "agents").iterdir()) and not any((server.home / "tools").iterdir())
        copy = server.home / "library"
        assert tree(copy).keys() == {"agents/kept/agent.json", "agents/kept/script.json", "tools/reader/tool.json"}
        server.kill()
        # Whatever somebody did to the copy: what counts is in the database.
        write(copy, "agents/kept/agent.json", "{")
        write(copy, "agents/planted/agent.json", {"name": "P", "prompt": "p"})
        write(copy, "agents/Odd Name/x", "x")
        server.start()
        assert [a["slug"] for a in server.api("agent_list", admin)["agents"]] == ["kept"]
        assert tree(copy).keys() == {"agents/kept/agent.json", "agents/kept/script.json", "tools/reader/tool.json"}
        assert say(server, admin, "kept") == "kept"
        server.stop()
        # Another home on the same database is the same Oubliette.
        other = Server(tmp_path / "other", env={"OUBLIETTE_STORE_URL": stores.url(server.home)})
        other.start()
        try:
            assert say(other, admin, "kept") == "kept"
        finally:
            other.stop()


@on_postgres
def test_a_change_that_another_server_commits_is_taken_up_within_a_second():
    with running() as server:
        admin = server.token("admin")
        server.put_agent("shared", admin, [[{"say": "before"}]])
        schema = stores.url(server.home).rsplit("=", 1)[1]
        changed = json.dumps({"name": "From elsewhere", "prompt": "p"})
        # As another server commits it, and without a notice: what is not heard is found by looking.
        stores.execute(
            f"SET search_path = {schema}; BEGIN;"
            "UPDATE counters SET value = value + 1 WHERE name = 'definitions';"
            "UPDATE definitions SET version = (SELECT value FROM counters WHERE name = 'definitions') WHERE id = 'shared';"
            f"UPDATE definition_files SET content = encode(convert_to('{changed}', 'UTF8'), 'base64')"
            " WHERE id = 'shared' AND path = 'agent.json';"
            "COMMIT"
        )
        began = time.monotonic()
        name = lambda: server.api("agent_get", admin, slug="shared")["name"]
        wait_until(lambda: name() == "From elsewhere", "the change")
        assert time.monotonic() - began < 5  # a second, on a machine that has nothing else to do
        # What nobody of ours would write changes no file outside its definition, and keeps the last good one.
        stores.execute(
            f"SET search_path = {schema}; BEGIN;"
            "UPDATE counters SET value = value + 1 WHERE name = 'definitions';"
            "UPDATE definitions SET version = (SELECT value FROM counters WHERE name = 'definitions') WHERE id = 'shared';"
            "UPDATE definition_files SET path = '../../../escaped' WHERE id = 'shared' AND path = 'script.json';"
            "COMMIT"
        )
        server.put_agent("next", admin, [])
        assert name() == "From elsewhere"
        assert not (server.home / "escaped").exists() and not (server.home.parent / "escaped").exists()
        wait_until(lambda: "is invalid" in server.log(), "the log to say so")


@on_postgres
def test_the_first_run_puts_samples_into_an_empty_database():
    with running(command="up") as server:
        admin = (server.home / "admin.token").read_text().strip()
        assert {"demo", "assistant"} <= {a["slug"] for a in server.api("agent_list", admin)["agents"]}
        assert not any((server.home / "agents").iterdir())
        assert "hello" in say(server, admin, "demo").lower()


@on_postgres
def test_a_homes_files_are_brought_into_a_new_database_once(tmp_path):
    home = fill(tmp_path / "h")
    home.chmod(0o700)
    server = Server(home).start()
    try:
        admin = server.token("admin")
        assert say(server, admin, "writer") == "from the directory"
        checks = lambda: {check["name"]: check for check in server.cli_json("doctor")["checks"]}
        assert checks()["definition files"]["ok"]
        unbound(server, admin)
        server.api("agent_delete", admin, slug="writer")
        server.api("catalog_delete", admin, id="reader")
        write(home, "agents/writer/script.json", script("edited by hand"))
        server.stop()
        server.start()
        # Empty again, but not new: nothing comes back.
        assert server.api("agent_list", admin)["agents"] == []
        told = checks()["definition files"]
        assert not told["ok"] and "no effect" in told["detail"] and f"library push {home}" in told["remedy"]
        assert "have no effect" in server.log()
        server.cli("library", "push", str(home))
        assert say(server, admin, "writer") == "edited by hand"
        assert checks()["definition files"]["ok"]
        server.stop()
        assert checks()["definition files"]["ok"]
    finally:
        server.stop()


@on_postgres
def test_files_that_cannot_be_brought_in_are_told_and_nothing_of_them_is(tmp_path):
    home = fill(tmp_path / "h")
    home.chmod(0o700)
    write(home, "agents/broken/agent.json", "{")
    server = Server(home).start()
    try:
        admin = server.token("admin")
        assert server.api("agent_list", admin)["agents"] == []
        told = {check["name"]: check for check in server.cli_json("doctor")["checks"]}["definition files"]
        assert not told["ok"] and "agents/broken/agent.json" in told["detail"]
        assert "agents/broken/agent.json" in server.log()
        shutil.rmtree(home / "agents/broken")
        server.cli("library", "push", str(home))
        assert say(server, admin, "writer") == "from the directory"
    finally:
        server.stop()


@on_postgres
def test_a_hand_edit_has_no_effect_where_definitions_are_in_the_database():
    with running() as server:
        admin = server.token("admin")
        write(server.home, "agents/by-hand/agent.json", {"name": "B", "prompt": "p"})
        write(server.home, "library/agents/by-hand/agent.json", {"name": "B", "prompt": "p"})
        server.put_agent("real", admin, [])
        time.sleep(1.5)
        assert [a["slug"] for a in server.api("agent_list", admin)["agents"]] == ["real"]
        told = {check["name"]: check for check in server.cli_json("doctor")["checks"]}["definition files"]
        assert not told["ok"] and "agents/by-hand" in told["detail"]


@on_postgres
def test_definitions_move_with_store_copy_and_backups_between_both_databases(tmp_path):
    """Files of a home become rows of a database, and back, by `store copy` as by a backup."""
    plain = {**os.environ, "OUBLIETTE_STORE_URL": ""}
    on_sqlite = Server(tmp_path / "sqlite", env={"OUBLIETTE_STORE_URL": ""})
    cli = lambda home, *args: subprocess.run(
        [BIN / "oubliette", "--home", home, *args], env=plain, capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    source = fill(tmp_path / "source")
    cli(on_sqlite.home, "library", "push", str(source))
    assert tree(on_sqlite.home) == tree(source)
    cli(on_sqlite.home, "backup", str(tmp_path / "sqlite.backup"))

    # A backup of files into PostgreSQL.
    restored = Server(tmp_path / "restored")
    restored.cli("restore", str(tmp_path / "sqlite.backup"))
    assert not any((restored.home / "agents").iterdir())
    restored.cli("library", "pull", str(tmp_path / "pulled"))
    assert tree(tmp_path / "pulled") == tree(source)
    # A backup of rows into SQLite.
    restored.cli("backup", str(tmp_path / "postgres.backup"))
    back = tmp_path / "back"
    cli(back, "restore", str(tmp_path / "postgres.backup"))
    assert tree(back) == tree(source)

    # A copy of the database, with the files of its home.
    copied = tmp_path / "copied"
    url = stores.url(copied)
    cli(on_sqlite.home, "store", "copy", "--to", url)
    Server(copied).cli("library", "pull", str(tmp_path / "of-copy"))
    assert tree(tmp_path / "of-copy") == tree(source)
    # And back: other files that the home has are moved away, not mixed.
    write(copied, "agents/stale/agent.json", {"name": "S", "prompt": "p"})
    Server(copied).cli("store", "copy", "--to", f"sqlite:{copied / 'oubliette.db'}")
    cli(copied, "agent", "list")
    assert tree(copied) == tree(source)
    assert list(copied.glob("replaced-*/agents/stale/agent.json"))
    # Once: what is edited then stays.
    write(copied, "agents/writer/script.json", script("edited"))
    cli(copied, "agent", "list")
    assert b"edited" in tree(copied)["agents/writer/script.json"][1]


@on_files
def test_files_of_the_home_stay_what_counts_on_one_machine(empty, admin, tmp_path):
    empty.cli("library", "push", str(fill(tmp_path / "source")))
    assert (empty.home / "agents/writer/script.json").exists() and not (empty.home / "library").exists()
    write(empty.home, "agents/writer/agent.json", agent(name="Edited by hand"))
    wait_until(lambda: empty.api("agent_get", admin, slug="writer")["name"] == "Edited by hand", "the edit")

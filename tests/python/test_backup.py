"""`backup`, `restore` and `store copy`: everything is there afterwards, and what is damaged, newer or hostile changes nothing."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import stat
import subprocess
import tarfile
import threading

import pytest

import harness
import stores
from harness import BIN, DEADLINE, Server, free_port, get, running, wait_until

TURNS = [[{"say": "first"}], [{"say": "second"}], [{"say": "third"}]]
WRITE = {"kind": "builtin", "builtinPolicy": {"name": "fs_write", "allowedPaths": ["."]}}
# Nobody listens there: what is to be delivered stays in the outbox.
WEBHOOK = '[[webhook]]\nurl = "http://127.0.0.1:{port}/hook"\nevents = ["turn_completed"]\nsecret_env = "HOOK_SECRET"\n'
SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="


def entries(file) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(file) as tar:
        return {entry.name: (entry, tar.extractfile(entry).read() if entry.isfile() else b"") for entry in tar}


def rewrite(file, target, change) -> None:
    """Writes a backup again, with its entries changed; keeps their order."""
    found = entries(file)
    change(found)
    with tarfile.open(target, "w:gz", format=tarfile.GNU_FORMAT) as tar:
        for info, content in found.values():
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def fresh(tmp_path, name="new") -> Server:
    """A home in which nothing has been started."""
    return Server(tmp_path / name)


def tree(root) -> dict[str, bytes | None]:
    """Everything in a folder, but for locks and what a running server has."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if not name.endswith(".lock") and not name.startswith("run"):
            found[name] = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    return found


class Filled:
    """A server in which there is something of everything."""

    def __init__(self, server: Server):
        self.server = server
        self.admin = server.token("admin")
        api = lambda tool, **arguments: server.api(tool, self.admin, **arguments)
        self.project = api("project_create", name="kept", env={"A": "secret-of-the-project"})["project_id"]
        self.reader = server.token("read", self.project)
        server.put_tool("writer", self.admin, **WRITE)
        server.put_agent("quick", self.admin, TURNS)
        ask = [[{"call": {"tool": "writer_fs_write", "arguments": {"path": "a", "content": "b"}}}]]
        server.put_agent("asking", self.admin, ask, tools={"use": ["writer"], "ask": ["writer_fs_write"]})
        said = api("session_message", message="hi \u0000 there", project_id=self.project, agent="quick", wait=True)
        self.session = said["session_id"]
        waits = api("session_message", message="go", project_id=self.project, agent="asking")["session_id"]
        wait_until(lambda: api("approval_list", session_id=waits)["approvals"], "the approval")
        self.workspace = api("project_get", project_id=self.project)["default_workspace_id"]
        folder = server.home / "projects" / self.project / "workspaces" / self.workspace
        (folder / "deep").mkdir()
        (folder / "deep" / "run.sh").write_text("#!/bin/sh\n")
        (folder / "deep" / "run.sh").chmod(0o755)
        (folder / "link").symlink_to("/etc/passwd")
        (folder / os.fsdecode(b"not utf8 \xff")).write_text("x")
        os.mkfifo(folder / "pipe")

    def look(self, server: Server) -> dict:
        """What a client sees of it."""
        api = lambda tool, **arguments: server.api(tool, self.admin, **arguments)
        seen = {
            "projects": api("project_list")["projects"],
            "sessions": [s["session_id"] for s in api("session_list")["sessions"]],
            "events": api("session_events", session_id=self.session, max_events=1000)["events"],
            "approvals": [a["approval_id"] for a in api("approval_list")["approvals"]],
            "tokens": sorted((t["token_id"], t["name"], t["scope"]) for t in api("token_list")["tokens"]),
            "agents": [(a["slug"], a["definition"]) for a in api("agent_list")["agents"]],
            "entries": [(e["id"], e["definition"]) for e in api("catalog_list")["entries"]],
            "usage": api("usage_report", session_id=self.session)["total"],
        }
        assert server.api("project_get", self.reader, project_id=self.project)["name"] == "kept"
        return seen

    def check_files(self, server: Server) -> None:
        headers = {"Authorization": f"Bearer {self.admin}"}
        base = f"{server.url}/api/workspaces/{self.workspace}/files"
        assert get(f"{base}/deep/run.sh", headers=headers).text == "#!/bin/sh\n"
        folder = server.home / "projects" / self.project / "workspaces" / self.workspace
        assert stat.S_IMODE((folder / "deep" / "run.sh").stat().st_mode) == 0o755
        assert os.readlink(folder / "link") == "/etc/passwd"
        assert (folder / os.fsdecode(b"not utf8 \xff")).read_text() == "x"
        assert not (folder / "pipe").exists()


@pytest.fixture(scope="module", autouse=True)
def secret():
    """The configuration that is backed up names it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOK_SECRET", SECRET)
        yield


@pytest.fixture(scope="module")
def filled(secret):
    with running(config=WEBHOOK.format(port=free_port())) as server:
        yield Filled(server)


@pytest.fixture(scope="module")
def backup(filled, tmp_path_factory):
    """A backup, and what a client saw when it was made."""
    file = tmp_path_factory.mktemp("backups") / "one.tar.gz"
    seen = filled.look(filled.server)
    made = filled.server.cli_json("backup", str(file))
    return file, made, seen


def test_a_backup_of_a_running_server_is_restored_whole(filled, backup, tmp_path):
    file, made, seen = backup
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    rows = {table["table"]: table["rows"] for table in made["tables"]}
    assert rows["webhook_outbox"] >= 1 and rows["approvals"] == 1 and rows["audit"] >= 1 and rows["tokens"] >= 2
    assert made["left_out"] == 1  # the pipe
    new = fresh(tmp_path)
    restored = new.cli_json("restore", str(file))
    assert restored["tables"] == made["tables"] and restored["files"] == made["files"]
    new.start()
    try:
        after = filled.look(new)
        # What the start of the server itself does: the waiting call was interrupted.
        assert after == seen
        filled.check_files(new)
        audit = new.api("audit_list", filled.admin, limit=1000)["entries"]
        assert {"project_create", "agent_put"} <= {entry["action"] for entry in audit}
        # Its sessions go on, after the last index.
        said = new.api("session_message", filled.admin, session_id=filled.session, message="on", wait=True)
        assert said["turn"] == 2
        events = new.api("session_events", filled.admin, session_id=filled.session, max_events=1000)["events"]
        assert [event["index"] for event in events] == list(range(len(events)))
        assert events[: len(seen["events"])] == seen["events"]
    finally:
        new.stop()


def test_a_backup_holds_no_token_no_key_and_no_address_of_the_store(filled, backup):
    file, _, _ = backup
    text = gzip.decompress(file.read_bytes())
    assert filled.admin.encode() not in text and filled.reader.encode() not in text
    assert SECRET.encode() not in text
    names = entries(file).keys()
    assert not any("admin.token" in name or name.startswith("home/run") for name in names)


def test_a_backup_under_load_is_of_one_moment(filled, tmp_path):
    server, done = filled.server, threading.Event()
    made: list[str] = []

    def load():
        while not done.is_set():
            made.append(server.api("project_create", filled.admin, name="load")["project_id"])

    threads = [threading.Thread(target=load) for _ in range(3)]
    [thread.start() for thread in threads]
    try:
        wait_until(lambda: len(made) > 20, "some load")
        acknowledged = set(made)
        server.cli("backup", str(tmp_path / "b"))
        assert len(made) > len(acknowledged), "nothing was committed meanwhile"
    finally:
        done.set()
        [thread.join() for thread in threads]
    new = fresh(tmp_path)
    new.cli("restore", str(tmp_path / "b"))
    new.start()
    try:
        listed = json.loads(new.cli("project", "list", "--json").stdout)["projects"]
        there = {project["project_id"] for project in listed}
        assert acknowledged <= there <= set(made) | there
        # Every project has its workspace: they were written by one transaction.
        for project in there:
            assert new.api("project_get", filled.admin, project_id=project)["default_workspace_id"]
    finally:
        new.stop()
    for project in made:
        server.api("project_delete", filled.admin, project_id=project)


def test_a_stopped_home_is_backed_up_and_an_older_file_is_replaced(tmp_path):
    with running() as server:
        admin = server.token("admin")
        server.api("project_create", admin, name="p")
        server.stop()
        file = tmp_path / "b.tar.gz"
        file.write_text("old")
        made = server.cli_json("backup", str(file))
        assert {t["table"]: t["rows"] for t in made["tables"]}["projects"] == 1
        new = fresh(tmp_path)
        new.cli("restore", str(file))
        new.start()
        assert new.api("project_list", admin)["projects"][0]["name"] == "p"
        new.stop()


def test_a_restore_over_a_running_server_is_refused(filled, backup):
    file, _, seen = backup
    for more in ([], ["--force"]):
        done = filled.server.cli("restore", str(file), *more, check=False)
        assert done.returncode == 1 and "running" in done.stderr and "stop it" in done.stderr
    assert filled.look(filled.server)["projects"] == seen["projects"]


def test_a_home_with_data_is_kept_and_with_force_moved_aside(filled, backup, tmp_path):
    file, _, seen = backup
    new = fresh(tmp_path)
    new.cli("project", "create", "mine")
    before = tree(new.home)
    done = new.cli("restore", str(file), check=False)
    assert done.returncode == 1 and ("--force" in done.stderr or "not empty" in done.stderr)
    assert tree(new.home) == before
    if stores.ON_POSTGRES:
        done = new.cli("restore", str(file), "--force", check=False)
        assert done.returncode == 1 and "not empty" in done.stderr
        assert tree(new.home) == before
        return
    restored = new.cli_json("restore", str(file), "--force")
    moved = new.home / os.path.basename(restored["moved_to"])
    assert (moved / "oubliette.db").exists() and list((moved / "projects").iterdir())
    new.start()
    try:
        assert filled.look(new)["projects"] == seen["projects"]
    finally:
        new.stop()


def change_version(found):
    info, content = found["backup.json"]
    found["backup.json"] = (info, json.dumps({**json.loads(content), "format": 99, "version": "9.9.9"}).encode())


def change_schema(found):
    for name, inner in (("backup.json", None), ("manifest.json", "backup")):
        info, content = found[name]
        said = json.loads(content)
        (said[inner] if inner else said).update(schema=9999, version="9.9.9")
        found[name] = (info, json.dumps(said).encode())


def change_row(found):
    name = next(name for name in found if name.startswith("database/projects/"))
    info, content = found[name]
    found[name] = (info, content.replace(b"kept", b"kepT"))


def drop_rows(found):
    del found[next(name for name in found if name.startswith("database/events/"))]


def change_file(found):
    name = next(name for name in found if name.endswith("deep/run.sh"))
    info, content = found[name]
    found[name] = (info, content.replace(b"sh", b"zz"))


def change_mode(found):
    name = next(name for name in found if name.endswith("deep/run.sh"))
    found[name][0].mode = 0o4777


def drop_manifest(found):
    del found["manifest.json"]


def put_after(name, kind=tarfile.REGTYPE, content=b"x", target=""):
    def change(found):
        manifest = found.pop("manifest.json")
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode = kind, target, 0o644
        found[name + "!"] = (info, content)
        found["manifest.json"] = manifest

    return change


def link_then_write(found):
    put_after("home/agents/quick/evil", tarfile.SYMTYPE, b"", "/tmp")(found)
    put_after("home/agents/quick/evil/oubliette-escaped")(found)
    recount(found)


def twice(found):
    name = next(name for name in found if name.endswith("deep/run.sh"))
    info, content = found[name]
    put_after(name, content=content)(found)
    recount(found)


def broken_row(found):
    name = next(name for name in found if name.startswith("database/tokens/"))
    info, content = found[name]
    found[name] = (info, content + b'["only one value"]\n')
    recount(found)


def recount(found):
    """Makes the manifest agree with the entries, as whoever makes a hostile file would."""
    info, content = found["manifest.json"]
    manifest = json.loads(content)
    add = lambda total, digest: (total + int.from_bytes(digest, "little")) % 2**256
    tables: dict[str, list[int]] = {}
    groups: dict[str, list[int]] = {}
    for key, (entry, body) in found.items():
        top, _, rest = entry.name.partition("/")
        if top == "database":
            state = tables.setdefault(rest.split("/")[0], [0, 0])
            for line in body.splitlines():
                state[0], state[1] = state[0] + 1, add(state[1], hashlib.sha256(line).digest())
        elif top == "home":
            kind = b"l" if entry.issym() else b"d" if entry.isdir() else b"f"
            path, target = os.fsencode(rest), os.fsencode(entry.linkname)
            hashed = kind + (entry.mode & 0o777).to_bytes(4, "little")
            for part in (path, target):
                hashed += len(part).to_bytes(8, "little") + part
            state = groups.setdefault(rest.split("/")[0], [0, 0, 0])
            digest = hashlib.sha256(hashed + body).digest()
            state[0], state[1], state[2] = state[0] + 1, state[1] + len(body), add(state[2], digest)
    for table in manifest["tables"]:
        rows, total = tables.get(table["table"]["name"], [0, 0])
        table.update(rows=rows, sha256=total.to_bytes(32, "little").hex())
    manifest["files"] = {
        name: {"entries": count, "bytes": size, "sha256": total.to_bytes(32, "little").hex()}
        for name, (count, size, total) in groups.items()
    }
    found["manifest.json"] = (info, json.dumps(manifest).encode())


BAD = {
    "a newer format": (change_version, "9.9.9"),
    "a newer schema": (change_schema, "9.9.9"),
    "a changed row": (change_row, "projects"),
    "missing rows": (drop_rows, "events"),
    "a changed file": (change_file, "manifest"),
    "other permissions": (change_mode, "manifest"),
    "no manifest": (drop_manifest, "cut off"),
    "a path that leads out": (put_after("home/agents/../../escaped"), "path"),
    "an absolute path": (put_after("/tmp/escaped"), "belong"),
    "a file of the server's own": (put_after("home/admin.token"), "part of a home"),
    "a link in the place of a workspace": (put_after("home/agents/x", tarfile.SYMTYPE, b"", "/etc"), "folder"),
    "a hard link": (put_after("home/agents/a/b", tarfile.LNKTYPE, b"", "/etc/passwd"), "not a file"),
    "a device": (put_after("home/agents/a/b", tarfile.CHRTYPE, b""), "not a file"),
    "a file that is not listed": (put_after("home/agents/quick/more"), "manifest"),
    "a file through a link": (link_then_write, "cannot be written"),
    "a file twice": (twice, "cannot be written"),
    "a row that is none": (broken_row, "tokens"),
}


def test_a_backup_that_was_written_again_as_it_is_is_good(backup, tmp_path):
    """So that each of the bad ones below is refused for what is bad about it."""
    rewrite(backup[0], tmp_path / "same", recount)
    fresh(tmp_path).cli("restore", str(tmp_path / "same"))


@pytest.mark.parametrize("what", BAD)
def test_a_bad_backup_is_refused_and_nothing_is_changed(backup, tmp_path, what):
    change, said = BAD[what]
    rewrite(backup[0], tmp_path / "bad", change)
    new = fresh(tmp_path)
    done = new.cli("restore", str(tmp_path / "bad"), "--json", check=False)
    assert done.returncode == 1, done.stdout
    assert said in json.loads(done.stdout)["error"]["message"], done.stdout
    assert not [name for name, content in tree(new.home).items() if content is not None]
    assert not (tmp_path / "escaped").exists() and not os.path.exists("/tmp/oubliette-escaped")
    # The home can be used for a good one.
    new.cli("restore", str(backup[0]))


def test_a_cut_or_flipped_file_is_refused(backup, tmp_path):
    whole = backup[0].read_bytes()
    bad = {
        "half": whole[: len(whole) // 2],
        "without its end": whole[:-1],
        "with something after it": whole + b"x",
        "with a flipped bit": whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :],
    }
    new = fresh(tmp_path)
    for what, content in bad.items():
        (tmp_path / "bad").write_bytes(content)
        done = new.cli("restore", str(tmp_path / "bad"), check=False)
        assert done.returncode == 1 and "backup" in done.stderr, (what, done.stderr)
        assert not any(new.home.iterdir()), what
    done = new.cli("restore", str(tmp_path / "none"), check=False)
    assert done.returncode == 1 and "none" in done.stderr


def test_a_file_that_is_no_backup_is_said_to_be_none(backup, tmp_path):
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("notes.txt"))
    bad = {
        "nothing": b"",
        "text": b"hello",
        "a long text": b"hello\n" * 10_000,
        "a database": b"SQLite format 3\x00" + bytes(8192),
        "a compressed text": gzip.compress(b"not a tar"),
        "zeros": gzip.compress(bytes(1 << 20)),
        "another archive": other.getvalue(),
        "an archive that is not compressed": gzip.decompress(backup[0].read_bytes()),
        "the first bytes of a backup": backup[0].read_bytes()[:20],
    }
    new = fresh(tmp_path)
    for what, content in bad.items():
        (tmp_path / "bad").write_bytes(content)
        done = new.cli("restore", str(tmp_path / "bad"), check=False)
        assert done.returncode == 1 and "is not a backup" in done.stderr and "`oubliette backup FILE`" in done.stderr, (what, done.stderr)
        assert not any(new.home.iterdir()), what
    done = new.cli("restore", str(tmp_path), check=False)
    assert done.returncode == 1 and "is not a file" in done.stderr, done.stderr
    new.cli("restore", str(backup[0]))


def test_an_archive_that_claims_or_holds_too_much_is_refused_within_bounds(backup, tmp_path):
    """An entry of rows that says it has terabytes, and zeros that compress a thousandfold."""
    found = entries(backup[0])
    header = found["backup.json"]
    huge = tarfile.TarInfo("database/events/0.jsonl")
    huge.size = 1 << 42
    zeros = tarfile.TarInfo("home/agents/a/zeros")
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    zeros.size = free + (1 << 30)
    for name, entry in (("huge", huge), ("zeros", zeros)):
        file = tmp_path / name
        with gzip.open(file, "wb", compresslevel=1) as out:
            out.write(header[0].tobuf(tarfile.GNU_FORMAT) + header[1] + bytes(-len(header[1]) % 512))
            out.write(entry.tobuf(tarfile.GNU_FORMAT))
            out.write(bytes(1 << 20))
        new = fresh(tmp_path, f"home-{name}")
        command = [BIN / "oubliette", "--home", new.home, "restore", file]
        done = subprocess.run(
            ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "-", *command],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env={**os.environ, **stores.env(new.home)},
        )
        assert done.returncode == 1 and ("too large" in done.stderr or "room" in done.stderr), done.stderr


def test_a_cancelled_backup_leaves_nothing(filled, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    file = folder / "b"
    workspace = filled.server.home / "projects" / filled.project / "workspaces" / filled.workspace
    # Large enough that it is still being packed when the signal comes.
    with (workspace / "large").open("wb") as large:
        for _ in range(64):
            large.write(os.urandom(1 << 20))
    try:
        command = [BIN / "oubliette", "--home", filled.server.home, "backup", file]
        process = subprocess.Popen(command, env={**os.environ, **stores.env(filled.server.home)}, stderr=subprocess.PIPE)
        wait_until(lambda: list(folder.iterdir()), "the temporary file")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE) == 1
        assert b"cancelled" in process.stderr.read()
        assert not list(folder.iterdir())
    finally:
        (workspace / "large").unlink()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(filled, tmp_path):
    workspace = filled.server.home / "projects" / filled.project / "workspaces" / filled.workspace
    for place, said in (
        (tmp_path / "no" / "b", "cannot write"),
        (tmp_path, "not a file"),
        (workspace / "b", "outside"),
    ):
        done = filled.server.cli("backup", str(place), check=False)
        assert done.returncode == 1 and said in done.stderr, (place, done.stderr)
    done = Server(tmp_path / "empty").cli("backup", str(tmp_path / "b"), check=False)
    assert done.returncode == 1 and not (tmp_path / "b").exists(), done.stderr


def test_commands_on_the_home_do_not_act_on_a_server_elsewhere(filled, tmp_path):
    for command in (["backup", "x"], ["restore", "x"], ["store", "copy", "--to", "sqlite:x"]):
        env = {**os.environ, "OUBLIETTE_TOKEN": filled.admin}
        done = Server(tmp_path / "h").cli("--url", filled.server.url, *command, check=False, env=env)
        assert done.returncode == 1 and "home directory" in done.stderr


# -- store copy ---------------------------------------------------------------------------------------


def copied_home(filled, backup, tmp_path) -> Server:
    """A stopped home that has everything."""
    new = fresh(tmp_path, "source")
    new.cli("restore", str(backup[0]))
    return new


def test_the_store_is_copied_and_the_copy_is_used(filled, backup, tmp_path):
    file, made, seen = backup
    source = copied_home(filled, backup, tmp_path)
    target = tmp_path / "copy.db"
    copied = source.cli_json("store", "copy", "--to", f"sqlite:{target}")
    assert copied["tables"] == made["tables"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    again = source.cli("store", "copy", "--to", f"sqlite:{target}", check=False)
    assert again.returncode == 1 and "not empty" in again.stderr
    # In the place of the home's database, whichever it was.
    for suffix in ("", "-wal", "-shm"):
        (source.home / f"oubliette.db{suffix}").unlink(missing_ok=True)
    target.rename(source.home / "oubliette.db")
    source.env.update(OUBLIETTE_STORE_URL="")
    source.start()
    try:
        assert filled.look(source) == seen
    finally:
        source.stop()


@pytest.mark.skipif(not stores.ON_POSTGRES, reason="runs with OUBLIETTE_TEST_STORE=postgres")
def test_a_store_moves_to_postgresql_and_back(filled, backup, tmp_path):
    file, made, seen = backup
    in_file = {**os.environ, "OUBLIETTE_STORE_URL": ""}
    source = fresh(tmp_path, "source")
    # A backup of PostgreSQL into SQLite.
    source.cli("restore", str(file), env=in_file)
    assert (source.home / "oubliette.db").exists()
    url = stores.url(tmp_path / "target")
    copied = json.loads(source.cli("store", "copy", "--to", url, "--json", env=in_file).stdout)
    # In the file's home definitions are files; `look` below finds them in the database again.
    moved = {"counters", "definitions", "definition_files"}
    same = lambda tables: [table for table in tables if table["table"] not in moved]
    assert same(copied["tables"]) == same(made["tables"])
    source.env.update(OUBLIETTE_STORE_URL=url)
    (source.home / "oubliette.db").rename(tmp_path / "old.db")
    source.start()
    try:
        assert filled.look(source) == seen
        refused = source.cli("store", "copy", "--to", f"sqlite:{tmp_path}/x", check=False, env={**os.environ, "OUBLIETTE_STORE_URL": url})
        assert refused.returncode == 1 and "running" in refused.stderr
    finally:
        source.stop()
    # And back into the file of the same home.
    back = source.cli(
        "store", "copy", "--to", f"sqlite:{source.home}/oubliette.db", "--json", env={**os.environ, "OUBLIETTE_STORE_URL": url}
    )
    source.env.update(OUBLIETTE_STORE_URL="")
    source.start()
    try:
        assert filled.look(source) == seen
    finally:
        source.stop()
    assert json.loads(back.stdout)["rows"] >= copied["rows"]


def test_a_copy_to_nowhere_or_of_a_running_server_is_refused(filled, tmp_path):
    done = filled.server.cli("store", "copy", "--to", f"sqlite:{tmp_path}/x.db", check=False)
    assert done.returncode == 1 and "running" in done.stderr
    empty = Server(tmp_path / "empty")
    empty.cli("project", "list")
    for url, said in (
        ("mysql://me:hunter2@h/d", "sqlite:FILE"),
        ("postgres://me:hunter2@127.0.0.1:1/d", "check host and port"),
        ("sqlite:", "names no file"),
        (f"sqlite:{tmp_path}/no/x.db", "x.db"),
    ):
        done = empty.cli("store", "copy", "--to", url, check=False)
        assert done.returncode == 1 and said in done.stderr and "hunter2" not in done.stderr, (url, done.stderr)
    (tmp_path / "other.db").write_text("something else")
    done = empty.cli("store", "copy", "--to", f"sqlite:{tmp_path}/other.db", check=False)
    assert done.returncode == 1 and (tmp_path / "other.db").read_text() == "something else", done.stderr
    if not stores.ON_POSTGRES:
        done = empty.cli("store", "copy", "--to", f"sqlite:{empty.home}/oubliette.db", check=False)
        assert done.returncode == 1 and "to be copied" in done.stderr


def test_a_copy_that_is_killed_leaves_nothing_and_is_made_again(filled, backup, tmp_path):
    source = copied_home(filled, backup, tmp_path)
    target = tmp_path / "copy.db"
    command = [BIN / "oubliette", "--home", source.home, "store", "copy", "--to", f"sqlite:{target}"]
    process = subprocess.Popen(command, env={**os.environ, **stores.env(source.home)})
    wait_until(lambda: (tmp_path / "copy.db.loading").exists() or process.poll() is not None, "the copy to begin")
    process.kill()
    process.wait()
    if not target.exists():
        source.cli("store", "copy", "--to", f"sqlite:{target}")
    assert target.exists() and not (tmp_path / "copy.db.loading").exists()


@pytest.mark.skipif(not stores.ON_POSTGRES, reason="runs with OUBLIETTE_TEST_STORE=postgres")
def test_a_server_whose_database_was_taken_over_stops_with_an_error():
    with running() as server:
        admin = server.token("admin")
        assert server.metric(admin, "oubliette_database_bytes") > 1 << 20
        schema = stores.url(server.home).split("search_path]=")[1]
        stores.execute(f"UPDATE {schema}.server_lease SET epoch = epoch + 1")
        with pytest.raises((harness.ToolFailed, harness.httpx.TransportError)):
            server.api("project_create", admin, name="late")
        assert server.process.wait(timeout=DEADLINE) == 1
        assert "taken over" in server.log()

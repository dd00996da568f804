"""Several servers on one PostgreSQL are one Oubliette: sessions move when a server dies, and nothing is run or written twice."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

import harness
import stores
from harness import Server, ToolFailed, wait_until

pytestmark = pytest.mark.skipif(not stores.ON_POSTGRES, reason="runs with OUBLIETTE_TEST_STORE=postgres")

KEY = "a-cluster-key-of-the-tests"
# Within this time the sessions of a server that died belong to another.
TAKEOVER = 15.0
FAKETIME = next(pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
LONG = [[{"say": "working"}, {"sleep_ms": 600_000}], [{"say": "two"}], [{"say": "three"}]]


class Member(Server):
    """A server of a cluster: a home of its own, workspaces and a database that all share."""

    def __init__(self, folder: pathlib.Path, name: str, key: str = KEY, **env: str):
        super().__init__(folder / name)
        self.env = {"OUBLIETTE_STORE_URL": stores.url(folder), "CLUSTER_KEY": key, **env}
        workspaces = folder / "workspaces"
        workspaces.mkdir(exist_ok=True)
        (self.home / "projects").symlink_to(workspaces)
        (self.home / "oubliette.toml").write_text(
            f'[cluster]\nadvertise = "http://127.0.0.1:{self.port}"\nkey_env = "CLUSTER_KEY"\n'
        )

    def spawn(self) -> subprocess.Popen:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [harness.BIN / "oubliette", "--home", self.home, "serve", "--listen", f"127.0.0.1:{self.port}"],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def start(self) -> "Member":
        self.spawn()
        wait_until(self._ready, "the server to be ready")
        return self

    def signal(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)


class DatabaseLink:
    """The way of one server to the database, which can be cut: connections stay open, and nothing passes any more."""

    def __init__(self, folder: pathlib.Path):
        folder.mkdir()
        self.folder = folder
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(f"{stores.socket_dir()}/.s.PGSQL.5432")
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._open.clear()

    def restore(self) -> None:
        self._open.set()


class Cluster:
    """Servers on one database, and a project and an agent that all of them know."""

    def __init__(self, folder: pathlib.Path, size: int):
        self.folder = folder
        self.members = [Member(folder, f"m{number}") for number in range(size)]
        for member in self.members:
            member.start()
        self.admin = self.members[0].token("admin")
        self.project = self.members[0].api("project_create", self.admin, name="p")["project_id"]
        self.put_agent("long", LONG)

    def put_agent(self, slug: str, turns: list, **definition) -> None:
        for member in self.members:
            member.put_agent(slug, self.admin, turns, **definition)

    def begin(self, member: Server, agent: str = "long", text: str = "a") -> str:
        """A session that runs on this server, in the middle of its first turn."""
        id = member.api("session_message", self.admin, message=text, project_id=self.project, agent=agent)["session_id"]
        with member.events(id, self.admin) as events:
            events.until("delta")
        return id

    def owner(self, id: str) -> str | None:
        """The port of the server that runs a session, as the database says."""
        return self.sql(
            "SELECT s.address FROM SCHEMA.session_owners o JOIN SCHEMA.servers s USING (server_id) "
            f"WHERE o.root_id = '{id}'"
        ).rpartition(":")[2]

    def sql(self, text: str) -> str:
        schema = stores.url(self.folder).rpartition("=")[2]
        return stores.execute(text.replace("SCHEMA", schema))

    def wait_for_owner(self, id: str, member: Server, deadline: float = TAKEOVER) -> None:
        wait_until(lambda: self.owner(id) == str(member.port), "the session's new server", deadline)

    def log_of(self, member: Server, id: str) -> list[dict]:
        return member.api("session_events", self.admin, session_id=id, max_events=1000)["events"]

    def stop(self) -> None:
        for member in self.members:
            if member.process and member.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    member.signal(signal.SIGCONT)
                member.stop()


@contextlib.contextmanager
def cluster(size: int = 2) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        made = Cluster(pathlib.Path(folder), size)
        try:
            yield made
        except BaseException:
            # Shown with the failure.
            for member in made.members:
                print(f"--- {member.home.name} on port {member.port}\n{member.log()}")
            raise
        finally:
            made.stop()


def check_log(log: list[dict], seen: list[dict]) -> None:
    """No hole, no repeat, and everything that was shown is there as it was shown."""
    assert [event["index"] for event in log] == list(range(len(log)))
    assert log[: len(seen)] == seen


def test_sessions_of_a_killed_server_are_anothers_and_accepted_messages_run():
    with cluster(2) as c:
        one, two = c.members
        id = c.begin(one)
        with one.events(id, c.admin) as events:
            events.until("delta")
            seen = list(events.seen)
        for turn, text in ((2, "b"), (3, "c")):
            assert one.api("session_message", c.admin, message=text, session_id=id)["turn"] == turn
        began = time.monotonic()
        one.kill()
        with two.events(id, c.admin) as events:
            events.until("turn_completed", turn=3, deadline=harness.DEADLINE + TAKEOVER)
            took = time.monotonic() - began
            followed = list(events.seen)
        assert c.owner(id) == str(two.port)
        log = c.log_of(two, id)
        check_log(log, seen)
        check_log(followed, seen)
        told = [event["text"] for event in log if event["type"] == "message"]
        assert [text for text in told if text in "abc"] == ["a", "b", "c"]
        assert told[-1] == "three", "in order, and the one that was cut short is not run again"
        assert any(event["type"] == "error" and "turn 1" in event["message"] for event in log)
        print(f"took over, and ran two turns, in {took:.1f} s")


def test_a_frozen_server_loses_its_sessions_and_starts_anew_when_it_wakes():
    with cluster(2) as c:
        one, two = c.members
        id = c.begin(one)
        pid = one.process.pid
        before = c.sql("SELECT string_agg(server_id, ' ') FROM SCHEMA.servers")
        one.signal(signal.SIGSTOP)
        began = time.monotonic()
        c.wait_for_owner(id, two)
        assert time.monotonic() - began < TAKEOVER
        with two.events(id, c.admin) as events:
            events.until("status", status="idle")
        one.signal(signal.SIGCONT)
        # The same process, a new server: what it ran before is gone from it.
        wait_until(lambda: c.sql(f"SELECT COUNT(*) FROM SCHEMA.servers WHERE NOT '{before}' LIKE '%' || server_id || '%'") == "1", "the server to join anew")
        wait_until(one._ready, "the server to be ready again")
        assert one.process.pid == pid and one.process.poll() is None
        assert c.owner(id) == str(two.port)
        answer = two.api("session_message", c.admin, message="b", session_id=id, wait=True)
        assert answer["text"] == "two"
        check_log(c.log_of(one, id), [])
        assert "declared dead" in one.log() or "taken over" in one.log()


def test_a_server_whose_database_connections_are_cut_again_and_again_keeps_its_sessions():
    """Broken connections are made anew, and nothing is lost or repeated."""
    with cluster(2) as c:
        one, two = c.members
        c.put_agent("talk", [[{"say": f"{number} "} for number in range(50)]])
        id = one.api("session_message", c.admin, message="a", project_id=c.project, agent="talk", wait=True)["session_id"]
        for turn in range(2, 5):
            schema = stores.url(c.folder).rpartition("=")[2]
            stores.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'oubliette srv_%' "
                f"AND pid <> pg_backend_pid() AND application_name LIKE '%' || (SELECT server_id FROM {schema}.servers ORDER BY 1 LIMIT 1) || '%'"
            )
            wait_until(lambda: says(one, c, id), "the next turn")
        log = c.log_of(two, id)
        check_log(log, [])
        assert c.owner(id) == str(one.port)


def says(server: Server, c: Cluster, id: str) -> bool:
    try:
        return bool(server.api("session_message", c.admin, message="more", session_id=id, wait=True)["text"])
    except ToolFailed as error:
        assert error.code == "unavailable", error
        return False


def test_a_server_cut_off_from_the_database_refuses_stops_its_agents_and_comes_back():
    with cluster(1) as c:
        two = c.members[0]
        one = Member(c.folder, "cut")
        link = DatabaseLink(c.folder / "link")
        one.env["OUBLIETTE_STORE_URL"] = stores.url(c.folder).replace(stores.socket_dir(), str(link.folder))
        c.members.append(one.start())
        one.put_agent("long", c.admin, LONG)
        id = c.begin(one)
        agents = descendants(one.process.pid)
        assert agents
        began = time.monotonic()
        link.cut()
        # It stops its agents before another server has the session.
        wait_until(lambda: not agents & running_processes().keys(), "the agents to be stopped", TAKEOVER)
        assert c.owner(id) == str(one.port)
        with pytest.raises(ToolFailed) as refused:
            one.api("project_list", c.admin)
        assert refused.value.code == "unavailable"
        assert harness.get(f"{one.url}/ready").status_code == 503
        c.wait_for_owner(id, two)
        assert time.monotonic() - began < TAKEOVER
        with two.events(id, c.admin) as events:
            events.until("status", status="idle")
        link.restore()
        wait_until(one._ready, "the server to be ready again")
        assert two.api("session_message", c.admin, message="b", session_id=id, wait=True)["text"] == "two"
        check_log(c.log_of(one, id), [])


def test_a_server_that_stops_leaves_its_sessions_at_once():
    with cluster(3) as c:
        one, two, _ = c.members
        id = c.begin(one)
        assert one.api("session_message", c.admin, message="b", session_id=id)["turn"] == 2
        assert one.stop() == 0
        with two.events(id, c.admin) as events:
            events.until("turn_completed", turn=2)
        check_log(c.log_of(two, id), [])
        assert c.owner(id) in {str(member.port) for member in c.members[1:]}
        assert c.sql("SELECT COUNT(*) FROM SCHEMA.servers") == "2"


def test_two_of_three_servers_die_and_the_third_runs_everything():
    with cluster(3) as c:
        ids = [c.begin(member) for member in c.members]
        for member in c.members[:2]:
            member.kill()
        last = c.members[2]
        for id in ids:
            c.wait_for_owner(id, last)
        for id in ids[:2]:
            with last.events(id, c.admin) as events:
                events.until("status", status="idle")
            assert last.api("session_message", c.admin, message="b", session_id=id, wait=True)["text"] == "two"
            check_log(c.log_of(last, id), [])


def test_keys_and_approvals_of_a_dead_servers_sessions_end():
    with cluster(2) as c:
        one, two = c.members
        project = one.api("project_create", c.admin, name="keyed", api_key={"scope": "write"})["project_id"]
        c.put_agent("asks", [[{"say": "asking"}, {"call": {"tool": "project_list", "arguments": {}}}]], tools={"ask": ["project_list"]})
        id = one.api("session_message", c.admin, message="a", project_id=project, agent="asks")["session_id"]
        with one.events(id, c.admin) as events:
            asked = events.until("approval_requested")
        one.kill()
        with two.events(id, c.admin) as events:
            decided = events.until("approval_decided", approval_id=asked["approval_id"], deadline=harness.DEADLINE)
            assert decided["decision"] == "cancelled"
            events.until("status", status="idle")
        assert c.sql(f"SELECT COUNT(*) FROM SCHEMA.tokens WHERE session_id = '{id}'") == "0"


def test_a_token_revoked_on_one_server_is_refused_by_the_other_at_once():
    with cluster(2) as c:
        one, two = c.members
        made = one.cli_json("token", "create", "--name", "t", "--scope", "read")
        for member in c.members:
            assert member.api("project_list", made["token"])
        id = c.begin(one)
        with two.events(id, made["token"]) as events:
            events.until("delta")
            one.api("token_revoke", c.admin, token_id=made["token_id"])
            with pytest.raises(ToolFailed) as refused:
                two.api("project_list", made["token"])
            assert refused.value.status == 401
            with pytest.raises((AssertionError, EOFError, StopIteration)):
                events.until("turn_completed", deadline=10)


def test_sessions_of_a_project_are_counted_together():
    with cluster(2) as c:
        project = c.members[0].api("project_create", c.admin, name="few", limits={"max_sessions": 2})["project_id"]
        started, refused = 0, 0
        for number in range(6):
            try:
                c.members[number % 2].api("session_message", c.admin, message="a", project_id=project, agent="long")
                started += 1
            except ToolFailed as error:
                assert error.code == "limit_exceeded", error
                refused += 1
        assert (started, refused) == (2, 4)


@pytest.mark.skipif(not FAKETIME, reason="needs faketime")
def test_a_clock_an_hour_off_changes_nothing():
    with cluster(1) as c:
        one = c.members[0]
        late = Member(c.folder, "late", LD_PRELOAD=str(FAKETIME), FAKETIME="+1h", FAKETIME_DONT_FAKE_MONOTONIC="1")
        c.members.append(late.start())
        late.put_agent("long", c.admin, LONG)
        id = c.begin(late)
        wait_until(lambda: c.sql("SELECT MAX(last_seen) - MIN(last_seen) < 8000 FROM SCHEMA.servers") == "t", "both to be heard of")
        assert c.sql("SELECT COUNT(*) FROM SCHEMA.servers") == "2"
        late.kill()
        c.wait_for_owner(id, one)
        check_log(c.log_of(one, id), [])


def refused_start(member: Server, *, env: dict[str, str]) -> str:
    command = [harness.BIN / "oubliette", "--home", member.home, "serve", "--listen", f"127.0.0.1:{member.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.DEADLINE, env={**os.environ, **member.env, **env})
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_what_does_not_fit_is_refused_with_the_remedy(tmp_path):
    with cluster(1) as c:
        one = c.members[0]
        alone = Server(c.folder / "alone", env={"OUBLIETTE_STORE_URL": stores.url(c.folder)})
        error = refused_start(alone, env={})
        assert "shared by a cluster" in error and "[cluster] section" in error, error
        other = Member(c.folder, "other", key="another-key-of-the-tests")
        error = refused_start(other, env={})
        assert "another cluster key" in error and "stop all of them" in error, error
        error = refused_start(other, env={"CLUSTER_KEY": "short"})
        assert "shorter than 16 characters" in error, error
        error = refused_start(other, env={"CLUSTER_KEY": ""})
        assert "CLUSTER_KEY is not set" in error, error
        error = refused_start(other, env={"OUBLIETTE_STORE_URL": ""})
        assert "[store] url" in error, error
        same_home = Member.__new__(Member)
        same_home.__dict__.update(one.__dict__, port=harness.free_port())
        error = refused_start(same_home, env={})
        assert "running" in error or "in use" in error, error
        # Members go, one server alone comes; then no member may.
        one.stop()
        alone.start()
        try:
            error = refused_start(one, env={})
            assert "has no [cluster] section" in error, error
        finally:
            alone.stop()


def test_agents_of_a_server_that_lost_its_sessions_do_not_run_on():
    with cluster(2) as c:
        one, two = c.members
        id = c.begin(one)
        agents = descendants(one.process.pid)
        assert agents
        one.signal(signal.SIGSTOP)
        c.wait_for_owner(id, two)
        with two.events(id, c.admin) as events:
            events.until("status", status="idle")
        one.signal(signal.SIGCONT)
        wait_until(lambda: not agents & running_processes().keys(), "the agents of the fenced server to be gone")


def running_processes() -> dict[int, int]:
    """Every process that has not ended, and its parent."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text().rpartition(") ")[2].split()[:2]
            if state not in "ZX":
                found[int(entry.parent.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    parents, found = running_processes(), {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}

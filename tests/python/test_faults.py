"""What the server promised holds when it is killed, when its disk is full or fails, and when its clock jumps.

The kill rounds are the short form of `soak.py`. `OUBLIETTE_FAULT_ROUNDS` says how many, `OUBLIETTE_FAULT_SEED` repeats
what was sent and when the server was killed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import os
import pathlib
import random
import tempfile
import threading

import pytest

import fault_check
import fault_machine
import fault_observe
import harness
import soak
from fault_check import PROMISES
from fault_history import Connection, Refused, ServerGone
from fault_injection import Clock, SmallDisk, failed_syncs, failing_fsync, small_disk
from fault_load import CONFIG, Load
from fault_machine import KilledServer
from harness import ToolFailed, wait_until

ROUNDS = int(os.environ.get("OUBLIETTE_FAULT_ROUNDS", "24"))
SEED = os.environ.get("OUBLIETTE_FAULT_SEED") or str(random.SystemRandom().randrange(10**9))
LAUNCH_KILLS = 12
START_KILLS = 40


@pytest.fixture
def folder():
    """A folder with a short path: a session's socket lies below it."""
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def processes():
    """Everything that servers of this test start stays below this process until it ends."""
    processes = fault_machine.Processes()
    yield processes
    processes.close()


@pytest.fixture
def clock(folder):
    Clock.remove_leftovers()
    yield Clock(folder)
    Clock.remove_leftovers()


# -- kill -9 at random moments -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def rounds():
    """The kill rounds, run once; each promise is a test of its own."""
    summary = soak.Soak(SEED).run(ROUNDS)
    print(summary.text())
    return summary


def test_the_rounds_had_something_to_lose(rounds):
    """A round without load proves nothing: requests were acknowledged, some were cut off, and events were shown."""
    assert rounds.rounds == ROUNDS and rounds.kills >= ROUNDS
    assert rounds.acknowledged > 2 * ROUNDS and rounds.unknown > 0 and rounds.shown > 2 * ROUNDS
    unknown = {violation.kind for _, violation in rounds.violations} - set().union(*PROMISES.values())
    assert not unknown, "every kind of violation belongs to a promise"


@pytest.mark.parametrize("promise", PROMISES)
def test_after_kill_9(rounds, promise):
    """The server is killed at random moments under load; after each restart this promise still holds."""
    found = [f"round {n}: {violation}" for n, violation in rounds.violations if violation.kind in PROMISES[promise]]
    assert not found, f"seed {SEED}: {len(found)} violations\n" + "\n".join(found[:20])


def test_a_server_killed_while_sandboxes_start_leaves_no_process(folder, processes):
    """The server is killed in the moment sandboxes start: all their processes end, without another start of the server."""
    server = KilledServer(folder / "h").start()
    chance = random.Random(SEED)
    try:
        owner = Connection(server.port, server.token("admin"))
        policy = {"name": "shell_exec", "allowedCommands": ["true"]}
        owner.tool("catalog_put", id="shell", definition={"id": "shell", "kind": "builtin", "builtinPolicy": policy})
        define_hello(owner, tools={"use": ["shell"]})
        project = owner.tool("project_create", name="p")["project_id"]
        session = owner.tool("session_message", message="hi", project_id=project, agent="hello", wait=True)[
            "session_id"
        ]
        call = {"session_id": session, "tool": "@shell/shell_exec", "arguments": {"argv": ["true"]}}
        for n in range(LAUNCH_KILLS):
            launched = threading.Event()

            def launch(_: int) -> None:
                connection = Connection(server.port, owner.token)
                with contextlib.suppress(ServerGone, Refused):
                    while True:
                        connection.tool("tool_call", **call)
                        launched.set()
                connection.close()

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                for thread in range(8):
                    pool.submit(launch, thread)
                assert launched.wait(harness.DEADLINE), "sandboxes start"
                fault_machine.pause(chance.uniform(0, 0.1))
                processes.killed.add(server.process.pid)
                server.kill()
            left = fault_machine.left_running(processes, server)
            assert not left, f"seed {SEED}: kill {n + 1} of {LAUNCH_KILLS} left {len(left)} processes\n" + "\n".join(
                left
            )
            server.start()
    finally:
        server.kill()


def test_a_server_killed_while_it_starts_leaves_no_process(folder, processes):
    """The server is killed while it tries out what sandboxes can do here: nothing of that runs on, and it starts again."""
    server = KilledServer(folder / "h").start()
    chance = random.Random(SEED)
    try:
        for _ in range(START_KILLS):
            processes.killed.add(server.process.pid)
            server.kill()
            server.spawn()
            fault_machine.wait_for_first_child(server)
            fault_machine.pause(chance.uniform(0, 0.004))
        server.kill()
        left = fault_machine.left_running(processes, server)
        assert not left, f"seed {SEED}: {START_KILLS} kills left {len(left)} processes\n" + "\n".join(left)
        server.start()
        assert fault_machine.integrity(server.database) == ["ok"]
    finally:
        server.kill()


# -- a full disk -------------------------------------------------------------------------------------


def test_a_full_disk_is_a_clear_error_and_nothing_acknowledged_is_lost(folder):
    """The home's disk fills up: writes are refused with `unavailable`, reads go on, and with space all works again."""
    with small_disk(folder / "m", megabytes=48) as disk:
        server = KilledServer(folder / "m" / "h")
        server.log_file = folder / "server.log"
        server.start()
        try:
            owner = Connection(server.port, server.token("admin"))
            define_hello(owner)
            made = owner.tool("project_create", name="p", description="before")
            project, workspace = made["project_id"], made["default_workspace_id"]
            session = owner.tool("session_message", message="1", project_id=project, agent="hello", wait=True)[
                "session_id"
            ]
            file = f"/api/workspaces/{workspace}/files/a.txt"
            assert owner.request("PUT", file, b"before")[0] == 200

            disk.fill()
            token_names = write_until_refused(owner, disk)
            large = "x" * 9_000
            description = "before"
            for n in range(1000):
                disk.fill()
                try:
                    owner.tool("project_update", project_id=project, description=f"{n} {large}")
                    description = f"{n} {large}"
                except Refused as error:
                    assert error.code == "unavailable"
                    break
            else:
                pytest.fail("a full disk took a thousand large writes")
            status, text = owner.request("PUT", file, b"after" * 100_000)
            assert status == 503 and b"unavailable" in text, text
            assert owner.request("GET", "/health")[0] == 200
            assert owner.request("GET", file) == (200, b"before")
            assert owner.tool("session_get", session_id=session)["status"] == "idle"
            with pytest.raises(Refused) as refused:
                for n in range(1000):
                    disk.fill()
                    owner.tool("session_message", message=f"full {n} {large}", session_id=session)
            assert refused.value.code in ("unavailable", "limit_exceeded")
            assert server.process.poll() is None, server.log()

            # Killed while the disk is full, it starts, or says what is wrong.
            server.kill()
            owner.close()
            server.spawn()
            wait_until(lambda: server.process.poll() is not None or server.is_up(), "the server to start or to give up")
            if server.process.poll() is not None:
                assert "full" in server.log().splitlines()[-1], server.log()
                disk.free()
                server.start()
            else:
                disk.free()
            wait_until(server._ready, "the server to be ready with space on its disk")

            assert owner.tool("project_get", project_id=project)["description"] == description
            names = [row["name"] for row in owner.pages("token_list", "tokens")]
            assert [names.count(name) for name in token_names] == [1] * len(token_names)
            assert owner.request("PUT", file, b"after")[0] == 200
            assert owner.request("GET", file) == (200, b"after")
            done = owner.tool("session_message", message="2", session_id=session, wait=True)
            assert done["text"] == "hello"
            events = owner.log("session_events", session_id=session)
            assert [event["index"] for event in events] == list(range(len(events)))
            texts = [event["text"] for event in fault_check.user_messages(events)]
            assert len(texts) == len(set(texts)), "no message ran twice"
            assert fault_machine.integrity(server.database) == ["ok"]
            assert server.stop() == 0
        finally:
            server.kill()


def test_a_disk_that_fills_up_under_load_loses_nothing(folder, processes):
    """The disk fills up while many clients write, and is freed again: the server lives, and kept what it acknowledged."""
    with small_disk(folder / "m", megabytes=96) as disk:
        server = KilledServer(folder / "m" / "h", CONFIG)
        server.log_file = folder / "server.log"
        server.start()
        load = Load(server, SEED)
        try:
            load.gate.open()
            wait_until(lambda: acknowledged(load) > 40, "the load to be under way")
            disk.fill()
            wait_until(lambda: fill_and_count(disk, load) > 10, "clients to be refused")
            assert Connection(server.port, "").request("GET", "/health")[0] == 200
            disk.free()
            before = acknowledged(load)
            wait_until(lambda: acknowledged(load) > before + 40, "the load to go on")
            assert server.process.poll() is None, server.log()
            found = check_after_kill(load, processes)
            assert not found, f"seed {SEED}: {len(found)} violations\n" + "\n".join(map(str, found[:20]))
        finally:
            load.killing = True
            load.stop()
            server.kill()
            processes.end(processes.left(server))


# -- a failing fsync ---------------------------------------------------------------------------------


def test_what_cannot_be_synchronised_is_not_acknowledged(folder):
    """Every fsync fails: tokens, definitions and files are refused, old values stay, `/ready` says so; then all works."""
    server = KilledServer(folder / "h").start()
    try:
        owner = Connection(server.port, server.token("admin"))
        define_hello(owner)
        made = owner.tool("project_create", name="p")
        file = f"/api/workspaces/{made['default_workspace_id']}/files/a.txt"
        assert owner.request("PUT", file, b"before")[0] == 200
        kept = owner.tool("token_create", name="kept", scope="read")

        trace = folder / "trace"
        with failing_fsync(server.process.pid, trace):
            for n in range(3):
                with pytest.raises(Refused) as refused:
                    owner.tool("token_create", name=f"refused-{n}", scope="read")
                assert refused.value.code == "unavailable"
            with pytest.raises(Refused) as refused:
                owner.tool("project_create", name="refused")
            assert refused.value.code == "unavailable"
            with pytest.raises(Refused) as refused:
                owner.tool("agent_put", slug="hello", definition={"name": "other", "prompt": "other"})
            assert refused.value.code in ("unavailable", "internal")
            status, text = owner.request("PUT", file, b"after")
            assert status in (500, 503), text
            assert owner.request("GET", file) == (200, b"before")
            assert owner.request("GET", "/health")[0] == 200
            assert owner.request("GET", "/ready")[0] == 503
            assert reads(server, kept["token"]) == 200
        assert failed_syncs(trace) >= 6

        wait_until(server._ready, "the server to be ready when its disk works again")
        after = owner.tool("token_create", name="after", scope="read")
        assert owner.request("PUT", file, b"after")[0] == 200
        server.kill()
        owner.close()
        server.start()
        assert [reads(server, made["token"]) for made in (kept, after)] == [200, 200]
        assert owner.request("GET", file) == (200, b"after")
        assert owner.tool("agent_get", slug="hello")["name"] == "hello"
        names = [row["name"] for row in owner.pages("token_list", "tokens")]
        assert all(names.count(name) <= 1 for name in names if name.startswith("refused")), names
        assert fault_machine.integrity(server.database) == ["ok"]
    finally:
        server.kill()


def test_a_disk_that_fails_now_and_then_loses_nothing_acknowledged(folder, processes):
    """Every second fsync fails under load: each request is refused or kept, and nothing is there twice."""
    server = KilledServer(folder / "h", CONFIG).start()
    load = Load(server, SEED)
    try:
        load.gate.open()
        wait_until(lambda: acknowledged(load) > 20, "the load to be under way")
        trace = folder / "trace"
        with failing_fsync(server.process.pid, trace, when="2+2"):
            # Few: strace stops the server at every system call, not just at these.
            before = acknowledged(load)
            wait_until(lambda: refused_as(load, "unavailable") > 5, "clients to be refused")
            wait_until(lambda: acknowledged(load) > before + 10, "the load to go on")
        assert failed_syncs(trace) > 5
        found = check_after_kill(load, processes)
        assert not found, f"seed {SEED}: {len(found)} violations\n" + "\n".join(map(str, found[:20]))
    finally:
        load.killing = True
        load.stop()
        server.kill()
        processes.end(processes.left(server))


# -- a clock that jumps ------------------------------------------------------------------------------


def test_a_session_goes_on_while_the_clock_jumps(folder, clock):
    """The clock jumps a day ahead and an hour back during a turn: nothing times out or hangs, and logs keep their order."""
    server = harness.Server(folder / "h", env=clock.env).start()
    try:
        admin = server.token("admin")
        server.put_agent("caller", admin, [[{"call": {"tool": "app_note", "arguments": {}}}, {"say": "noted"}]])
        project = server.api("project_create", admin, name="p")["project_id"]
        hour = server.api("token_create", admin, name="hour", scope="read", expires_in="1h")["token"]
        month = server.api("token_create", admin, name="month", scope="read", expires_in="30d")["token"]
        context = {"caller_id": "app", "caller_tools": [{"name": "note"}]}
        send = {"message": "go", "project_id": project, "agent": "caller", "context": context}
        session = server.api("session_message", admin, **send)["session_id"]
        sessions = [session]
        with server.events(session, hour) as watching, server.events(session, admin, caller_id="app") as events:
            for turn, offset in enumerate(("+1d", "-1h", "+1d", "+0"), start=1):
                request = events.until("caller_tool_request")
                clock.set(offset)
                check_clock(server, admin, offset)
                if offset == "+1d":
                    assert reads(server, hour) == 401
                if turn == 1:
                    with pytest.raises(EOFError):
                        while True:
                            watching.next()
                assert reads(server, month) == 200
                fresh = server.api("token_create", admin, name=f"fresh{turn}", scope="read", expires_in="10m")
                assert reads(server, fresh["token"]) == 200
                page = server.api(
                    "session_events", admin, session_id=session, since_index=request["index"], wait_ms=300
                )
                assert not any(event["type"] == "caller_tool_done" for event in page["events"]), "it did not time out"
                answer = {"session_id": session, "request_id": request["request_id"], "result": {"n": turn}}
                assert server.api("caller_tool_response", admin, **answer) == {"resolved": True}
                assert events.until("turn_completed", turn=turn)["text"] == "noted"
                server.put_agent("hello", admin, [[{"say": "hello"}]])
                other = server.api("session_message", admin, message="hi", project_id=project, agent="hello", wait=True)
                assert other["text"] == "hello"
                sessions.append(other["session_id"])
                server.api("session_message", admin, message="go", session_id=session, context=context)
            events.until("caller_tool_request")
            seen = list(events.seen)
        assert [event["index"] for event in seen] == list(range(len(seen)))
        assert all(event["outcome"] == "answered" for event in seen if event["type"] == "caller_tool_done")
        check_lists(server, admin, project, sessions)
        server.kill()
        clock.set("-1h")
        server.start()
        log = server.api("session_events", admin, session_id=session, max_events=1000)["events"]
        assert log[: len(seen)] == seen and [event["index"] for event in log] == list(range(len(log)))
        check_lists(server, admin, project, sessions)
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.mark.parametrize("offset", ["+1d", "-1h"])
def test_timeouts_run_by_the_monotonic_clock(folder, clock, offset):
    """A caller does not answer and the clock jumps: the call still times out, after its own time."""
    server = harness.Server(folder / "h", "[relay]\ncaller_timeout = '2s'\n", env=clock.env).start()
    try:
        admin = server.token("admin")
        server.put_agent("caller", admin, [[{"call": {"tool": "app_note", "arguments": {}}}, {"say": "went on"}]])
        project = server.api("project_create", admin, name="p")["project_id"]
        context = {"caller_id": "app", "caller_tools": [{"name": "note"}]}
        send = {"message": "go", "project_id": project, "agent": "caller", "context": context}
        session = server.api("session_message", admin, **send)["session_id"]
        with server.events(session, admin, caller_id="app") as events:
            request = events.until("caller_tool_request")
            clock.set(offset)
            check_clock(server, admin, offset)
            done = events.until("caller_tool_done", request_id=request["request_id"])
            assert done["outcome"] == "timeout"
            assert events.until("turn_completed")["text"] == "went on"
        with pytest.raises(ToolFailed) as late:
            server.api("caller_tool_response", admin, session_id=session, request_id=request["request_id"], result={})
        assert late.value.code == "not_found"
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.kill()


# -- support -----------------------------------------------------------------------------------------


def define_hello(owner: Connection, **more: object) -> None:
    definition = {"name": "hello", "prompt": "p", "model": "script:s", **more}
    owner.tool("agent_put", slug="hello", definition=definition, files={"s": '{"turns": [[{"say": "hello"}]]}'})


def write_until_refused(owner: Connection, disk: SmallDisk) -> list[str]:
    """Makes tokens until one is refused. Returns the names of those that were acknowledged."""
    names = []
    for n in range(2000):
        disk.fill()
        try:
            owner.tool("token_create", name=f"full-{n}", scope="read")
            names.append(f"full-{n}")
        except Refused as error:
            assert error.code == "unavailable" and "disk is full" in str(error)
            return names
    pytest.fail("a full disk took two thousand tokens")


def reads(server: harness.Server, token: str) -> int:
    """The status of a read with this token."""
    return Connection(server.port, token).request("POST", "/api/tools/server_info", b"{}")[0]


def acknowledged(load: Load) -> int:
    return sum(record["event"] == "acknowledged" for record in load.history.copy())


def refused_as(load: Load, code: str) -> int:
    return sum(record["event"] == "refused" and record["code"] == code for record in load.history.copy())


def fill_and_count(disk: SmallDisk, load: Load) -> int:
    disk.fill()
    return refused_as(load, "unavailable")


def check_after_kill(load: Load, processes: fault_machine.Processes) -> list[fault_check.Violation]:
    """Kills the server under load, restarts it and checks what it kept."""
    server = load.server
    load.killing = True
    processes.killed.add(server.process.pid)
    server.kill()
    load.gate.close()
    load.owner.close()
    server.start()
    left = fault_machine.left_running(processes, server)
    fault_observe.drain(load)
    observation = fault_observe.observe(load, drained=True)
    return fault_check.check(load.history.copy(), {**observation, "left_running": left}) + load.broken


def check_clock(server: harness.Server, admin: str, offset: str) -> None:
    """The server's wall clock shows the offset."""
    ahead = {"+0": 0, "+1d": 86400, "-1h": -3600}[offset]
    made = server.api("project_create", admin, name=f"clock{random.random()}")["created_at"]
    shown = datetime.datetime.fromisoformat(made.replace("Z", "+00:00"))
    off = (shown - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    assert abs(off - ahead) < 600, f"the clock was set {offset}, and the server's is {off:.0f} s ahead"


def check_lists(server: harness.Server, admin: str, project: str, sessions: list[str]) -> None:
    """Lists in small pages show each session once, and the audit log and the debugger keep their order."""
    owner = Connection(server.port, admin)
    listed = []
    page = owner.tool("session_list", project_id=project, limit=1)
    while True:
        listed += [row["session_id"] for row in page["sessions"]]
        if not page.get("next_cursor"):
            break
        page = owner.tool("session_list", project_id=project, limit=1, cursor=page["next_cursor"])
    assert sorted(listed) == sorted(sessions)
    audit = [row["index"] for row in owner.pages("audit_list", "entries")]
    assert audit == sorted(audit, reverse=True) and len(audit) == len(set(audit))
    debugger = [event["index"] for event in owner.log("debugger_events")]
    assert debugger == sorted(set(debugger))

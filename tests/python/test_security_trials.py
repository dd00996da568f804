"""A tool server that is started once to see whether it works can do no more than one of a session."""

from __future__ import annotations

import pathlib
import tempfile
import textwrap

import pytest

import servers
from attack_support import MIB, disk_use, unharmed
from harness import running, wait_until

LIMIT = 64
"""What a session may have on disk, in MiB."""
WRITTEN = 256
"""What is written, in MiB."""
DEPTH = 16_000
"""Nested directories: more than the calls that fit on the stack of a thread."""


@pytest.fixture(scope="module")
def folder():
    """The server's folder for temporary files."""
    with tempfile.TemporaryDirectory(prefix="oubt") as folder:
        yield pathlib.Path(folder)


@pytest.fixture(scope="module")
def server(folder):
    with running(f"[sandbox]\nworkspace_mb = {LIMIT}\n", {"TMPDIR": str(folder)}) as server:
        yield server


def put(server, admin, program: str) -> None:
    """Puts a tool server that runs a program before it answers anything."""
    command = servers.stdio("/usr/bin/python3", ["-I", "-S", "-c", textwrap.dedent(program)], [])
    server.put_tool("tried", admin, **command)


NEST = f"""
    import os
    os.chdir('/workspace')
    ends = []
    for n in range({DEPTH} // 250):
        os.mkdir(f'chain{{n}}')
        end = os.open(f'chain{{n}}', os.O_PATH)
        for _ in range(250):
            os.mkdir('d', dir_fd=end)
            end, above = os.open('d', os.O_PATH, dir_fd=end), end
            os.close(above)
        ends.append(end)
    for n in reversed(range(1, len(ends))):
        os.rename(f'chain{{n}}', 'd', dst_dir_fd=ends[n - 1])
    raise SystemExit('nested')
"""


def test_a_server_that_nests_directories_is_tried_and_removed(server, admin, folder):
    """A tool server leaves directories nested thousands deep in the workspace of its trial."""
    put(server, admin, NEST)
    tried = server.api("catalog_test", admin, id="tried")
    assert not tried["ok"] and "nested" in tried["error"], tried
    unharmed(server, admin)
    wait_until(lambda: not any(folder.iterdir()), "the trial's folder to be removed")


FILL = f"""
    import os, time
    kept = []
    for n in range({WRITTEN} // 4):
        file = open(f'/workspace/{{n}}', 'wb')
        file.write(bytes(4 << 20))
        file.flush()
        KEEP
    time.sleep(600)
"""


@pytest.mark.parametrize("keep", ["kept.append(file)", "kept.append(file); os.unlink(file.name)"], ids=["named", "removed"])
def test_a_server_that_fills_the_disk_is_stopped(server, admin, folder, keep):
    """A tool server writes more than a session may have, in files with names or in files that it removed and keeps open."""
    put(server, admin, FILL.replace("KEEP", keep))
    tried = server.api("catalog_test", admin, id="tried")
    assert not tried["ok"] and "more than the workspace_mb" in tried["error"], tried
    wait_until(lambda: not any(folder.iterdir()), "the trial's folder to be removed")
    assert disk_use(folder) < LIMIT * MIB
    unharmed(server, admin)

"""Faults of the machine, made on purpose: a full disk, a failing fsync, a clock that jumps.

Each is a context manager or class that skips the test, with the reason, where this machine does not allow it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import pathlib
import shutil
import signal
import subprocess
from typing import Iterator

import pytest

import harness
from harness import wait_until


class SmallDisk:
    """A tmpfs that can be filled to the last byte and freed again."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Takes all space that is left. What frees some later finds it taken by the next call."""
        for size in (1 << 20, 4096, 1):
            with self._filler.open("ab", buffering=0) as file:
                while True:
                    try:
                        file.write(b"x" * size)
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        break

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, megabytes: int) -> Iterator[SmallDisk]:
    """A file system of its own at `folder`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "oubliette-test", folder],
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        # Lazy: a process that is just ending may still have it open.
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def failing_fsync(pid: int, trace: pathlib.Path, when: str = "1+") -> Iterator[None]:
    """Makes fsync and fdatasync of a running process fail with EIO.

    `when` says which calls of each thread, as strace counts them: `1+` all, `2+2` every second. `trace` is a file; that
    calls failed can be read there.
    """
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    with trace.with_suffix(".err").open("w+") as errors:
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", trace, "-e", "trace=fsync,fdatasync",
             "-e", f"inject=fsync,fdatasync:error=EIO:when={when}", "-p", str(pid)],
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
        )  # fmt: skip

        def attached() -> bool:
            if tracer.poll() is not None:
                errors.seek(0)
                text = errors.read()
                if "not permitted" in text:
                    pytest.skip(f"strace may not attach here: {text.strip()}")
                raise AssertionError(f"strace exited with {tracer.returncode}: {text}")
            return all(tracer_of(thread) == tracer.pid for thread in threads_of(pid))

        try:
            wait_until(attached, "strace to attach to every thread")
            yield
        finally:
            if tracer.poll() is None:
                tracer.send_signal(signal.SIGINT)
                tracer.wait(timeout=harness.DEADLINE)


def failed_syncs(trace: pathlib.Path) -> int:
    """How many calls were made to fail."""
    return trace.read_text(errors="replace").count("(INJECTED)")


def threads_of(pid: int) -> list[pathlib.Path]:
    return list(pathlib.Path(f"/proc/{pid}/task").iterdir())


def tracer_of(thread: pathlib.Path) -> int | None:
    with contextlib.suppress(OSError, StopIteration):
        lines = (thread / "status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("TracerPid:")))
    return None


class Clock:
    """The wall clock of a server, by libfaketime; its monotonic clock stays true."""

    def __init__(self, folder: pathlib.Path):
        found = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
        if not found:
            pytest.skip("libfaketime is not installed (Debian package faketime)")
        self._offset = folder / "clock"
        self.set("+0")
        self.env = {
            "LD_PRELOAD": found[0],
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def set(self, offset: str) -> None:
        """Jumps to this offset from the true time: `+1d`, `-1h`."""
        new = self._offset.with_suffix(".new")
        new.write_text(f"{offset}\n")
        new.rename(self._offset)

    @staticmethod
    def remove_leftovers() -> None:
        """Removes what libfaketime leaves of killed processes: it refuses to start one with the same process id."""
        for path in glob.glob("/dev/shm/*faketime_s*_*"):
            if not pathlib.Path(f"/proc/{path.rpartition('_')[2]}").exists():
                pathlib.Path(path).unlink(missing_ok=True)

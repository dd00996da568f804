"""A command in a terminal of its own, as a person has it: what it shows is read as it comes, and keys are typed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Callable

from harness import BIN, DEADLINE, Server

ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`oubliette` with these arguments on a pseudo-terminal of 100 by 40 characters."""

    def __init__(self, server: Server, *args: str):
        self.shown = b""
        self._read_up_to = 0
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execv(BIN / "oubliette", ["oubliette", "--home", str(server.home), *args])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def _read(self, end: float) -> bool:
        """Reads what is there; false at the end of the command's output."""
        left = end - time.monotonic()
        assert left > 0 and select.select([self.fd], [], [], left)[0], f"nothing more in {DEADLINE:.0f} s:\n{self.text[-3000:]}"
        try:
            piece = os.read(self.fd, 65536)
        except OSError:  # the other side is closed
            return False
        # A terminal says where its cursor is when it is asked.
        for _ in range(piece.count(b"\x1b[6n")):
            os.write(self.fd, b"\x1b[1;1R")
        self.shown += ESCAPES.sub(b"", piece)
        return bool(piece)

    @property
    def text(self) -> str:
        return self.shown.decode(errors="replace")

    def until(self, *wanted: str) -> str:
        """Waits until one of these is shown, after what was waited for before; returns everything up to its end."""
        end = time.monotonic() + DEADLINE
        pattern = re.compile("|".join(map(re.escape, wanted)).encode())
        while not (found := pattern.search(self.shown, self._read_up_to)):
            assert self._read(end), f"it ended before it showed {wanted}:\n{self.text}"
        before, self._read_up_to = self._read_up_to, found.end()
        return self.shown[before : self._read_up_to].decode(errors="replace")

    def type(self, line: str) -> None:
        """Types a line and Enter."""
        os.write(self.fd, line.encode() + b"\r")

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        end = time.monotonic() + DEADLINE
        while self._read(end):
            pass
        status, self.pid = os.waitpid(self.pid, 0)[1], 0
        return os.waitstatus_to_exitcode(status)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


class Screen:
    """A command in a terminal that tmux emulates: what a person would see is read back from it, after every escape sequence."""

    def __init__(self, server: Server, *args: str, columns: int = 100, rows: int = 30, env: dict[str, str] | None = None):
        self._folder = tempfile.TemporaryDirectory(prefix="oubtmux")
        self._socket = os.path.join(self._folder.name, "tmux")
        fifo = os.path.join(self._folder.name, "output")
        os.mkfifo(fifo)
        # Open for writing too, so that it has no end.
        self._output = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        self._written = b""
        # It starts when its output is connected, so that nothing of it is missed.
        command = [str(BIN / "oubliette"), "--home", str(server.home), *args]
        command = ["env", *(f"{name}={value}" for name, value in (env or {}).items()), *command]
        # tmux does not always know the status of a command that has ended, so the shell writes it down.
        self._status = os.path.join(self._folder.name, "status")
        ended = f"echo $? > {shlex.quote(self._status)}.new; mv {shlex.quote(self._status)}.new {shlex.quote(self._status)}"
        waits = f"trap : INT; tmux -S {shlex.quote(self._socket)} wait-for go; {shlex.join(command)}; {ended}"
        options = ["set-option", "-g", "remain-on-exit", "on", ";", "set-option", "-g", "escape-time", "0", ";"]
        self._tmux(*options, "new-session", "-d", "-x", str(columns), "-y", str(rows), f"sh -c {shlex.quote(waits)}")
        self._tmux("pipe-pane", "-O", f"exec cat > {shlex.quote(fifo)}")
        self._tmux("wait-for", "-S", "go")

    def _tmux(self, *args: str) -> str:
        done = subprocess.run(["tmux", "-u", "-f", "/dev/null", "-S", self._socket, *args], capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, f"tmux {args}: {done.stderr}"
        return done.stdout

    def _wait_for_output(self) -> bool:
        """Waits for something to be written, or a moment: the end of the command writes nothing."""
        if not select.select([self._output], [], [], 0.5)[0]:
            return False
        self._written += os.read(self._output, 1 << 20)
        return True

    @property
    def written(self) -> bytes:
        """Everything that the command has written, escape sequences too."""
        while self._wait_for_output():
            pass
        return self._written

    @property
    def text(self) -> str:
        """What is on the screen."""
        return self._tmux("capture-pane", "-p")

    @property
    def history(self) -> str:
        """What is on the screen and what was scrolled away, lines that were wrapped joined."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-")

    def until(self, wanted: str | Callable[[str], bool], *, among: Callable[["Screen"], str] | None = None) -> str:
        """Waits until this is on the screen; returns the screen."""
        fits = wanted if callable(wanted) else lambda text: wanted in text
        end = time.monotonic() + DEADLINE
        while not fits(shown := (among(self) if among else self.text)):
            assert time.monotonic() < end, f"{wanted} is not shown:\n{shown}"
            self._wait_for_output()
        return shown

    def keys(self, *names: str) -> None:
        """Presses keys, by tmux's names: Enter, Tab, C-c, M-Enter."""
        self._tmux("send-keys", *names)

    def type(self, text: str) -> None:
        """Types text, and Enter."""
        self._tmux("send-keys", "-l", "--", text)
        self.keys("Enter")

    def type_only(self, text: str) -> None:
        self._tmux("send-keys", "-l", "--", text)

    def paste(self, text: str) -> None:
        """Pastes text, marked as pasted if the program asked for that."""
        self._tmux("set-buffer", "--", text)
        self._tmux("paste-buffer", "-p")

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def title(self) -> str:
        return self._tmux("display-message", "-p", "#{pane_title}").strip()

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        end = time.monotonic() + DEADLINE
        while not os.path.exists(self._status):
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
            self._wait_for_output()
        with open(self._status) as status:
            return int(status.read())

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError):
            self._tmux("kill-server")
        os.close(self._output)
        self._folder.cleanup()

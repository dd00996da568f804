"""What an agent sends over its session's sockets neither stops the server's threads nor fills its memory."""

from __future__ import annotations

import array
import contextlib
import json
import select
import socket
import struct
import threading
import time

import pytest

import servers
from attack_support import ATTACKS, MIB, TRUST, Attacker, Memory, answers, settled, unharmed
from harness import running
from wire import Relay

LINGER = 600
"""Seconds that closing a descriptor may take: longer than any test waits."""
DESCRIPTORS = 32
"""Descriptors passed at once: more than the server has threads."""

LINE = 15 * MIB
"""Just within what one line may be."""
CALLS = 48
"""Together 720 MiB."""
MOST_MEMORY = 256 * MIB
"""What the server may grow by: some times what one session may have it keep, and a fraction of what is sent."""


@pytest.fixture
def server():
    with running(TRUST) as server:
        yield server


@pytest.fixture
def admin(server):
    return server.token("admin")


def tool_server(*arguments: str) -> dict:
    script = str(ATTACKS / "tool_server.py")
    quiet = {"intervalMs": 600_000, "timeoutMs": 600_000, "failures": 3}
    return servers.stdio("/usr/bin/python3", ["-I", "-S", script, *arguments], [str(ATTACKS)], healthCheck=quiet)


# -- descriptors ------------------------------------------------------------------------------------


class Lingering:
    """A TCP connection with data nobody takes, whose last descriptor blocks whoever closes it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.sender = socket.create_connection(listener.getsockname())
            self._receiver, _ = listener.accept()
        self.sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.sender.send(bytes(65536))
        self.sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER))

    def pass_over(self, path: str, data: bytes) -> socket.socket:
        """Sends the descriptor over a Unix socket, and keeps none."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.setblocking(False)

        def send_and_close() -> None:
            with contextlib.suppress(OSError):
                # Data before it, so that this copy is closed before the other side comes to the descriptor: whoever
                # closes last is the one that blocks.
                connection.send(data.ljust(48 * 1024, b"x"))
                rights = array.array("i", [self.sender.fileno()])
                connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self.sender.close()

        # In a thread, should it be this copy after all.
        self._sending = threading.Thread(target=send_and_close, daemon=True)
        self._sending.start()
        self._sending.join(1)
        return connection

    def release(self) -> None:
        """Ends the connection from the other side, and with it whatever waits in close()."""
        self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._receiver.close()
        self._sending.join()


@pytest.mark.parametrize(
    ("name", "data"),
    [("relay", b'{"jsonrpc":'), ("stdio", b"x"), ("model", b"GET /"), ("proxy", b"CONNECT ")],
)
def test_a_descriptor_that_is_slow_to_close_blocks_no_thread(server, admin, project, name, data):
    """An agent passes descriptors whose closing blocks for minutes over a socket of its session; others are served."""
    server.put_tool("echo", admin, **tool_server())
    server.put_agent("bystander", admin, [[{"say": "hi"}]], tools={"use": ["echo"]})
    start = {"message": "go", "project_id": project, "agent": "bystander", "wait": True}
    # Several, so that whichever thread a session's calls are made on is met.
    others = [server.api("session_message", admin, **start)["session_id"] for _ in range(3)]
    with Attacker(server, admin, project, sandbox={"network": "proxy"}) as attacker:
        path = next(str(path) for path in attacker.sockets if path.stem == name)
        with contextlib.ExitStack() as stack:
            for _ in range(DESCRIPTORS):
                lingering = Lingering()
                stack.callback(lingering.release)
                stack.enter_context(lingering.pass_over(path, data))
            for session in others:
                call = {"session_id": session, "tool": "@echo/large", "arguments": {"bytes": 3}}
                assert answers(server, admin, "tool_call", **call)["content"] == [{"type": "text", "text": "xxx"}]
            unharmed(server, admin)


# -- bytes ------------------------------------------------------------------------------------------


class Flood:
    """Bytes written to a relay socket as fast as they are taken, on many connections at once."""

    def __init__(self, path: str, payloads: list[bytes]):
        self.connections: list[socket.socket] = []
        self._left: dict[socket.socket, memoryview] = {}
        for payload in payloads:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            connection.setblocking(False)
            self.connections.append(connection)
            self._left[connection] = memoryview(payload)
        self.received: dict[socket.socket, bytes] = {connection: b"" for connection in self.connections}
        self.hung_up: set[socket.socket] = set()

    def write(self, quiet: float = 5.0, stop=lambda: False) -> None:
        """Writes until everything is taken, or nothing is for some seconds, or `stop` says so."""
        since = time.monotonic()
        while self._left and time.monotonic() - since < quiet and not stop():
            _, ready, _ = select.select([], list(self._left), [], 0.1)
            for connection in ready:
                try:
                    sent = connection.send(self._left[connection][: 4 * MIB])
                except BlockingIOError:
                    continue
                except OSError:
                    self.hung_up.add(connection)
                    del self._left[connection]
                    continue
                since = time.monotonic()
                self._left[connection] = self._left[connection][sent:]
                if not self._left[connection]:
                    del self._left[connection]

    def read(self, quiet: float = 3.0) -> list[dict]:
        """Reads what there is until nothing comes for some seconds; the whole messages of all connections."""
        since, open_ = time.monotonic(), set(self.connections)
        while open_ and time.monotonic() - since < quiet:
            ready, _, _ = select.select(list(open_), [], [], 0.1)
            for connection in ready:
                try:
                    data = connection.recv(4 * MIB)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                since = time.monotonic()
                self.received[connection] += data
                if not data:
                    self.hung_up.add(connection)
                    open_.discard(connection)
        return [json.loads(line) for data in self.received.values() for line in data.split(b"\n")[:-1] if line]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def __enter__(self) -> "Flood":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def codes(messages: list[dict]) -> list[str]:
    """The error codes among answers."""
    return [message["error"]["data"]["code"] for message in messages if "error" in message]


def works_again(attacker: Attacker) -> None:
    """What was kept for the session is given back: an ordinary request is answered."""
    with Relay(attacker.details["relay_socket"]) as relay:
        assert "tools" in relay.call("agent_tools")["result"]


def test_unfinished_lines_are_kept_within_the_sessions_budget(server, admin, project):
    """An agent opens many connections and sends almost a whole line on each; past the session's budget it is refused."""
    with Attacker(server, admin, project) as attacker:
        memory = Memory(server)
        start = b'{"jsonrpc":"2.0","id":1,"method":"agent_tools","params":{"x":"'
        payload = start + bytes(LINE).replace(b"\0", b"x")
        with Flood(attacker.details["relay_socket"], [payload] * CALLS) as flood:
            flood.write(stop=lambda: memory.peak > 2 * MOST_MEMORY)
            memory.check(MOST_MEMORY)
            unharmed(server, admin)
            assert "limit_exceeded" in codes(flood.read())
        memory.check(MOST_MEMORY)
        works_again(attacker)


def test_calls_that_wait_are_kept_within_the_sessions_budget(server, admin, project):
    """An agent makes calls with large arguments to a tool that never takes them; past the budget each fails at once."""
    server.put_tool("deaf", admin, **tool_server("--deaf"))
    with Attacker(server, admin, project, tools={"use": ["deaf"]}) as attacker:
        memory = Memory(server)
        with Flood(attacker.details["relay_socket"], [large_call(id, "x" * LINE) for id in range(CALLS)]) as flood:
            flood.write(stop=lambda: memory.peak > 2 * MOST_MEMORY)
            settled(lambda: memory.peak // MIB, "the calls to be taken or refused")
            memory.check(MOST_MEMORY)
            unharmed(server, admin)
            refused = codes(flood.read())
            assert refused and set(refused) == {"limit_exceeded"}, refused
        memory.check(MOST_MEMORY)
        works_again(attacker)


def test_answers_that_nobody_reads_are_kept_within_the_sessions_budget(server, admin, project):
    """An agent calls for large results and reads none of them; past the budget the calls fail or it is hung up on."""
    server.put_tool("deaf", admin, **tool_server())
    with Attacker(server, admin, project, tools={"use": ["deaf"]}) as attacker:
        memory = Memory(server)
        with Flood(attacker.details["relay_socket"], [large_call(id, "", bytes=LINE) for id in range(CALLS)]) as flood:
            flood.write()
            settled(lambda: memory.peak // MIB, "the answers to be made or refused")
            memory.check(MOST_MEMORY)
            unharmed(server, admin)
            assert "limit_exceeded" in codes(flood.read()) or flood.hung_up
        works_again(attacker)


def large_call(id: int, text: str, **arguments) -> bytes:
    """A whole request for a tool of the tool server."""
    params = {"tool": "@deaf/large", "arguments": {"text": text, **arguments}}
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "agent_call_tool", "params": params}).encode() + b"\n"

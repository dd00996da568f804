"""What an agent sends over its session's sockets neither stops the server's threads nor fills its memory."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import threading
import time

import pytest

import servers
from attack_support import ATTACKS, MIB, TRUST, Attacker, Memory, answers, settled, unharmed
from harness import DEADLINE, running, wait_until
from wire import Relay

LINGER = 600
"""Seconds that closing a descriptor may take: longer than any test waits."""
DESCRIPTORS = 32
"""Descriptors passed at once: more than the server has threads."""

LINE = 15 * MIB
"""Just within what one line may be."""
CALLS = 48
"""Together 720 MiB."""
BUDGET = 64 * MIB
"""What is kept for one session, unless the configuration says otherwise."""
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
            rights = array.array("i", [self.sender.fileno()])
            try:
                # Data before it, so that this copy is closed before the other side comes to the descriptor: whoever
                # closes last is the one that blocks.
                connection.send(data.ljust(48 * 1024, b"x"))
                connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except OSError:
                # It was not taken, and this copy is the last.
                self.sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
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
        """Writes until everything is taken, or somebody was refused and nothing is for some seconds, or `stop` says so."""
        begun = since = time.monotonic()
        while self._left and time.monotonic() - begun < DEADLINE and not stop():
            if time.monotonic() - since > quiet and (self.hung_up or self._is_refused()):
                return
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

    def _is_refused(self) -> bool:
        """Whether a refusal waits to be read."""
        ready, _, _ = select.select(self.connections, [], [], 0)
        return any(b"limit_exceeded" in connection.recv(65536, socket.MSG_PEEK) for connection in ready)

    def read(self, quiet: float = 3.0) -> list[dict]:
        """Reads until somebody was refused and nothing comes for some seconds; the whole messages of all connections."""
        begun = since = time.monotonic()
        open_ = set(self.connections)
        while open_ and time.monotonic() - begun < DEADLINE:
            if time.monotonic() - since > quiet:
                if self.hung_up or "limit_exceeded" in codes(self._messages()):
                    break
                since = time.monotonic()
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
        return self._messages()

    def _messages(self) -> list[dict]:
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
            wait_until(lambda: memory.peak > BUDGET - LINE, "answers that fill the budget")
            settled(lambda: memory.peak // MIB, "the answers to be made or refused")
            memory.check(MOST_MEMORY)
            unharmed(server, admin)
            assert "limit_exceeded" in codes(flood.read()) or flood.hung_up
        works_again(attacker)


class HandedOff:
    """Streams handed off to the server, as a client does it: what is written is read by the server."""

    def __init__(self, path: str):
        stdin, self.input = os.pipe()
        self.output, stdout = os.pipe()
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        rights = array.array("i", [stdin, stdout])
        self.connection.sendmsg([b"handoff 1 \n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert self.connection.recv(3) == b"ok\n"
        self.connection.send(b"!")
        os.close(stdin)
        os.close(stdout)
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self._read = b""

    def refused(self) -> bool:
        """Whether what was read so far refuses something."""
        with contextlib.suppress(BlockingIOError):
            self._read += os.read(self.output, MIB)
        return b"limit_exceeded" in self._read

    def close(self) -> None:
        self.connection.close()
        os.close(self.input)
        os.close(self.output)


def test_unfinished_lines_of_handed_off_streams_are_kept_within_the_sessions_budget(server, admin, project):
    """An agent hands off many streams and writes almost a whole line to each; past the session's budget it is refused."""
    with Attacker(server, admin, project) as attacker, contextlib.ExitStack() as stack:
        memory = Memory(server)
        path = next(str(path) for path in attacker.sockets if path.stem == "stdio")
        streams = [HandedOff(path) for _ in range(CALLS)]
        for stream in streams:
            stack.callback(stream.close)
        left = {stream: memoryview(b"x" * LINE) for stream in streams}
        begun = since = time.monotonic()
        while left and time.monotonic() - begun < DEADLINE:
            if time.monotonic() - since > 5 and any(stream.refused() for stream in streams):
                break
            for stream in select_writable(left):
                try:
                    sent = os.write(stream.input, left[stream][:MIB])
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    del left[stream]
                    continue
                since = time.monotonic()
                left[stream] = left[stream][sent:]
                if not left[stream]:
                    del left[stream]
        memory.check(MOST_MEMORY)
        unharmed(server, admin)
        refused = wait_until(lambda: [stream for stream in streams if stream.refused()], "a stream to be refused")
        assert refused and len(refused) < len(streams), f"{len(refused)} of {len(streams)} refused"
    works_again_later(server, admin, project)


def select_writable(streams) -> list[HandedOff]:
    by_descriptor = {stream.input: stream for stream in streams}
    _, ready, _ = select.select([], list(by_descriptor), [], 0.1)
    return [by_descriptor[descriptor] for descriptor in ready]


def works_again_later(server, admin, project) -> None:
    """Another session of the same agent is served."""
    with Attacker(server, admin, project, slug="next") as attacker:
        works_again(attacker)


def test_the_largest_call_still_works(server, admin, project):
    """A session that keeps nothing else makes a call with the largest arguments and gets the largest result."""
    server.put_tool("deaf", admin, **tool_server())
    with Attacker(server, admin, project, tools={"use": ["deaf"]}) as attacker:
        with Relay(attacker.details["relay_socket"]) as relay:
            params = {"tool": "@deaf/large", "arguments": {"text": "x" * LINE, "bytes": LINE}}
            for _ in range(3):
                result = relay.call("agent_call_tool", **params)["result"]
                assert len(result["content"][0]["text"]) == LINE


def test_many_small_values_are_charged_what_they_take(server, admin, project):
    """An agent sends arguments that take many times their length once they are parsed; they are refused before."""
    with Attacker(server, admin, project) as attacker:
        memory = Memory(server)
        start = b'{"jsonrpc":"2.0","id":1,"method":"agent_call_tool","params":{"tool":"x","arguments":{"x":['
        payload = start + b"0," * (LINE // 2) + b"0]}}}\n"
        with Flood(attacker.details["relay_socket"], [payload] * 3) as flood:
            flood.write()
            settled(lambda: memory.peak // MIB, "the calls to be refused")
            assert "limit_exceeded" in codes(flood.read())
        memory.check(MOST_MEMORY)
        works_again(attacker)


def large_call(id: int, text: str, **arguments) -> bytes:
    """A whole request for a tool of the tool server."""
    params = {"tool": "@deaf/large", "arguments": {"text": text, **arguments}}
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "agent_call_tool", "params": params}).encode() + b"\n"

"""A caller whose machine disappears: no FIN, no RST, no more acknowledgements.

The server runs in its own network namespace, whose loopback is taken down; agents still reach it over Unix sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import Server, running
from test_relay_faults import CONFIG, RelaySession
from wire import LegacyMcp, ModernMcp, Request, poll

NEW_NETWORK = 0x40000000
SEEN_WITHIN = 30
"""For how many seconds a vanished caller may count as present."""
BUSY = 15
"""Additional seconds for a busy machine."""
LONG_TIMEOUT_CONFIG = CONFIG + "caller_timeout = '10m'\n"
"""A timeout so long that a call ends only because its caller is gone."""


def loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def begin(server: Server, admin: str, project: str, how: str, closing: contextlib.ExitStack) -> tuple[RelaySession, int]:
    """Starts a session with an open call whose caller is present by one stream or poll."""
    token = server.token("write")
    mcp = LegacyMcp(server, token) if how == "legacy stream" else None
    by = (lambda **arguments: mcp.call("session_message", **arguments)) if mcp else None
    relay_session = closing.enter_context(RelaySession(server, admin, token, project, by=by))
    relay_session.relay.socket.settimeout(3 * SEEN_WITHIN)
    id, request = relay_session.ask()
    match how:
        case "legacy stream":
            held = mcp.stream()
        case "subscription":
            held = ModernMcp(server, token).listen(relay_session.session)
        case "api stream":
            held = Request(server, "GET", f"/api/sessions/{relay_session.session}/events?caller_id=myapp", token)
            assert held.response.status == 200
        case "poll":
            held = poll(server, token, relay_session.session, request["index"])
    closing.enter_context(held)
    return relay_session, id


def vanish() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
        pytest.skip(f"a network of its own needs root: {os.strerror(ctypes.get_errno())}")
    loopback("up")
    with running(LONG_TIMEOUT_CONFIG) as server, contextlib.ExitStack() as closing:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        kinds = ("legacy stream", "subscription", "api stream", "poll")
        relay_sessions = {how: begin(server, admin, project, how, closing) for how in kinds}
        next(iter(relay_sessions.values()))[0].held(stream=3, poll=1)
        loopback("down")
        began = time.monotonic()
        try:
            for how, (relay_session, id) in relay_sessions.items():
                error = relay_session.relay.answer(id)["error"]
                took = time.monotonic() - began
                assert error["code"] == -32005, (how, error)
                assert took < SEEN_WITHIN + BUSY, (how, took)
        finally:
            loopback("up")


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_a_caller_that_vanishes_is_seen_within_half_a_minute():
    # On its own thread: the network namespace is per thread.
    with ThreadPoolExecutor(1) as alone:
        alone.submit(vanish).result()

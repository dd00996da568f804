"""A caller whose machine is gone: no goodbye, no reset, nothing acknowledged any more.

The server runs in a network of its own that is taken away; agents still reach it, over their Unix sockets.
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
from test_relay_faults import CONFIG, Scene
from wire import LegacyMcp, ModernMcp, Request, poll

NEW_NETWORK = 0x40000000
SEEN_WITHIN = 30
"""Seconds that a caller which just vanished may be taken for present."""
BUSY = 15
"""What a busy machine may add before the server, and this test, get to see it."""
PATIENT = CONFIG + "caller_timeout = '10m'\n"
"""No call ends by itself: only by its caller being gone."""


def loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def begin(server: Server, admin: str, project: str, how: str, closing: contextlib.ExitStack) -> tuple[Scene, int]:
    """A session with an open call, whose caller is there by one stream or poll."""
    token = server.token("write")
    mcp = LegacyMcp(server, token) if how == "legacy stream" else None
    by = (lambda **arguments: mcp.call("session_message", **arguments)) if mcp else None
    scene = closing.enter_context(Scene(server, admin, token, project, by=by))
    scene.relay.socket.settimeout(3 * SEEN_WITHIN)
    id, request = scene.ask()
    match how:
        case "legacy stream":
            held = mcp.stream()
        case "subscription":
            held = ModernMcp(server, token).listen(scene.session)
        case "api stream":
            held = Request(server, "GET", f"/api/sessions/{scene.session}/events?caller_id=myapp", token)
            assert held.response.status == 200
        case "poll":
            held = poll(server, token, scene.session, request["index"])
    closing.enter_context(held)
    return scene, id


def vanish() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) != 0:
        pytest.skip(f"a network of its own needs root: {os.strerror(ctypes.get_errno())}")
    loopback("up")
    with running(PATIENT) as server, contextlib.ExitStack() as closing:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        kinds = ("legacy stream", "subscription", "api stream", "poll")
        scenes = {how: begin(server, admin, project, how, closing) for how in kinds}
        next(iter(scenes.values()))[0].held(stream=3, poll=1)
        loopback("down")
        began = time.monotonic()
        try:
            for how, (scene, id) in scenes.items():
                error = scene.relay.answer(id)["error"]
                took = time.monotonic() - began
                assert error["code"] == -32005, (how, error)
                assert took < SEEN_WITHIN + BUSY, (how, took)
        finally:
            loopback("up")


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_a_caller_that_vanishes_is_seen_within_half_a_minute():
    # A thread of its own: its network is nobody else's.
    with ThreadPoolExecutor(1) as alone:
        alone.submit(vanish).result()

"""What a client with a token says about itself is not kept beyond what is needed of it."""

from __future__ import annotations

import json

import pytest

import harness
from attack_support import MIB, Memory, unharmed
from harness import running

CLIENTS = 64
MOST_MEMORY = 128 * MIB


@pytest.fixture
def server():
    with running() as server:
        yield server


@pytest.fixture
def admin(server):
    return server.token("admin")


@pytest.mark.parametrize("field", ["name", "capabilities"])
def test_what_clients_say_about_themselves_is_not_kept(server, admin, field):
    """A client opens many MCP sessions with megabytes in its `initialize`; it is refused, or no more than a name is kept."""
    memory = Memory(server)
    large = "x" * (7 * MIB // 2)
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    if field == "capabilities":
        params["capabilities"] = {"experimental": {"x": {"x": large}}}
    else:
        params["clientInfo"][field] = large
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}).encode()
    headers = {
        "Authorization": f"Bearer {admin}",
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
    }
    for _ in range(CLIENTS):
        answer = harness.post(f"{server.url}/mcp", content=body, headers=headers)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.status_code
    memory.check(MOST_MEMORY)
    unharmed(server, admin)

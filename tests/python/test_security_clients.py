"""What a client with a token says about itself, and how often it comes, is not kept beyond what is needed of it."""

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
    for _ in range(CLIENTS):
        answer = harness.post(f"{server.url}/mcp", content=body, headers=headers(admin))
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.status_code
    memory.check(MOST_MEMORY)
    unharmed(server, admin)


def headers(token: str) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {token}",
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
    }


def opened(server: harness.Server, token: str) -> str:
    """The id of a new MCP session."""
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    answer = harness.post(f"{server.url}/mcp", json=body, headers=headers(token))
    assert answer.status_code == 200, answer.text
    return answer.headers["mcp-session-id"]


def is_open(server: harness.Server, token: str, id: str) -> bool:
    body = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    answer = harness.post(f"{server.url}/mcp", json=body, headers={**headers(token), "Mcp-Session-Id": id})
    assert answer.status_code in (200, 404), answer.text
    return answer.status_code == 200


def test_mcp_sessions_are_bounded_and_the_longest_idle_go_first():
    """A client opens MCP sessions without end, with one token and with many; others keep theirs."""
    with running("[server]\nmax_mcp_sessions = 16\n") as server:
        admin = server.token("admin")
        bystander = server.token("read")
        kept = opened(server, bystander)
        ids = [opened(server, admin) for _ in range(20)]
        assert [is_open(server, admin, id) for id in ids] == [False] * 16 + [True] * 4, "a quarter for one token"
        assert is_open(server, bystander, kept)
        tokens = [server.api("token_create", admin, name="more", scope="read")["token"] for _ in range(8)]
        more = [(token, opened(server, token)) for _ in range(3) for token in tokens]
        everything = [*more, *((admin, id) for id in ids), (bystander, kept)]
        assert sum(is_open(server, token, id) for token, id in everything) <= 16
        assert is_open(server, bystander, kept), "whoever has few keeps them"
        unharmed(server, admin)

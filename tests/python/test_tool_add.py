"""Tool servers added as other clients start them: what became of each is said, whatever became of the others."""

from __future__ import annotations

import pytest
from fake_registry import FakeRegistry
from harness import running


@pytest.fixture
def registry():
    registry = FakeRegistry()
    yield registry
    registry.close()


def test_a_server_of_a_block_that_cannot_be_started_does_not_hide_the_others(registry):
    """One asks for a variable that `[trust] env` does not list. All are written, each has its test, and the notes are there."""
    registry.add_tool_server("small")
    block = {"mcpServers": {
        "keyed": {"command": "npx", "args": ["-y", "small"], "env": {"KEY": "${NOT_LISTED}"}},
        "plain": {"command": "cmd", "args": ["/c", "npx", "-y", "small", "/Users/me/notes"]},
    }}
    with running(env=registry.env) as server:
        admin = server.token("admin")
        added = server.api("tool_add", admin, servers=block)
        assert {entry["id"] for entry in added["entries"]} == {"keyed", "plain"}
        keyed, plain = sorted(added["tests"], key=lambda test: test["id"])
        assert not keyed["ok"] and "[trust] env" in keyed["error"] and "NOT_LISTED" in keyed["error"], keyed
        assert plain["ok"] and "@plain/about" in plain["tools"], plain
        notes = "\n".join(added["notes"])
        assert "keyed: pinned to npm:small@1.0.0" in notes and "plain: a sandbox does not see /Users/me/notes" in notes, notes

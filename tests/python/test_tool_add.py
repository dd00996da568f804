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


def test_a_new_program_says_that_it_has_no_network_and_runs_its_scripts_only_when_asked(registry):
    registry.add_tool_server("small", scripts={"postinstall": "touch ran"})
    with running(env=registry.env) as server:
        admin = server.token("admin")
        command = ["npx", "-y", "small", "--dir=/home/me/notes"]
        plain = server.api("tool_add", admin, command=command)
        notes = "\n".join(plain["notes"])
        assert "runs without network" in notes and "--network proxy" in notes, notes
        assert "install scripts were skipped: small" in notes and "a sandbox does not see /home/me/notes" in notes, notes
        added = server.api("tool_add", admin, command=command, id="scripted", scripts=True, network="proxy")
        notes = "\n".join(added["notes"])
        assert "without network" not in notes and "skipped" not in notes, notes
        assert added["tests"][0]["ok"] and added["entries"][0]["definition"]["program"]["scripts"], added
        ran = [(server.home / "programs" / one["programs"][0] / "tree/node_modules/small/ran").exists() for one in (plain, added)]
        assert ran == [False, True]

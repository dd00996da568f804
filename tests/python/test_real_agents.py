"""Real, unmodified agents from their registries, run by their presets against a fake model, in a short form:
`cargo xtask agents` runs every check of every preset. Each is installed once, as an Oubliette program."""

from __future__ import annotations

import json
import subprocess

import pytest
from agent_matrix import RESULTS, page
from harness import ROOT, ToolFailed
from real_agents import PRESETS, TURN_SECONDS, RealAgent, serving

AGENTS = ["claude", "copilot", "gemini", "opencode"]
PERMISSIONS_AND_BUDGETS = "claude"
"""Its library repeats requests that are answered 429."""


@pytest.fixture(scope="module")
def served():
    """One server with one home, so that each agent is installed once."""
    with serving() as (server, model):
        yield server, model, {}


@pytest.fixture
def agent(served, request) -> RealAgent:
    """The installed agent, which the tests of one preset share."""
    server, model, agents = served
    preset = request.param
    if preset not in agents:
        made = RealAgent(server, preset, model)
        install(made)
        agents[preset] = made
    return agents[preset]


def install(agent: RealAgent) -> None:
    """Installs the agent's package; the test is skipped, with the reason, where no registry is reached."""
    program = agent.program
    kind = "npm" if "npm" in program else "pypi"
    try:
        agent.call("program_install", package=f"{kind}:{agent.package}", scripts=program.get("scripts", False))
    except ToolFailed as failed:
        view = ["npm", "view", agent.package, "version"]
        asked = subprocess.run(view, capture_output=True, text=True, timeout=TURN_SECONDS)
        if asked.returncode != 0:
            pytest.skip(f"{agent.package} cannot be had from the registry: {failed.message}: {asked.stderr[-300:]}")
        raise


@pytest.mark.parametrize("agent", AGENTS, indirect=True)
def test_a_real_agent_uses_its_tools_and_is_held_by_the_gate(agent):
    # The tool is lent with the first message: an agent may be slow to take up one that is lent later.
    for check in ("lent tool", "turn", "catalog tool", "blocked tool", "cancel"):
        agent.run(check)
    agent.end(agent.session)


@pytest.mark.parametrize("agent", AGENTS, indirect=True)
def test_a_real_agent_that_is_denied_its_own_tools_has_those_of_the_gate(agent):
    agent.run("permission deny")
    agent.run("permission gated")


@pytest.mark.parametrize("agent", [PERMISSIONS_AND_BUDGETS], indirect=True)
def test_a_person_decides_about_the_commands_of_a_real_agent(agent):
    agent.run("permission ask")


@pytest.mark.parametrize("agent", [PERMISSIONS_AND_BUDGETS], indirect=True)
def test_a_real_agent_past_a_budget_shows_the_refusal_and_does_not_ask_for_ever(agent):
    agent.run("budget refusal")


def test_every_preset_has_its_row_in_the_matrix():
    """The page of the docs is of the presets as they are: same names, same versions, and no check failed or
    left out without a reason."""
    results = json.loads(RESULTS.read_text())
    assert list(results) == PRESETS
    for name in PRESETS:
        preset = json.loads((ROOT / "crates" / "server" / "presets" / f"{name}.json").read_text())
        program = preset["definition"]["runtime"]["program"]
        assert results[name]["package"] == (program.get("npm") or program["pypi"]), name
        assert list(results[name]["checks"]) == RealAgent.CHECKS or results[name].get("not_run"), name
        assert set(results[name]["checks"].values()) <= {"yes", "no"}, name
    assert (ROOT / "docs" / "agents.md").read_text() == page(results)

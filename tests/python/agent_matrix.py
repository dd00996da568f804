"""Runs every check of real agents (`real_agents.py`) and writes the page of the docs.

    python agent_matrix.py [NAME …] [--page FILE]

With names, only these presets are run; their rows of the page are replaced and the others stay. The results are kept in
`agents/matrix.json`; a preset that could not be run has `not_run` there, the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import time
import traceback
from typing import Any

from harness import BIN
from real_agents import KNOWN_LIMITS, PRESETS, RealAgent, serving

RESULTS = pathlib.Path(__file__).parent / "agents" / "matrix.json"
MEANINGS = {
    "turn": "a message is answered, and nothing is reported as an error",
    "streaming": "text arrives while it is written",
    "lent tool": "it calls a tool that the caller lent with the message, and gets the caller's answer",
    "tool lent later": "it calls a tool that was lent after it had listed its tools",
    "catalog tool": "it calls a tool of the catalog",
    "own tool": "it calls one of Oubliette's own tools (`oubliette_*`) with its project's key",
    "blocked tool": "it does not see a tool that its agent.json denies, and hears that a call which a rule denies is refused",
    "cancel": "a turn is cancelled while the model answers, and the next one works",
    "switch and back": "another agent takes over the session; back again, it remembers the conversation",
    "sleep and resume": "it is stopped when idle, and remembers the conversation at the next message",
    "resume after kill -9": "the server is killed; afterwards it remembers the conversation and has its tools",
    "agent killed": "its processes are killed; it remembers the conversation afterwards",
    "permission allow": "with `\"permissions\": \"allow\"` its own shell tool runs",
    "permission deny": "with `\"deny\"` it asks before it runs a command, and the command does not run",
    "permission gated": "with `\"deny\"` the tools that the gate governs work all the same",
    "permission ask": "with `\"ask\"` a person allows one command, which runs, and denies another, which does not",
    "budget refusal": "past its project's budget the turn ends with the reason, and it does not ask the model for ever",
}


def programs_version() -> str:
    """Which programs are checked: what `oubliette --version` says, without the name."""
    said = subprocess.run([BIN / "oubliette", "--version"], capture_output=True, text=True, check=True).stdout
    return said.strip().removeprefix("oubliette ")


def run_preset(server: Any, model: Any, name: str) -> dict[str, Any]:
    """Runs every check of one preset."""
    agent = RealAgent(server, name, model)
    row: dict[str, Any] = {"package": agent.package, "programs": programs_version(), "checks": {}}
    for check in RealAgent.CHECKS:
        limit = KNOWN_LIMITS.get((name, check))
        begun = time.monotonic()
        try:
            agent.run(check)
            if check == "turn":
                agent.measure()
            result = "failed: it works, although it is marked as a limit of the agent" if limit else "yes"
        except Exception as error:
            result = "no" if limit else f"failed: {' '.join(str(error).split())[:300]}"
            if not limit:
                traceback.print_exc()
            if not server.process or server.process.poll() is not None:
                server.start()
        row["checks"][check] = result
        print(f"{name:10} {check:22} {result[:160]}  {time.monotonic() - begun:.1f} s", flush=True)
        if check == "turn" and result != "yes":
            break
    row.update(measured(agent))
    if agent.session:
        agent.end(agent.session)
    return row


def measured(agent: RealAgent) -> dict[str, Any]:
    """What `RealAgent.measure` found."""
    rounded = {"start_seconds": agent.started, "cpu_seconds": agent.cpu}
    rounded = {name: round(value, 1) if value is not None else None for name, value in rounded.items()}
    return {**rounded, "memory_mib": agent.memory}


def measure_preset(server: Any, model: Any, name: str) -> dict[str, Any]:
    """Only measures, and keeps the results of the checks."""
    agent = RealAgent(server, name, model)
    agent.run("turn")
    agent.measure()
    agent.end(agent.session)
    print(f"{name:10} {measured(agent)}", flush=True)
    return {**json.loads(RESULTS.read_text())[name], **measured(agent)}


def run_matrix(names: list[str], home: pathlib.Path | None, run: Any = run_preset) -> dict[str, Any]:
    """Runs every check of these presets; the result of each."""
    results: dict[str, Any] = {}
    with serving(home) as (server, model):
        for name in names:
            try:
                results[name] = run(server, model, name)
            except Exception as error:
                traceback.print_exc()
                results[name] = {"package": "", "checks": {"turn": f"failed: {' '.join(str(error).split())[:300]}"}}
    return results


def checked_programs(programs: dict[str, list[str]]) -> list[str]:
    """Of which programs of Oubliette the rows are: one sentence where it is the same for all."""
    named = {version or "not recorded": agents for version, agents in programs.items()}
    if len(named) == 1:
        return [f"All rows are of Oubliette {next(iter(named))}."]
    return ["The rows are of Oubliette:", "", *(f"- {version}: {', '.join(agents)}" for version, agents in named.items())]


def page(results: dict[str, Any]) -> str:
    """The page of the docs."""
    names = [name for name in PRESETS if name in results]
    programs: dict[str, list[str]] = {}
    for name in names:
        programs.setdefault(results[name].get("programs", ""), []).append(name)
    lines = [
        "# Agents",
        "",
        "Real, unmodified agents, installed from their registries by their presets (`oubliette agent presets`) and run in the",
        "local sandbox, without network, against a fake model that follows a script. `cargo xtask agents [NAME]` runs the checks",
        "and writes this page; every test run repeats a part of them with four of the agents.",
        "",
        *checked_programs(programs),
        "",
        "| agent | package | start | CPU | memory |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        row = results[name]
        times = [f"{row[key]:.1f} s" if row.get(key) is not None else "–" for key in ("start_seconds", "cpu_seconds")]
        memory = f"{row['memory_mib']} MiB" if row.get("memory_mib") else "–"
        lines.append(f"| {name} | `{row['package']}` | {times[0]} | {times[1]} | {memory} |")
    lines += [
        "",
        "*Start* is from the message to the agent's open conversation, its package being installed, on two cores that were busy",
        "with other work too. *CPU* is the time its processes used until one turn was done: what its start costs on any machine.",
        "*Memory* is their resident memory then, pages that they share counted for each.",
        "",
        "| check | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    notes: list[str] = []
    for check in RealAgent.CHECKS:
        cells = []
        for name in names:
            result = results[name]["checks"].get(check, "–")
            if result not in ("yes", "–"):
                result, _, failure = result.partition(": ")
                notes.append(f"- {name}, {check}: {KNOWN_LIMITS.get((name, check), failure)}.")
            cells.append("fails" if result == "failed" else result)
        lines.append(f"| {check} | " + " | ".join(cells) + " |")
    for name in names:
        if results[name].get("not_run"):
            notes.append(f"- {name}: not run: {results[name]['not_run']}.")
    if notes:
        lines += ["", "## What does not work, and why", "", *notes]
    lines += ["", "## What the checks mean", "", *(f"- *{check}*: {MEANINGS[check]}." for check in RealAgent.CHECKS)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the checks of real agents.")
    parser.add_argument("names", nargs="*", choices=[[], *PRESETS], help="presets; without any, all of them")
    parser.add_argument("--page", type=pathlib.Path, help="the page to write")
    parser.add_argument("--home", type=pathlib.Path, help="a home to keep, with the programs installed in it")
    parser.add_argument("--measure", action="store_true", help="measure start and memory again, and keep the checks' results")
    options = parser.parse_args()
    results = run_matrix(options.names or PRESETS, options.home, measure_preset if options.measure else run_preset)
    if options.page:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept.update(results)
        kept = {name: kept[name] for name in PRESETS if name in kept}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        options.page.write_text(page(kept))
    failed = [name for name, row in results.items() if any(r.startswith("failed") for r in row["checks"].values())]
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

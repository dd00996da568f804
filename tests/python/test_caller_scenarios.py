"""One set of scenarios, `tests/callers/scenarios.json`, for every caller library: Python, Rust, and TypeScript in Node and
in a browser, against the real server."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest

from harness import BIN, DEADLINE, ROOT, Server, running, wait_until
from typescript import node_programs, typescript_client  # noqa: F401: a fixture
from wire import Link

SCENARIOS = json.loads((ROOT / "tests" / "callers" / "scenarios.json").read_text())
# A grace period long enough to reconnect on a busy machine.
CONFIG = "[relay]\nreconnect_grace = '20s'\n"
NODE = ROOT / "tests" / "node"


class CommandFailed(Exception):
    """A driver's command ended with an error."""

    def __init__(self, error: dict[str, Any]):
        super().__init__(str(error))
        self.error = error


class Driver:
    """A driver program: commands go in, replies and notes come out."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ})
        self._ids = itertools.count(1)
        self._replies: dict[int, dict[str, Any]] = {}
        self._notes: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                if "id" in message:
                    self._replies[message["id"]] = message
                else:
                    self._notes.append(message)
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wait(self, find, what: str) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or find() is not None, DEADLINE)
            found = find()
            assert found is not None, f"no {what}; notes: {self._notes}"
            return found

    def command(self, caller: str, name: str, **args: Any) -> dict[str, Any]:
        id = next(self._ids)
        self._process.stdin.write(json.dumps({"id": id, "caller": caller, "do": name, **args}) + "\n")
        self._process.stdin.flush()
        reply = self._wait(lambda: self._replies.get(id), f"reply to {name}")
        if "error" in reply:
            raise CommandFailed(reply["error"])
        return reply["ok"]

    def notes(self, caller: str, note: str) -> list[dict[str, Any]]:
        with self._changed:
            return [n for n in self._notes if n["caller"] == caller and n["note"] == note]

    def until(self, caller: str, **wanted: Any) -> None:
        def find():
            return next((n for n in self._notes if n["caller"] == caller and contains(n, wanted)), None)

        self._wait(find, f"note {wanted} of {caller}")

    def close(self) -> None:
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._process.kill()
        self._process.wait(timeout=DEADLINE)


def contains(whole: dict[str, Any], part: dict[str, Any]) -> bool:
    return all(whole.get(name) == value for name, value in part.items())


# -- the libraries -----------------------------------------------------------------------------------


def rust_driver() -> pathlib.Path:
    """`tests/examples/caller_driver.rs`, built: beside the programs under test, or by cargo."""
    built = BIN / "examples" / "caller_driver"
    if not built.exists():
        build = ["cargo", "build", "--quiet", "-p", "oubliette-tests", "--example", "caller_driver", "--message-format=json"]
        out = subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        made = (json.loads(line) for line in out.splitlines())
        built = pathlib.Path(next(m["executable"] for m in made if m.get("executable")))
    return built


def node_name(program: str) -> str:
    return "node-" + subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.strip()


NODES = {node_name(program): program for program in node_programs()}
LIBRARIES = ["python", "rust", *NODES, "browser"]


@pytest.fixture(scope="module", params=LIBRARIES)
def driver(request, typescript_client):  # noqa: F811
    name = request.param
    if name == "python":
        command = [sys.executable, str(ROOT / "tests" / "python" / "caller_driver.py")]
    elif name == "rust":
        command = [str(rust_driver())]
    elif name == "browser":
        command = [node_programs()[-1], str(NODE / "caller-driver-browser.mjs")]
    else:
        command = [NODES[name], str(NODE / "caller-driver-node.mjs")]
    driver = Driver(command)
    yield driver
    driver.close()


# -- the server --------------------------------------------------------------------------------------


class Site:
    """A server with one configuration, behind a network that can be cut."""

    def __init__(self, server: Server, link: Link):
        self.server, self.link = server, link
        self.admin, self.token = server.token("admin"), server.token("write")


@pytest.fixture(scope="module")
def sites():
    with contextlib.ExitStack() as open:
        made: dict[str, Site] = {}

        def site(config: str) -> Site:
            if config not in made:
                server = open.enter_context(running(config))
                made[config] = Site(server, open.enter_context(Link(server.port)))
            return made[config]

        yield site


class Play:
    """One scenario, played with one library."""

    def __init__(self, scenario: dict[str, Any], driver: Driver, site: Site, prefix: str):
        self.driver, self.site, self.prefix = driver, site, prefix
        self.session_id: str | None = None
        api = site.server.api
        self.project = api("project_create", site.admin, name=prefix)["project_id"]
        self.agent = scenario["name"].replace("_", "-")
        site.server.put_agent(self.agent, site.admin, scenario["turns"])

    def key(self, caller: str) -> str:
        """A caller's name in the driver, which serves all scenarios."""
        return f"{self.prefix}/{caller}"

    def step(self, step: dict[str, Any]) -> None:
        match step:
            case {"network": "cut"}:
                self.site.link.cut()
            case {"server": "restart"}:
                self.site.server.kill()
                self.site.server.start()
            case {"admin": "message"}:
                self.site.server.api("session_message", self.site.admin, session_id=self.session_id, message="again")
            case {"admin": "cancel"}:
                self.site.server.api("session_cancel", self.site.admin, session_id=self.session_id)
            case {"log": wanted}:
                wait_until(lambda: any(contains(event, wanted) for event in self.log()), f"{wanted} in the log")
            case {"caller": caller, "until": note}:
                self.driver.until(self.key(caller), **note)
            case {"caller": caller, "do": name, **args}:
                self.command(caller, name, args)

    def command(self, caller: str, name: str, args: dict[str, Any]) -> None:
        result, error = args.pop("result", {}), args.pop("error", None)
        if name == "start":
            options = {"agent": self.agent, "project_id": self.project}
            if args.pop("join", False):
                options = {"session_id": self.session_id}
            args = {"url": self.site.link.url, "token": self.site.token, "caller_id": caller, "options": options, **args}
        if error:
            with pytest.raises(CommandFailed) as failed:
                self.driver.command(self.key(caller), name, **args)
            assert contains(failed.value.error, error), failed.value
            return
        reply = self.driver.command(self.key(caller), name, **args)
        assert contains(reply, result), f"{name}: {reply}"
        self.session_id = reply.get("session_id", self.session_id)

    def log(self) -> list[dict[str, Any]]:
        if self.session_id is None:
            return []
        api = self.site.server.api
        return api("session_events", self.site.admin, session_id=self.session_id, max_events=1000)["events"]

    def check(self, expect: dict[str, Any], callers: set[str]) -> None:
        log = self.log()
        assert sorted(e["outcome"] for e in log if e["type"] == "caller_tool_done") == sorted(expect["outcomes"])
        if "results" in expect:
            results = [e for e in log if e["type"] == "tool_result"]
            assert [e["ok"] for e in results] == [ok for ok, _ in expect["results"]]
            for event, (_, text) in zip(results, expect["results"]):
                assert text in json.dumps(event), event
        for caller in callers:
            if "ran" in expect:
                ran = [[n["tool"], n["arguments"]] for n in self.driver.notes(self.key(caller), "ran")]
                # Those that run side by side begin in any order.
                assert sorted(ran, key=json.dumps) == sorted(expect["ran"].get(caller, []), key=json.dumps)
            if "stopped" in expect:
                stopped = [n["tool"] for n in self.driver.notes(self.key(caller), "stopped")]
                assert stopped == expect["stopped"].get(caller, [])
            heard = [n["index"] for n in self.driver.notes(self.key(caller), "event")]
            assert heard == list(range(heard[0], heard[0] + len(heard))) if heard else True, "each event once, in order"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[s["name"] for s in SCENARIOS])
def test_every_caller_library_plays_the_scenario(scenario, driver, sites, request):
    play = Play(scenario, driver, sites(scenario.get("config", CONFIG)), request.node.callspec.id)
    for step in scenario["steps"]:
        play.step(dict(step))
    play.check(scenario["expect"], {step["caller"] for step in scenario["steps"] if "caller" in step})

"""Real, unmodified agents from their registries, run by their presets against a fake model (`agent_model.py`).

Each check is one thing a user relies on; it returns nothing, or raises. What an agent itself cannot do is in
`KNOWN_LIMITS`, with its reason. `agent_matrix.py` runs every check of every preset, `test_real_agents.py` a part of them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import tempfile
from typing import Any, Callable, Iterator

import httpx
from agent_model import AgentModel
from harness import ROOT, Server, ToolFailed, processes_with, put, wait_until

PROVIDER = "scripted"
PRESETS = ["claude", "codex", "gemini", "opencode", "droid", "qwen", "copilot", "vibe", "openhands"]
TURN_SECONDS = 900.0
"""How many seconds a turn may take before the check fails: its agent may be installed by it. Never a measurement."""
MAX_REFUSED_REQUESTS = 20
"""How many requests an agent may make in a turn that a budget refuses, before it counts as asking for ever."""

SHELL = {
    "claude": ("Bash", "command"), "codex": ("exec_command", "cmd"), "gemini": ("run_shell_command", "command"),
    "opencode": ("bash", "command"), "droid": ("Execute", "command"), "qwen": ("run_shell_command", "command"),
    "copilot": ("bash", "command"), "vibe": ("bash", "command"), "openhands": ("terminal", "command"),
}
"""Each agent's own tool for shell commands, and the argument that has the command."""
SHELL_ARGUMENTS: dict[str, dict[str, Any]] = {
    "droid": {"riskLevel": "low", "riskLevelReason": "it writes one file", "summary": "Write a file"},
    "openhands": {"security_risk": "MEDIUM", "summary": "Write a file"},
    "gemini": {"description": "Write a file"},
    "qwen": {"description": "Write a file", "is_background": False},
    "claude": {"description": "Write a file"},
    "opencode": {"description": "Write a file"},
    "copilot": {"description": "Write a file"},
}
"""What else that tool wants."""

CODEX_DOES_NOT_ASK = (
    "it asks only for commands that leave its own sandbox, which cannot run inside Oubliette's, so the preset switches that sandbox "
    "off; the policy that asked for every command (`untrusted`) was removed from Codex: openai/codex#39973"
)
KNOWN_LIMITS: dict[tuple[str, str], str] = {
    ("droid", "streaming"): "it reports the text of a message when the message is complete",
    ("openhands", "streaming"): "it reports the text of a message when the message is complete",
    ("openhands", "permission gated"): "it asks once for all actions of a step (`Confirm Agent Actions`) and does not name their tools, so they "
    "are refused with the rest; use `\"allow\"`, with which the gate decides about the tools it governs",
    ("codex", "permission deny"): CODEX_DOES_NOT_ASK,
    ("codex", "permission ask"): CODEX_DOES_NOT_ASK,
}
"""What an agent itself cannot do, by preset and check: why, and its public issue where there is one."""


def config(model: AgentModel, idle_sleep: str = "10m") -> str:
    """An `oubliette.toml` with the fake model as the provider of every preset, patient with a busy machine."""
    provider = f'[providers.{PROVIDER}]\nbase_url = "http://127.0.0.1:{model.port}"\n'
    session = f'[session]\nstart_timeout = "5m"\nidle_sleep = "{idle_sleep}"\n'
    return f'{provider}{session}[programs]\ninstall_timeout = "1h"\n'


def preset_program(preset: str) -> dict[str, Any]:
    """The package of a preset as the tree has it: the programs checked may be built from a commit with an older pin."""
    file = ROOT / "crates" / "server" / "presets" / f"{preset}.json"
    return json.loads(file.read_text())["definition"]["runtime"]["program"]


class RealAgent:
    """One preset in one session, which the checks use one after the other."""

    def __init__(self, server: Server, preset: str, model: AgentModel):
        self.server, self.preset, self.model = server, preset, model
        self.admin = server.token("admin")
        self.project = self.new_project()
        name = "gemini-2.5-flash" if preset == "gemini" else "m"
        listed = server.api("preset_list", self.admin, name=preset, model=f"{PROVIDER}/{name}")["presets"][0]
        self.program = listed["definition"]["runtime"]["program"] = preset_program(preset)
        self.package: str = self.program.get("npm") or self.program["pypi"]
        server.put_tool("reader", self.admin, kind="builtin", builtinPolicy={"name": "fs_read", "allowedPaths": ["./"]})
        self.mark = f"matrix-{preset}-{os.urandom(6).hex()}"
        secret = {"tool": "@reader/fs_read", "when": {"properties": {"path": {"const": "secret.txt"}}, "required": ["path"]}}
        tools = {"use": ["reader"], "denied": ["session_events", secret]}
        definition = {**listed["definition"], "prompt": "Do as you are told.", "tools": tools, "env": {"MATRIX_MARK": self.mark}}
        self.definition, self.files = definition, listed.get("files", {})
        self.put_agents()
        server.put_agent("other", self.admin, [[{"say": "other here"}]])
        self.session: str | None = None
        self.started: float | None = None
        self.memory: int | None = None
        self.cpu: float | None = None

    def put_agents(self) -> None:
        """Stores the agent under each of the `permissions`."""
        for permissions in ("allow", "deny", "ask"):
            slug = self.preset if permissions == "allow" else f"{self.preset}-{permissions}"
            self.call("agent_put", slug=slug, definition={**self.definition, "permissions": permissions}, files=self.files)

    def new_project(self) -> str:
        return self.call("project_create", name=f"matrix-{self.preset}", api_key={"scope": "read"})["project_id"]

    def call(self, tool: str, **arguments: Any) -> Any:
        answer = httpx.post(
            f"{self.server.url}/api/tools/{tool}", json=arguments, headers={"Authorization": f"Bearer {self.admin}"}, timeout=TURN_SECONDS
        )
        body = answer.json()
        if answer.status_code != 200:
            raise ToolFailed(body["error"]["code"], body["error"]["message"], answer.status_code)
        return body

    def tell(self, message: str, session: str | None = None, **more: Any) -> str:
        """One turn, in the session of the checks unless another is given; returns its text."""
        session = session or self.session
        where = {"session_id": session} if session else {"project_id": self.project, "agent": self.preset}
        done = self.call("session_message", message=message, wait=True, **where, **more)
        self.session = self.session or done["session_id"]
        return done["text"]

    def send(self, message: str, permissions: str, project: str | None = None) -> str:
        """Begins a session of its own with the agent under these `permissions`; returns its id at once."""
        agent = self.preset if permissions == "allow" else f"{self.preset}-{permissions}"
        return self.call("session_message", message=message, project_id=project or self.project, agent=agent)["session_id"]

    def end(self, session: str) -> None:
        with contextlib.suppress(ToolFailed):
            self.call("session_end", session_id=session)

    def events(self, session: str | None = None, since: int = -1) -> list[dict[str, Any]]:
        return self.call("session_events", session_id=session or self.session, since_index=since, max_events=1000)["events"]

    def until(self, found: Callable[[dict[str, Any]], bool], what: str, since: int = -1, session: str | None = None) -> dict[str, Any]:
        """The first such event."""
        end = datetime.datetime.now().timestamp() + TURN_SECONDS
        while datetime.datetime.now().timestamp() < end:
            arguments = {"session_id": session or self.session, "since_index": since, "max_events": 1000, "wait_ms": 20_000}
            page = self.call("session_events", **arguments)
            for event in page["events"]:
                if found(event):
                    return event
                since = event["index"]
        raise AssertionError(f"waited {TURN_SECONDS:.0f} s in vain for {what}")

    def until_ended(self, since: int = -1, session: str | None = None) -> dict[str, Any]:
        """The end of the turn; an error event ends it too."""
        return self.until(lambda e: e["type"] in ("turn_completed", "error"), "the end of the turn", since, session)

    def last_index(self) -> int:
        events = self.events()
        while True:
            more = self.events(since=events[-1]["index"])
            if not more:
                return events[-1]["index"]
            events = more

    def debug(self, *kinds: str, session: str | None = None) -> list[dict[str, Any]]:
        return self.call("debugger_events", session_id=session or self.session, kinds=list(kinds), max_events=1000)["events"]

    def restart(self, text: str) -> None:
        """Starts the stopped server again with this configuration."""
        (self.server.home / "oubliette.toml").write_text(text)
        self.server.start()

    # -- the checks --------------------------------------------------------------------------------

    def check_turn(self) -> None:
        said = self.tell("[[say hello there]]")
        assert "hello there" in said, said
        events = self.events()
        assert not [e for e in events if e["type"] == "error"], events

    def measure(self) -> None:
        """Measures start and memory in a new session: the first start may have installed the package."""
        self.end(self.session)
        self.session = None
        assert "hello again" in self.tell("[[say hello again]]")
        times = {e["status"]: e["ts"] for e in reversed(self.events()) if e["type"] == "status"}
        self.started = seconds(times["running"]) - seconds(times["starting"])
        processes = processes_with(self.mark)
        self.memory = sum(resident(pid) for pid in processes) // (1024 * 1024)
        self.cpu = sum(cpu_seconds(pid) for pid in processes)

    def check_streaming(self) -> None:
        since = self.last_index()
        said = self.tell("[[stream 12]]")
        assert all(f"piece-{n}" in said for n in range(1, 13)), said
        deltas = [e for e in self.events(since=since) if e["type"] == "delta"]
        assert len(deltas) > 1, deltas

    def check_lent_tool(self) -> None:
        self.lend("notify")

    def check_tool_lent_later(self) -> None:
        self.lend("notify", "later")

    def lend(self, *tools: str) -> None:
        """The agent calls the last of the lent tools, and its answer comes back in the turn's text."""
        since = self.last_index() if self.session else -1
        context = {"caller_id": "myapp", "caller_tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools]}
        where = {"session_id": self.session} if self.session else {"project_id": self.project, "agent": self.preset}
        sent = self.call("session_message", message=f"[[call myapp_{tools[-1]} {{}}]]", context=context, **where)
        self.session = sent["session_id"]
        ended = ("caller_tool_request", "turn_completed", "error")
        request = self.until(lambda e: e["type"] in ended, "the call of the lent tool", since)
        assert request["type"] == "caller_tool_request", f"the turn ended without a call: {request}"
        self.call("caller_tool_response", session_id=self.session, request_id=request["request_id"], result=f"lent-{tools[-1]}")
        done = self.until_ended(request["index"])
        assert f"lent-{tools[-1]}" in done.get("text", ""), done

    def write(self, name: str, text: str) -> None:
        """Writes a file of the session's workspace."""
        workspace = self.call("session_get", session_id=self.session)["workspace_id"]
        headers = {"Authorization": f"Bearer {self.admin}"}
        put(f"{self.server.url}/api/workspaces/{workspace}/files/{name}", content=text.encode(), headers=headers)

    def check_catalog_tool(self) -> None:
        self.write("note.txt", "the note says plum")
        said = self.tell('[[call reader_fs_read {"path":"note.txt"}]]')
        assert "the note says plum" in said, said

    def check_own_tool(self) -> None:
        said = self.tell("[[call oubliette_session_list {}]]")
        assert self.session in said, said

    def check_blocked_tool(self) -> None:
        """A tool that is always denied is not listed; a call that a rule denies is refused, and the agent hears it."""
        self.write("secret.txt", "the secret is pear")
        said = self.tell('[[call reader_fs_read {"path":"secret.txt"}]]')
        assert "The tools said:" in said and "pear" not in said and "may not call" in said, said
        blocked = self.debug("tool_blocked")
        assert blocked and blocked[-1]["canonical"] == "@reader/fs_read", blocked
        listed = self.call("session_get", session_id=self.session)["tools_listed"]
        assert "session_message" in listed and "session_events" not in listed, listed

    def check_cancel(self) -> None:
        since, before = self.last_index(), self.model.hanging
        self.call("session_message", session_id=self.session, message="[[hang]]")
        # Not until the first text: some agents hold back a text that does not go on.
        wait_until(lambda: self.model.hanging > before, "the model's answer", TURN_SECONDS)
        assert self.call("session_cancel", session_id=self.session)["cancelled"]
        ended = self.until_ended(since)
        assert ended["type"] == "turn_completed" and ended["stop_reason"] == "cancelled", ended
        assert "still here" in self.tell("[[say still here]]")

    def check_switch_and_back(self) -> None:
        self.tell("[[remember plum]]")
        self.call("session_switch_agent", session_id=self.session, agent="other")
        assert self.tell("hello") == "other here"
        self.call("session_switch_agent", session_id=self.session, agent=self.preset)
        self.recalls()

    def recalls(self) -> None:
        """The agent knows what it was told before, and no turn has the text of another."""
        said = self.tell("[[recall]]")
        assert "remembered:" in said and "plum" in said, said
        assert "other here" not in said and said.count("remembered:") == 1, said

    def check_sleep_and_resume(self) -> None:
        self.server.stop()
        self.restart(config(self.model, idle_sleep="1s"))
        self.recalls()
        wait_until(lambda: not processes_with(self.mark), "the agent to be asleep", TURN_SECONDS)
        self.recalls()
        self.server.stop()
        self.restart(config(self.model))

    def check_agent_killed(self) -> None:
        self.tell("[[say here]]")
        for pid in processes_with(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        wait_until(lambda: not processes_with(self.mark), "the agent to be gone")
        with contextlib.suppress(ToolFailed):  # the turn that finds it dead may fail
            self.tell("[[say once more]]")
        self.recalls()

    def check_resume_after_kill_9(self) -> None:
        self.server.kill()
        self.server.start()
        self.recalls()
        self.lend("notify", "again")

    # -- permissions, each in a session of its own ---------------------------------------------------

    def shell(self, permissions: str) -> str:
        """Begins a session in which the agent writes a file by a command of its own tool."""
        tool, argument = SHELL[self.preset]
        self.file = f"ran-{os.urandom(6).hex()}.txt"
        arguments = {argument: f"echo ran > {self.file}", **SHELL_ARGUMENTS.get(self.preset, {})}
        return self.send(f"[[call {tool} {json.dumps(arguments)}]]", permissions)

    def ran(self, session: str) -> bool:
        """Whether the last such command ran."""
        workspace = self.call("session_get", session_id=session)["workspace_id"]
        url = f"{self.server.url}/api/workspaces/{workspace}/files/{self.file}"
        answer = httpx.get(url, headers={"Authorization": f"Bearer {self.admin}"}, timeout=TURN_SECONDS)
        assert answer.status_code in (200, 404), answer
        return answer.status_code == 200

    def asked(self, session: str) -> list[str]:
        """How the agent's requests about its own tools were answered."""
        return [e["answer"] for e in self.debug("permission", session=session) if not e["gated"]]

    def check_permission_allow(self) -> None:
        session = self.shell("allow")
        ended = self.until_ended(session=session)
        assert self.ran(session), (ended, self.asked(session))
        self.end(session)

    def check_permission_deny(self) -> None:
        session = self.shell("deny")
        ended = self.until_ended(session=session)
        asked = self.asked(session)
        assert asked and set(asked) == {"deny"}, (asked, ended)
        assert not self.ran(session), ended
        self.end(session)

    def check_permission_gated(self) -> None:
        session = self.send("[[call project_list {}]]", "deny")
        ended = self.until_ended(session=session)
        assert self.project in ended.get("text", ""), (ended, self.debug("permission", session=session))
        self.end(session)

    def check_permission_ask(self) -> None:
        """A person is asked, allows one command and denies another."""
        for decision in ("allow", "deny"):
            session = self.shell("ask")
            asked = self.until(lambda e: e["type"] in ("approval_requested", "turn_completed", "error"), "the request", session=session)
            assert asked["type"] == "approval_requested" and asked["source"] == "agent", asked
            assert not self.ran(session), "it ran before anybody was asked"
            since = asked["index"]
            # Some agents ask about one command more than once.
            while asked["type"] == "approval_requested":
                self.call("approval_decide", approval_id=asked["approval_id"], decision=decision)
                since = asked["index"]
                ends = ("approval_requested", "turn_completed", "error")
                asked = self.until(lambda e: e["type"] in ends, "the end of the turn", since, session)
            assert self.ran(session) == (decision == "allow"), (decision, asked)
            self.end(session)

    def check_budget_refusal(self) -> None:
        """Past its project's budget the agent's turn ends, the session says why, and the agent does not ask for ever."""
        project = self.new_project()
        session = self.send("[[say before]]", "allow", project)
        ended = self.until_ended(session=session)
        assert "before" in ended.get("text", ""), ended
        self.call("project_update", project_id=project, limits={"tokens_per_day": 1})
        self.call("session_message", session_id=session, message="[[say after]]")
        statuses = ("idle", "failed")
        over = self.until(lambda e: e["type"] == "status" and e["status"] in statuses, "the end of the turn", ended["index"] + 1, session)
        errors = [e for e in self.events(session) if e["type"] == "error"]
        assert errors and errors[0]["code"] == "limit_exceeded" and "tokens_per_day" in errors[0]["message"], (errors, over)
        refused = [e for e in self.debug("model_request", session=session) if e["status"] == 429]
        assert 1 <= len(refused) <= MAX_REFUSED_REQUESTS, len(refused)
        self.call("project_update", project_id=project, limits={"tokens_per_day": 1_000_000})
        assert "after all" in self.tell("[[say after all]]", session)
        self.end(session)

    CHECKS = [
        "turn", "streaming", "lent tool", "tool lent later", "catalog tool", "own tool", "blocked tool", "cancel",
        "switch and back", "sleep and resume", "resume after kill -9", "agent killed",
        "permission allow", "permission deny", "permission gated", "permission ask", "budget refusal",
    ]

    def run(self, check: str) -> None:
        getattr(self, "check_" + check.replace(" -", "_").replace(" ", "_"))()


def seconds(ts: str) -> float:
    return datetime.datetime.fromisoformat(ts.replace("Z", "+00:00")).timestamp()


def resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return 0


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process and of its children that have ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@contextlib.contextmanager
def serving(home: pathlib.Path | None = None) -> Iterator[tuple[Server, AgentModel]]:
    """A server whose presets use the fake model. `home` is kept, with the programs installed in it."""
    model = AgentModel()
    with contextlib.ExitStack() as stack:
        if home is None:
            home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True))) / "h"
        server = Server(home)
        (home / "oubliette.toml").write_text(config(model))
        server.start()
        try:
            yield server, model
        finally:
            if server.process and server.process.poll() is None:
                server.stop()
            model.close()

"""The clients of the fault rounds, which write through the server and record what they were told (`fault_load.Load`)."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
from typing import TYPE_CHECKING, Any, Callable, Iterator

from fault_history import Connection, Refused, ServerGone, digest

if TYPE_CHECKING:
    from fault_load import Load

WAITING_MESSAGES = 3
"""Messages a client sends ahead of the turn that runs."""
FIRST_AGENT = "worker"
AGENTS = (FIRST_AGENT, "second")


class Client(threading.Thread):
    """A client of its own, with its own token, that does one step after another."""

    def __init__(self, load: "Load", name: str, token: dict[str, str] | None = None):
        super().__init__(name=name, daemon=True)
        self.load = load
        self.token = token or load.make_token(name)
        self.http = load.connect(self.token["token"])
        self.random = random.Random(f"{load.seed} {name}")
        self.epoch = 0
        load.gate.join(self)

    def run(self) -> None:
        broken_in = None
        try:
            while not self.finished():
                epoch = self.load.gate.enter(self, broken_in)
                if epoch != self.epoch:
                    self.epoch, broken_in = epoch, None
                    self.close()
                try:
                    self.step()
                except ServerGone as error:
                    broken_in = self.load.connection_broke(self, error)
                except Refused as error:
                    self.load.refusals[error.code] += 1
        except SystemExit:
            pass
        except Exception as error:  # reported by the next round
            self.load.client_failed(self, error)
        finally:
            self.close()
            self.load.gate.leave(self)

    def step(self) -> None:
        raise NotImplementedError

    def finished(self) -> bool:
        return False

    def close(self) -> None:
        """Closes connections: those to a killed server are of no use to the next one."""
        self.http.close()

    def pause(self, most: float) -> None:
        """A moment between requests, so that a few clients do not take the machine from the sandboxes."""
        self.load.stopping.wait(self.random.uniform(0, most))

    def act(self, action: str, /, *, call: Callable[[], tuple[int, bytes]], **meaning: Any) -> Any:
        """One request that is recorded: before it is sent, and when its answer has come."""
        history = self.load.history
        id = history.sent(client=self.name, action=action, token_id=self.token["token_id"], **meaning)
        try:
            status, text = call()
        except ServerGone:
            history.add("unknown", id=id, **self.load.if_not_acknowledged)
            raise
        answer = json.loads(text)
        if status != 200 or answer.get("isError"):
            error = answer.get("error") or {"code": "tool_error", "message": text.decode()[:500]}
            said = {"code": error["code"], "message": error["message"]}
            history.add("refused", id=id, **said, **self.load.if_not_acknowledged)
            raise Refused(error["code"], error["message"])
        kept = {name: answer[name] for name in ("session_id", "turn", "token_id", "project_id") if name in answer}
        history.add("acknowledged", id=id, result=kept)
        return answer

    def call(self, tool: str, arguments: dict[str, Any], /, **meaning: Any) -> Any:
        body = json.dumps(arguments).encode()
        return self.act(tool, call=lambda: self.http.request("POST", f"/api/tools/{tool}", body), **meaning)

    def put_file(self, workspace: str, path: str, content: bytes) -> None:
        where = f"{workspace}/{path}"
        self.act(
            "workspace_file_put",
            target=where,
            register=f"file {where}",
            value=digest(content),
            call=lambda: self.http.request("PUT", f"/api/workspaces/{workspace}/files/{path}", content),
        )

    def delete_file(self, workspace: str, path: str) -> None:
        where = f"{workspace}/{path}"
        self.act(
            "workspace_file_delete",
            target=where,
            register=f"file {where}",
            value=None,
            call=lambda: self.http.request("DELETE", f"/api/workspaces/{workspace}/files/{path}"),
        )


class Driver(Client):
    """Runs one session after another: messages, switches, ends."""

    session: dict[str, Any] | None = None
    follower: "Follower | None" = None
    sent_turns = 0

    def step(self) -> None:
        if self.session is None:
            return self.start_session()
        if self.sent_turns - self.follower.completed >= WAITING_MESSAGES and not self.follower.idle:
            return self.pause(0.02)
        choice = self.random.random()
        if choice < 0.80:
            self.message()
        elif choice < 0.88:
            self.switch()
        elif choice < 0.94 and self.sent_turns > 2:
            self.end()
        self.pause(0.15)

    def context(self) -> dict[str, Any]:
        return {"caller_id": "app", "caller_tools": [{"name": "note"}]}

    def start_session(self) -> None:
        text = self.load.unique("start")
        arguments = {
            "message": text,
            "project_id": self.load.project,
            "agent": FIRST_AGENT,
            "create_workspace": True,
            "context": self.context(),
        }
        started = self.call("session_message", arguments, session=None, text=text)
        self.sent_turns = started["turn"]
        self.session = {"session_id": started["session_id"], "agent": FIRST_AGENT, "workspace_id": None}
        self.follower = Follower(self.load, started["session_id"], self.token)
        self.follower.start()
        self.load.current[self.name] = self.session

    def message(self) -> None:
        text = self.load.unique("message")
        id = self.session["session_id"]
        arguments = {"message": text, "session_id": id, "context": self.context()}
        try:
            sent = self.call("session_message", arguments, session=id, text=text, target=id)
            self.sent_turns = sent["turn"]
        except Refused as error:
            if error.code in ("conflict", "not_found"):
                self.forget()
            raise

    def switch(self) -> None:
        id = self.session["session_id"]
        agent = AGENTS[(AGENTS.index(self.session["agent"]) + 1) % len(AGENTS)]
        self.session["agent"] = agent
        value = None if agent == FIRST_AGENT else agent
        self.call(
            "session_switch_agent",
            {"session_id": id, "agent": agent},
            target=f"{id} → {agent}",
            register=f"agent of {id}",
            value=value,
        )

    def end(self) -> None:
        id = self.session["session_id"]
        self.forget()
        self.call("session_end", {"session_id": id}, session=id, target=id, register=f"end of {id}", value="ended")

    def forget(self) -> None:
        self.session = None
        self.load.current.pop(self.name, None)


class Follower(Client):
    """A caller that follows one session's log over SSE and answers its tool requests, until the session ends."""

    def __init__(self, load: "Load", session_id: str, token: dict[str, str]):
        super().__init__(load, f"follower of {session_id}", token)
        self.session_id = session_id
        self.last_index = -1
        self.completed = 0
        self.idle = False
        self.over = False
        self.answered: set[str] = set()
        self.answers = load.connect(token["token"])

    def finished(self) -> bool:
        return self.over

    def close(self) -> None:
        super().close()
        self.answers.close()

    def step(self) -> None:
        path = f"/api/sessions/{self.session_id}/events?since_index={self.last_index}&caller_id=app"
        for event in stream(self.http, path):
            self.load.history.add("shown", log=self.session_id, data=event)
            self.last_index = max(self.last_index, event["index"])
            if event["type"] == "caller_tool_request":
                self.answer(event)
            elif event["type"] == "turn_completed":
                self.completed = event["turn"]
            elif event["type"] == "status":
                self.idle = event["status"] == "idle"
                if event["status"] == "ended":
                    self.over = True
                    return self.http.close()

    def answer(self, event: dict[str, Any]) -> None:
        request_id = event["request_id"]
        if request_id in self.answered:
            return
        self.answered.add(request_id)
        arguments = {"session_id": self.session_id, "request_id": request_id, "result": {"noted": request_id}}
        body = json.dumps(arguments).encode()
        with contextlib.suppress(Refused):  # it was over before the answer came
            self.act(
                "caller_tool_response",
                request_id=request_id,
                target=f"{self.session_id} {request_id}",
                call=lambda: self.answers.request("POST", "/api/tools/caller_tool_response", body),
            )


class Poller(Client):
    """Follows the sessions in turn with long polls; now and then it reads a log from its start."""

    def __init__(self, load: "Load", name: str):
        super().__init__(load, name)
        self.last: dict[str, int] = {}

    def step(self) -> None:
        sessions = list(self.load.current.values())
        if not sessions:
            return self.pause(0.05)
        id = self.random.choice(sessions)["session_id"]
        since = -1 if self.random.random() < 0.1 else self.last.get(id, -1)
        page = self.http.tool("session_events", session_id=id, since_index=since, max_events=1000, wait_ms=200)
        for event in page["events"]:
            self.load.history.add("shown", log=id, data=event)
        self.last[id] = page["last_index"]
        self.pause(0.1)


class DebuggerFollower(Client):
    """Follows the debugger's log over SSE."""

    last_index = -1

    def step(self) -> None:
        for event in stream(self.http, f"/api/debugger?since_index={self.last_index}"):
            self.load.history.add("shown", log="debugger", data=event)
            self.last_index = event["index"]


class ToolCaller(Client):
    """Calls tools of the sessions from outside: a tool server's, and built-ins that write files and start programs."""

    def step(self) -> None:
        sessions = list(self.load.current.values())
        if not sessions:
            return self.pause(0.05)
        session = self.random.choice(sessions)
        id = session["session_id"]
        if session["workspace_id"] is None:
            session["workspace_id"] = self.http.tool("session_get", session_id=id)["workspace_id"]
        place = session["workspace_id"]
        choice = self.random.random()
        if choice < 0.4:
            mark = self.load.unique("tally")
            self.call_tool(id, "@tally/add", {"mark": mark}, mark=mark, mark_kept=True)
        elif choice < 0.7:
            path = f"out/{self.random.randrange(4)}.txt"
            content = self.load.unique("write") * self.random.randrange(1, 2000)
            arguments = {"path": path, "content": content, "mode": "replace"}
            self.call_tool(
                id, "@writer/fs_write", arguments, register=f"file {place}/{path}", value=digest(content.encode())
            )
        else:
            path = f"touched-{self.random.randrange(4)}"
            self.call_tool(
                id, "@shell/shell_exec", {"argv": ["touch", path]}, register=f"file {place}/{path}", value=digest(b"")
            )
        self.pause(0.05)

    def call_tool(self, session_id: str, tool: str, arguments: dict[str, Any], **meaning: Any) -> None:
        given = {"session_id": session_id, "tool": tool, "arguments": arguments}
        self.call("tool_call", given, target=f"{session_id} {tool}", **meaning)


class Launcher(ToolCaller):
    """Starts one sandbox after another during a burst: a kill in that moment must leave nothing of them."""

    def step(self) -> None:
        if not self.load.burst.wait(0.05):
            return
        sessions = list(self.load.current.values())
        if not sessions:
            return self.pause(0.05)
        id = self.random.choice(sessions)["session_id"]
        self.call_tool(id, "@shell/shell_exec", {"argv": ["true"]})


class TokenClient(Client):
    """Makes tokens and revokes some."""

    def __init__(self, load: "Load", name: str):
        super().__init__(load, name)
        self.active: list[tuple[str, str]] = []

    def step(self) -> None:
        if self.active and self.random.random() < 0.4:
            name, token_id = self.active.pop(self.random.randrange(len(self.active)))
            self.call(
                "token_revoke", {"token_id": token_id}, target=token_id, register=f"token {name}", value="revoked"
            )
        else:
            name = self.load.unique("token")
            arguments = {"name": name, "scope": self.random.choice(["read", "write", "admin"])}
            made = self.call(
                "token_create", arguments, target=name, register=f"token {name}", value="active", mark=f"token {name}"
            )
            self.load.secrets[name] = made["token"]
            self.active.append((name, made["token_id"]))
        self.pause(0.05)


class DefinitionClient(Client):
    """Writes projects and agents."""

    def __init__(self, load: "Load", name: str):
        super().__init__(load, name)
        self.projects: dict[str, str] = {}

    def step(self) -> None:
        if self.random.random() < 0.4:
            self.write_agent()
        else:
            self.write_project()
        self.pause(0.06)

    def write_agent(self) -> None:
        slug = f"agent-{self.random.randrange(4)}"
        if self.random.random() < 0.2:
            meaning = {"target": slug, "register": f"agent {slug}", "value": None}
            return self.call("agent_delete", {"slug": slug}, **meaning)
        prompt = self.load.unique("prompt") * self.random.randrange(1, 200)
        definition = {"name": slug, "prompt": prompt}
        value = digest(prompt.encode())
        self.call(
            "agent_put", {"slug": slug, "definition": definition}, target=slug, register=f"agent {slug}", value=value
        )

    def write_project(self) -> None:
        text = self.load.unique("project")
        if len(self.projects) < 3:
            meaning = {"target": text, "register": f"project {text}", "value": text, "mark": f"project {text}"}
            made = self.call("project_create", {"name": text, "description": text}, **meaning)
            self.projects[text] = made["project_id"]
            return
        name = self.random.choice(list(self.projects))
        id = self.projects[name]
        if self.random.random() < 0.3:
            del self.projects[name]
            self.call("project_delete", {"project_id": id}, target=id, register=f"project {name}", value=None)
        else:
            arguments = {"project_id": id, "description": text}
            self.call("project_update", arguments, target=id, register=f"project {name}", value=text)


class FileClient(Client):
    """Writes files of one workspace over HTTP."""

    def step(self) -> None:
        path = self.random.choice(["a.txt", "b.bin", "deep/c.txt", "deep/er/d.bin", "e", "f"])
        if self.random.random() < 0.1:
            self.delete_file(self.load.workspace, path)
        else:
            size = self.random.choice([0, 10, 5_000, 300_000, 2_000_000])
            self.put_file(self.load.workspace, path, self.load.unique("file").encode() + self.random.randbytes(size))
        self.pause(0.08)


def stream(connection: Connection, path: str) -> Iterator[dict[str, Any]]:
    """The events of an SSE stream, until it breaks."""
    response = connection.open("GET", path)
    if response.status != 200:
        error = json.loads(response.read())["error"]
        raise Refused(error["code"], error["message"])
    data = b""
    try:
        for line in response:
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                data += line[5:].strip()
            elif not line and data:
                yield json.loads(data)
                data = b""
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise ServerGone(repr(error)) from error
    connection.close()
    raise ServerGone("the stream ended")

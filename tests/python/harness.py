"""A real server in a fresh home, and clients for it: command line, REST, MCP, event streams.

No part of Oubliette is mocked: every test starts the `oubliette` program, speaks to it over real sockets, and
lets it start real sandboxes. Only the model is replaced: agents follow a `script:` file or call a scripted model
server on loopback, because a paid model cannot be part of a test.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import queue
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import Any, AsyncIterator, Iterator

import httpx
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

import result_types
import stores

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("OUBLIETTE_BIN_DIR", ROOT / "target" / "debug"))
DEADLINE = 240.0
"""How many seconds a test waits for anything before it fails. Never a measurement."""

LEGACY = "legacy"
MODERN = "2026-07-28"


class ToolFailed(Exception):
    """A tool answered with an error."""

    def __init__(self, code: str, message: str, status: int | None = None):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


def free_port() -> int:
    """A free port below the kernel's ephemeral range, so that no outgoing connection takes it before the server
    binds it, or while the server restarts."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def request(method: str, url: str, **more: Any) -> httpx.Response:
    """One HTTP request, with `DEADLINE` as its timeout."""
    return httpx.request(method, url, **{"timeout": DEADLINE, **more})


get, post, put, delete = (functools.partial(request, method) for method in ("GET", "POST", "PUT", "DELETE"))


def wait_until(check, what: str, deadline: float = DEADLINE):
    """Polls for a state that no event announces (a process gone, a port open)."""
    end = time.monotonic() + deadline
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline:.0f} s in vain for {what}")
        time.sleep(0.02)


class Server:
    """One `oubliette serve`, or another command that serves."""

    def __init__(self, home: pathlib.Path, config: str = "", env: dict[str, str] | None = None, command: str = "serve"):
        self.home = home
        self.port = free_port()
        self.env = env or {}
        self.command = command
        self.programs = BIN
        self.process: subprocess.Popen | None = None
        self._document: str | None = None
        self._log: pathlib.Path = home.parent / f"{home.name}.log"
        home.mkdir(mode=0o700, exist_ok=True)
        if config:
            (home / "oubliette.toml").write_text(config)

    # -- the process -------------------------------------------------------------------------------

    def start(self) -> "Server":
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.programs / "oubliette", "--home", self.home, self.command, "--listen", f"127.0.0.1:{self.port}"],
                env={**os.environ, **stores.env(self.home), **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._ready, "the server to be ready")
        return self

    def _ready(self) -> bool:
        if self.process and self.process.poll() is not None:
            raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log()}")
        try:
            return get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> int:
        """Stops it with SIGTERM; returns its exit code."""
        assert self.process
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=DEADLINE)

    def kill(self) -> None:
        """Kills it with SIGKILL."""
        assert self.process
        self.process.kill()
        self.process.wait(timeout=DEADLINE)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- the command line --------------------------------------------------------------------------

    def cli(self, *args: str, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [self.programs / "oubliette", "--home", self.home, *args],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            **{"env": {**os.environ, **stores.env(self.home)}, **kwargs},
        )
        assert not check or done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def cli_json(self, *args: str) -> Any:
        return json.loads(self.cli(*args, "--json").stdout)

    def token(self, scope: str = "admin", project: str | None = None, **more: str) -> str:
        args = ["token", "create", "--name", f"test-{scope}", "--scope", scope]
        args += ["--project", project] if project else []
        for name, value in more.items():
            args += [f"--{name}", value]
        return self.cli_json(*args)["token"]

    # -- REST --------------------------------------------------------------------------------------

    def api(self, tool: str, token: str, /, **arguments: Any) -> Any:
        """Calls one tool over REST."""
        answer = post(f"{self.url}/api/tools/{tool}", json=arguments, headers={"Authorization": f"Bearer {token}"})
        body = answer.json()
        if answer.status_code != 200:
            raise ToolFailed(body["error"]["code"], body["error"]["message"], answer.status_code)
        # Every answer of every test, so that the published types are those of real answers.
        result_types.check(self._openapi(), tool, body)
        return body

    def _openapi(self) -> str:
        if self._document is None:
            self._document = get(f"{self.url}/api/openapi.json").text
        return self._document

    def events(self, session_id: str, token: str, since: int = -1, **query: Any) -> "Events":
        return Events(self, f"/api/sessions/{session_id}/events", {"since_index": since, **query}, token)

    def debugger(self, token: str, since: int = -1, **query: Any) -> "Events":
        return Events(self, "/api/debugger", {"since_index": since, **query}, token)

    def metric(self, token: str, name: str, **labels: str) -> float:
        """One value of `/metrics`."""
        text = get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
        # Of a server of a cluster every sample says whose it is.
        text = re.sub(r'(?<=[{,])server_address="[^"]*",?', "", text).replace("{} ", " ")
        label = "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else ""
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name}{label} ")))

    # -- MCP ---------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def mcp(self, token: str, mode: str = MODERN, **options: Any) -> AsyncIterator["Mcp"]:
        headers = {"Authorization": f"Bearer {token}"}
        timeout = httpx2.Timeout(DEADLINE, read=300)
        async with httpx2.AsyncClient(headers=headers, timeout=timeout) as http:
            transport = streamable_http_client(f"{self.url}/mcp", http_client=http)
            if "logging_callback" in options:
                options.setdefault("log_level", "info")
            async with Client(transport, mode=mode, cache=None, **options) as client:
                yield Mcp(client)

    # -- definitions -------------------------------------------------------------------------------

    def put_agent(self, slug: str, token: str, turns: list | None = None, **definition: Any) -> None:
        """Stores an agent; with `turns`, one that follows them as its script."""
        files = {}
        if turns is not None:
            definition["model"] = "script:script.json"
            files["script.json"] = json.dumps({"turns": turns})
        body = {"name": slug, "prompt": "Follow the script.", **definition}
        self.api("agent_put", token, slug=slug, definition=body, files=files)

    def put_tool(self, id: str, token: str, **definition: Any) -> None:
        self.api("catalog_put", token, id=id, definition={"id": id, **definition})


class Mcp:
    """The Python SDK's client, with results unwrapped."""

    def __init__(self, client: Client):
        self.client = client

    async def call(self, tool: str, /, **arguments: Any) -> Any:
        result = await self.client.call_tool(tool, arguments)
        if result.is_error:
            error = (result.structured_content or {}).get("error", {})
            raise ToolFailed(error.get("code", "?"), error.get("message", str(result.content)))
        return result.structured_content

    async def tools(self) -> dict[str, Any]:
        listed = await self.client.list_tools()
        return {tool.name: tool for tool in listed.tools}


class Events:
    """An SSE stream, read on a thread, so that a test can wait for a certain event."""

    def __init__(self, server: Server, path: str, query: dict[str, Any], token: str):
        self.seen: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self._queue: queue.Queue[Any] = queue.Queue()
        self._closed = threading.Event()
        self._opened = threading.Event()
        self._http = httpx.Client(timeout=httpx.Timeout(DEADLINE, read=None))
        request = self._http.build_request(
            "GET", f"{server.url}{path}", params=query, headers={"Authorization": f"Bearer {token}"}
        )
        self._response = self._http.send(request, stream=True)
        if self._response.status_code != 200:
            body = json.loads(self._response.read())
            raise ToolFailed(body["error"]["code"], body["error"]["message"], self._response.status_code)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            for line in self._response.iter_lines():
                if line == "":
                    if "data" in fields:
                        self._queue.put((fields.get("id", ""), json.loads(fields["data"])))
                    fields = {}
                elif not line.startswith(":"):
                    name, _, value = line.partition(":")
                    fields[name] = value.removeprefix(" ")
        except Exception as error:  # the stream was closed while it was read
            if not self._closed.is_set():
                self._queue.put(error)
                return
        self._queue.put(None)

    def next(self, deadline: float = DEADLINE) -> dict[str, Any]:
        try:
            item = self._queue.get(timeout=deadline)
        except queue.Empty:
            raise AssertionError(f"no event in {deadline:.0f} s; seen: {[self._name(e) for e in self.seen]}")
        if item is None or isinstance(item, Exception):
            raise EOFError(f"the stream ended: {item}")
        id, event = item
        self.ids.append(id)
        self.seen.append(event)
        return event

    def until(self, name: str, deadline: float = DEADLINE, **fields: Any) -> dict[str, Any]:
        """The next event of this type (or debugger kind) with these fields."""
        while True:
            event = self.next(deadline)
            if self._name(event) == name and all(event.get(k) == v for k, v in fields.items()):
                return event

    @staticmethod
    def _name(event: dict[str, Any]) -> str:
        return event.get("type") or event.get("kind", "?")

    def close(self) -> None:
        self._closed.set()
        self._response.close()
        self._http.close()

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextlib.contextmanager
def running(config: str = "", env: dict[str, str] | None = None, command: str = "serve") -> Iterator[Server]:
    """A server in a fresh home, stopped at the end."""
    # Processes that a killed server left running may still write while the home is removed.
    with tempfile.TemporaryDirectory(prefix="oub", ignore_cleanup_errors=True) as folder:
        server = Server(pathlib.Path(folder) / "h", config, env, command).start()
        try:
            yield server
        finally:
            if server.process and server.process.poll() is None:
                server.stop()


def processes_with(text: str) -> list[int]:
    """Processes of this machine whose command line or environment contains `text`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found

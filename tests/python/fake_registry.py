"""A fake package registry on loopback, for packages that are broken or evil on purpose. It speaks as much of npm's
registry protocol and of Python's simple index as npm and pip need; real packages come from the real registries."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOL_SERVER = r"""#!/usr/bin/env node
// A small MCP server without dependencies, for tests.
const fs = require("fs");
const tools = {
  // How often it was called, counted in the server's cache.
  count: () => { let n = 0; try { n = +fs.readFileSync("/cache/count", "utf8"); } catch {} fs.writeFileSync("/cache/count", String(n + 1)); return String(n + 1); },
  about: () => JSON.stringify({ argv: process.argv, execPath: process.execPath, exec: process.env.FAKE_NODE ?? null, cache: process.env.npm_config_cache, xdg: process.env.XDG_CACHE_HOME }),
  fill: () => { fs.writeFileSync("/cache/big", Buffer.alloc(4 << 20, 1)); return "filled"; },
  overwrite: () => { try { fs.appendFileSync(__filename, "// changed"); return "written"; } catch (e) { return e.code; } },
};
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) return;
  const answer = (result) => process.stdout.write(JSON.stringify({ jsonrpc: "2.0", id, result }) + "\n");
  if (method === "initialize") answer({ protocolVersion: params.protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "small", version: "1" } });
  else if (method === "tools/list") answer({ tools: Object.keys(tools).map((name) => ({ name, inputSchema: { type: "object" } })) });
  else if (method === "tools/call") answer({ content: [{ type: "text", text: tools[params.name]() }] });
  else answer({});
});
"""

AGENT = r"""#!/usr/bin/env node
// A small ACP agent that says the arguments it was started with, for tests.
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const { id, method, params } = JSON.parse(line);
  const send = (message) => process.stdout.write(JSON.stringify({ jsonrpc: "2.0", ...message }) + "\n");
  if (method === "initialize") send({ id, result: { protocolVersion: 1, agentCapabilities: {}, authMethods: [] } });
  else if (method === "session/new") send({ id, result: { sessionId: "s1" } });
  else if (method === "session/prompt") {
    const text = `started with ${process.argv.slice(2).join(" ")}`;
    send({ method: "session/update", params: { sessionId: "s1", update: { sessionUpdate: "agent_message_chunk", content: { type: "text", text } } } });
    send({ id, result: { stopReason: "end_turn" } });
  } else if (id !== undefined) send({ id, result: {} });
});
"""


class FakeRegistry:
    """An npm registry at `/` and a Python index at `/simple/`."""

    def __init__(self, token: str | None = None):
        self.token = token
        """The bearer token that every request to the npm part must have."""
        self.npm: dict[str, dict[str, dict[str, Any]]] = {}
        self.wheels: dict[str, tuple[str, bytes]] = {}
        self.requests: list[tuple[str, str | None]] = []
        """Path and `Authorization` of each request."""
        self.hold = threading.Event()
        """Requests whose path ends with `held` wait until it is set."""
        self.held = "\0"
        self.waiting = threading.Event()
        """Set when a request waits."""
        self.wheel_hash = ""
        """The SHA-256 that the index promises of every wheel; empty: none."""
        self.rubbish = False
        """Whether every answer is a page that has nothing to do with packages."""
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    @property
    def env(self) -> dict[str, str]:
        """The operator's configuration that names this registry."""
        return {"npm_config_registry": f"{self.url}/", "PIP_INDEX_URL": f"{self.url}/simple", "PIP_EXTRA_INDEX_URL": ""}

    def add(self, name: str, version: str = "1.0.0", files: dict[str, Any] | None = None, **about: Any) -> None:
        """Publishes an npm package; `files` maps paths to text."""
        package = {"name": name, "version": version, **about}
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as archive:
            for path, content in {"package.json": json.dumps(package), **(files or {})}.items():
                content = content.encode() if isinstance(content, str) else content
                entry = tarfile.TarInfo(f"package/{path}")
                entry.size, entry.mode = len(content), 0o755
                archive.addfile(entry, io.BytesIO(content))
        self.npm.setdefault(name, {})[version] = {"about": package, "tarball": data.getvalue()}

    def add_tool_server(self, name: str, version: str = "1.0.0", **about: Any) -> None:
        self.add(name, version, {"index.js": TOOL_SERVER}, **{"bin": {name.split("/")[-1]: "index.js"}, **about})

    def add_wheel(self, name: str, version: str, script: str, requires_python: str = ">=3.8") -> None:
        """Publishes a Python package with one console script."""
        module = name.replace("-", "_")
        info = f"{module}-{version}.dist-info"
        files = {
            f"{module}.py": script,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {requires_python}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {module}:main\n",
        }
        record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            for path, text in {**files, f"{info}/RECORD": record}.items():
                archive.writestr(path, text)
        self.wheels[f"{module}-{version}-py3-none-any.whl"] = (requires_python, data.getvalue())

    def fetched(self, suffix: str) -> int:
        return sum(path.endswith(suffix) for path, _ in self.requests)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.replace("%2f", "/").replace("%2F", "/")
        authorization = request.headers.get("Authorization")
        self.requests.append((path, authorization))
        if path.endswith(self.held):
            self.waiting.set()
            self.hold.wait(300)
        if self.rubbish:
            return self.send(request, 200, b"<html><body>It works!</body></html>", "text/html")
        if path.startswith("/simple/"):
            return self.answer_index(request, path)
        if self.token and authorization != f"Bearer {self.token}":
            return self.send(request, 401, b"{}")
        name, _, file = path.strip("/").partition("/-/")
        package = self.npm.get(name)
        if package and file:
            version = file.removesuffix(".tgz").rpartition("-")[2]
            return self.send(request, 200, package[version]["tarball"], "application/octet-stream")
        if package:
            return self.send(request, 200, json.dumps(self.packument(name, package)).encode())
        self.send(request, 404, b'{"error":"not found"}')

    def answer_index(self, request: BaseHTTPRequestHandler, path: str) -> None:
        file = path.rpartition("/")[2]
        if file in self.wheels:
            return self.send(request, 200, self.wheels[file][1], "application/octet-stream")
        wanted = path.removeprefix("/simple/").strip("/").replace("-", "_")
        promised = f"#sha256={self.wheel_hash}" if self.wheel_hash else ""
        links = [
            f'<a href="/simple/files/{name}{promised}" data-requires-python="{requires.replace(">", "&gt;")}">{name}</a>'
            for name, (requires, _) in self.wheels.items() if name.startswith(f"{wanted}-")
        ]
        status = 200 if links else 404
        self.send(request, status, f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode(), "text/html")

    def packument(self, name: str, package: dict[str, dict[str, Any]]) -> dict[str, Any]:
        versions = {}
        for version, one in package.items():
            digest = base64.b64encode(hashlib.sha512(one["tarball"]).digest()).decode()
            dist = {"tarball": f"{self.url}/{name}/-/{name.split('/')[-1]}-{version}.tgz", "integrity": one.get("integrity", f"sha512-{digest}")}
            scripts = one["about"].get("scripts", {})
            extra = {"hasInstallScript": True} if scripts.keys() & {"preinstall", "install", "postinstall"} else {}
            versions[version] = {**one["about"], **extra, "dist": dist}
        return {"name": name, "dist-tags": {"latest": list(package)[-1]}, "versions": versions}

    @staticmethod
    def send(request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json") -> None:
        try:
            request.send_response(status)
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        except OSError:
            pass  # npm or pip is gone

    def close(self) -> None:
        self.hold.set()
        self.http.shutdown()
        self.http.server_close()

"""Servers on loopback that sandboxes reach through the proxy or as a service, and programs for agents that ask them."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import harness
from attack_support import ATTACKS

ASK_PROXY = """
    import http.client, json

    def ask(host):
        connection = http.client.HTTPConnection('127.0.0.1', 19998, timeout=60)
        connection.request('GET', f'http://{host}/')
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    said = json.dumps([ask(host) for host in hosts])
"""
"""Asks for each of `hosts` through the proxy; says status and body of each answer."""

SAY = "\n    agent.say(said)\n"


class WebServer:
    """An HTTP server that answers every request with a text and notes what it was asked."""

    def __init__(self, text: str = "hello from outside", address: str = "127.0.0.1"):
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.headers: dict[str, str] = {}
        self.status = 200
        self.text = text
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append((self.command, self.path, headers, body))
                answer = outer.answer(headers).encode()
                self.send_response(outer.status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer((address, 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, headers: dict[str, str]) -> str:
        return self.text

    def __enter__(self) -> "WebServer":
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()


def tool_server(**more: Any) -> dict[str, Any]:
    """A catalog entry of a tool server that runs the programs it is sent."""
    return {
        "kind": "mcp",
        "transport": "stdio",
        "command": "/usr/bin/python3",
        "args": ["-I", "-S", str(ATTACKS / "tool_server.py")],
        "read_only": [str(ATTACKS)],
        "timeouts": {"startupMs": 60_000},
        **more,
    }


def egress_events(server: harness.Server, admin: str, session: str, count: int) -> list[dict[str, Any]]:
    """The session's first `count` connections in the debugger, waited for: each is recorded when it has ended."""
    with server.debugger(admin, session_id=session) as events:
        return [events.until("egress") for _ in range(count)]

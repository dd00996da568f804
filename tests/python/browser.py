"""Chromium, driven over its DevTools protocol, and a site of somebody else for it to visit."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from websockets.sync.client import connect

from harness import DEADLINE, wait_until

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-popup-blocking", "--remote-debugging-port=0",
    # Pages of a site somewhere else, served here.
    "--host-resolver-rules=MAP evil.test 127.0.0.1",
]


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One browser with a profile of its own."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="oub")
        self._process = subprocess.Popen(
            [chromium() or "chromium", *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        where = pathlib.Path(self._profile) / "DevToolsActivePort"
        wait_until(lambda: where.exists() and len(where.read_text().split()) == 2, "the browser")
        port, path = where.read_text().split()
        self._open = contextlib.ExitStack()
        opened = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=DEADLINE)
        self._socket = self._open.enter_context(opened)
        self._ids = itertools.count(1)

    def command(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        id = next(self._ids)
        message = {"id": id, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=DEADLINE))
            if answer.get("id") == id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, url: str) -> "Page":
        return Page(self, url)

    def close(self) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(timeout=DEADLINE)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Page:
    """One tab."""

    def __init__(self, browser: Browser, url: str):
        self._browser = browser
        self._target = browser.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.command("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.go(url)

    def go(self, url: str) -> None:
        """Navigates, and waits until the page is loaded."""
        self.visit(url)
        wait_until(lambda: self.run("location.href !== 'about:blank' && document.readyState === 'complete'"), f"{url} to load")

    def visit(self, url: str) -> str | None:
        """Navigates; the error, if it led to no page."""
        return self._browser.command("Page.navigate", self._session, url=url).get("errorText")

    def run(self, script: str) -> Any:
        """The value of an expression, waited for if it is a promise."""
        result = self._browser.command(
            "Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def close(self) -> None:
        self._browser.command("Target.closeTarget", targetId=self._target)


class Site:
    """A web site that serves an empty page at every address."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b"<!doctype html><title>a site</title>")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

"""A git server over HTTP that asks for a token: `git http-backend` behind Python's web server."""

from __future__ import annotations

import http.server
import os
import pathlib
import subprocess
import threading
from typing import Any


class GitBackend:
    """Serves the bare repositories in a folder, for fetches and pushes, to whoever sends the right `Authorization`."""

    def __init__(self, folder: pathlib.Path, authorization: str):
        self.asked: list[tuple[str, str, str | None]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.read_body()
                outer.asked.append((self.command, self.path, self.headers.get("Authorization")))
                if self.headers.get("Authorization") != authorization:
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="git"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                path, _, query = self.path.partition("?")
                env = {
                    "PATH": os.environ["PATH"],
                    "GIT_PROJECT_ROOT": str(folder),
                    "GIT_HTTP_EXPORT_ALL": "1",
                    "GIT_CONFIG_COUNT": "2",
                    "GIT_CONFIG_KEY_0": "safe.directory",
                    "GIT_CONFIG_VALUE_0": "*",
                    "GIT_CONFIG_KEY_1": "http.receivepack",
                    "GIT_CONFIG_VALUE_1": "true",
                    "REQUEST_METHOD": self.command,
                    "PATH_INFO": path,
                    "QUERY_STRING": query,
                    "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                    "CONTENT_LENGTH": str(len(body)),
                    "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                    "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                    "REMOTE_USER": "tester",
                    "REMOTE_ADDR": "127.0.0.1",
                }
                done = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, timeout=120)
                head, _, content = done.stdout.partition(b"\r\n\r\n")
                headers = [line.split(": ", 1) for line in head.decode().split("\r\n") if line]
                status = next((value for name, value in headers if name.lower() == "status"), "200 OK")
                self.send_response(int(status.split()[0]))
                for name, value in headers:
                    if name.lower() not in ("status", "content-length"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def read_body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            do_GET = do_POST = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __enter__(self) -> "GitBackend":
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

"""What clients of the fault rounds have in common: the history they write, the gate they wait at, their connections."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from typing import Any, Callable

import harness


class ServerGone(Exception):
    """The connection broke before an answer came."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


# -- what clients record -----------------------------------------------------------------------------


class History:
    """The append-only list of what was sent, acknowledged and shown."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._last_id = 0
        self.acknowledged = 0
        """How many requests were acknowledged."""

    def add(self, event: str, **fields: Any) -> None:
        with self._lock:
            self.acknowledged += event == "acknowledged"
            self.records.append({"event": event, "at": round(time.monotonic(), 3), **fields})

    def sent(self, **fields: Any) -> int:
        with self._lock:
            self._last_id += 1
            self.records.append({"event": "sent", "id": self._last_id, **fields})
            return self._last_id

    def copy(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self.records)


class Gate:
    """Holds clients back while the server is down. A client whose connection broke waits for the next opening."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._open = False
        self._stopped = False
        self._clients: set[Any] = set()
        self._waiting: set[Any] = set()

    def join(self, client: Any) -> None:
        with self._changed:
            self._clients.add(client)

    def leave(self, client: Any) -> None:
        with self._changed:
            self._clients.discard(client)
            self._waiting.discard(client)
            self._changed.notify_all()

    def enter(self, client: Any, broken_in: int | None = None) -> int:
        """Waits until clients may act, after the epoch a connection broke in. Returns the epoch."""
        with self._changed:
            while not self._stopped and not (self._open and self._epoch != broken_in):
                self._waiting.add(client)
                self._changed.notify_all()
                self._changed.wait()
            self._waiting.discard(client)
            if self._stopped:
                raise SystemExit
            return self._epoch

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._epoch += 1
            self._changed.notify_all()

    def close(self, notice: Callable[[], None] = lambda: None) -> None:
        """Closes, does what makes clients notice, and waits until every one has."""
        with self._changed:
            self._open = False
        notice()
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting >= self._clients, harness.DEADLINE):
                missing = [client.name for client in self._clients - self._waiting]
                raise AssertionError(f"clients did not notice that the server is gone: {missing}")

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        return self._open and not self._stopped


# -- requests ----------------------------------------------------------------------------------------


class Connection:
    """One kept connection to the server."""

    def __init__(self, port: int, token: str, timeout: float = harness.DEADLINE):
        self.port, self.token, self.timeout = port, token, timeout
        self._http: http.client.HTTPConnection | None = None

    def open(
        self, method: str, path: str, body: bytes | None = None, token: str | None = None
    ) -> http.client.HTTPResponse:
        """Sends a request; its body can be read as it comes."""
        try:
            if self._http is None:
                self._http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
            headers = {"Authorization": f"Bearer {token or self.token}"}
            if body is not None:
                headers["Content-Type"] = "application/json"
            self._http.request(method, path, body, headers)
            return self._http.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerGone(repr(error)) from error

    def request(self, method: str, path: str, body: bytes | None = None, token: str | None = None) -> tuple[int, bytes]:
        response = self.open(method, path, body, token)
        try:
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerGone(repr(error)) from error

    def tool(self, tool: str, /, **arguments: Any) -> Any:
        """One tool by plain JSON."""
        status, text = self.request("POST", f"/api/tools/{tool}", json.dumps(arguments).encode())
        answer = json.loads(text)
        if status != 200:
            raise Refused(answer["error"]["code"], answer["error"]["message"])
        return answer

    def pages(self, tool: str, field: str, /, **arguments: Any) -> list[Any]:
        """All rows of a list."""
        rows: list[Any] = []
        cursor: dict[str, Any] = {}
        while True:
            page = self.tool(tool, limit=1000, **arguments, **cursor)
            rows += page[field]
            if not page.get("next_cursor"):
                return rows
            cursor = {"cursor": page["next_cursor"]}

    def log(self, tool: str, since: int = -1, /, **arguments: Any) -> list[Any]:
        """All events of a log after one."""
        events: list[Any] = []
        while True:
            page = self.tool(tool, since_index=since, max_events=1000, **arguments)
            events += page["events"]
            if len(page["events"]) < 1000:
                return events
            since = page["last_index"]

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


def digest(content: bytes) -> str:
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:32]}"

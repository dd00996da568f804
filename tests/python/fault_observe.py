"""Reads a restarted server out, as any client could, for `fault_check.check`."""

from __future__ import annotations

import collections
import contextlib
import json
from typing import Any, Iterator

import fault_check
from fault_clients import FIRST_AGENT
from fault_history import Refused, digest
from fault_load import Load
from fault_machine import LEFTOVER_DEADLINE
from harness import wait_until

DRAIN_DEADLINE = 180.0
"""How long accepted messages may take to run after a restart."""


def drain(load: Load) -> None:
    """Waits until every accepted message has run. What does not run is left to the check."""
    requests, _ = fault_check.read(load.history.copy())
    turns: collections.Counter[str] = collections.Counter()
    for request in requests:
        if request.sent["action"] == "session_message" and request.acknowledged:
            id = request.sent["session"] or request.result["session_id"]
            turns[id] = max(turns[id], request.result["turn"])

    def done() -> bool:
        load.unblock()
        rows = load.owner.pages("session_list", "sessions", project_id=load.project)
        return all(
            row["status"] in fault_check.FINAL or row["status"] == "idle" and row["turn"] >= turns[row["session_id"]]
            for row in rows
        )

    with contextlib.suppress(AssertionError):
        wait_until(done, "accepted messages to run", DRAIN_DEADLINE)


def observe(load: Load, drained: bool) -> dict[str, Any]:
    """Everything the checks need, read from the server as any client could."""
    owner = load.owner
    sessions = {}
    marks: collections.Counter[str] = collections.Counter()
    rows = owner.pages("session_list", "sessions", project_id=load.project)
    for row in rows:
        id = row["session_id"]
        events = owner.log("session_events", session_id=id)
        row = owner.tool("session_get", session_id=id)
        if not drained:  # it goes on while it is read
            statuses = [event["status"] for event in events if event["type"] == "status"]
            row["status"] = statuses[-1] if statuses else row["status"]
        status, text = owner.request("GET", f"/api/workspaces/{row['workspace_id']}/files/tally.txt")
        lines = text.decode().splitlines() if status == 200 else []
        sessions[id] = {"session": row, "events": events}
        if drained:
            sessions[id]["work"] = lines.count("turn")
        marks.update(line for line in lines if line != "turn")
    projects = owner.pages("project_list", "projects")
    tokens = owner.pages("token_list", "tokens")
    marks.update(f"project {row['name']}" for row in projects if row["project_id"] != load.project)
    own = {client["token_id"] for client in client_tokens(load)}
    names = [row["name"] for row in tokens if row["name"].startswith("token-")]
    marks.update(f"token {name}" for name in names)
    audit = [row for row in owner.pages("audit_list", "entries") if row.get("token_id") in own]
    observation = {
        "drained": drained,
        "integrity": load.server.integrity(),
        "sessions": sessions,
        "marks": dict(marks),
        "registers": registers(load, rows, projects, names),
        "debugger": owner.log("debugger_events"),
        "audit": audit[::-1],
    }
    return observation


def client_tokens(load: Load) -> list[dict[str, str]]:
    return [client.token for client in [*load.clients, load.janitor]]


def registers(load: Load, sessions: list, projects: list, token_names: list[str]) -> dict[str, Any]:
    """What each register that clients wrote holds now, and files that nobody wrote."""
    written = {r["register"] for r in load.history.copy() if r["event"] == "sent" and r.get("register")}
    by_name = {row["name"]: row["description"] for row in projects}
    by_session = {row["session_id"]: row for row in sessions}
    found: dict[str, Any] = {}
    for register in written:
        kind, _, name = register.partition(" ")
        match kind:
            case "project":
                found[register] = by_name.get(name)
            case "token":
                found[register] = token_state(load, name, token_names)
            case "end":
                ended = by_session.get(name.removeprefix("of "), {}).get("status") == "ended"
                found[register] = "ended" if ended else None
            case "agent" if name.startswith("of "):
                agent = by_session.get(name.removeprefix("of "), {}).get("agent")
                found[register] = None if agent == FIRST_AGENT else agent
            case "agent":
                found[register] = agent_state(load, name)
            case "file":
                found[register] = file_state(load, name)
    places = {load.workspace, *(row["workspace_id"] for row in sessions)}
    for register in unwritten_files(load, places, written):
        found[register] = "a file"
    return found


def token_state(load: Load, name: str, token_names: list[str]) -> str | None:
    secret = load.secrets.get(name)
    if secret is None:  # made without an answer: nobody has it
        return "active" if name in token_names else None
    status, _ = load.owner.request("POST", "/api/tools/server_info", b"{}", token=secret)
    if status != 200:  # the server closes a connection whose request it did not read to the end
        load.owner.close()
    return {200: "active", 401: "revoked"}.get(status, f"status {status}")


def agent_state(load: Load, slug: str) -> str | None:
    try:
        return digest(load.owner.tool("agent_get", slug=slug)["definition"]["prompt"].encode())
    except Refused as error:
        return None if error.code == "not_found" else error.code


def file_state(load: Load, place: str) -> str | None:
    workspace, _, path = place.partition("/")
    status, content = load.owner.request("GET", f"/api/workspaces/{workspace}/files/{path}")
    return digest(content) if status == 200 else None if status == 404 else f"status {status}"


def unwritten_files(load: Load, workspaces: set[str], written: set[str]) -> list[str]:
    """Files in the workspaces that no client wrote, once there has been time to remove them."""

    def strays() -> list[str]:
        return [
            f"file {workspace}/{path}"
            for workspace in workspaces
            for path in files_below(load, workspace)
            if path != "tally.txt" and f"file {workspace}/{path}" not in written
        ]

    with contextlib.suppress(AssertionError):
        wait_until(lambda: load.known_strays.issuperset(strays()), "temporary files to be removed", LEFTOVER_DEADLINE)
    found = strays()
    load.known_strays.update(found)
    return found


def files_below(load: Load, workspace: str, folder: str = "") -> Iterator[str]:
    status, text = load.owner.request("GET", f"/api/workspaces/{workspace}/files/{folder}")
    for entry in json.loads(text)["entries"] if status == 200 else []:
        if entry["type"] == "directory":
            yield from files_below(load, workspace, f"{folder}{entry['name']}/")
        else:
            yield f"{folder}{entry['name']}"

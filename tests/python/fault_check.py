"""Checks what clients were told against what a restarted server shows.

`check` is a pure function. It takes a history, the append-only list of what clients sent and what was acknowledged to
them, and an observation, what the restarted server says. It returns every contradiction between the two. It knows
nothing of how either was gathered (`soak.py` does that), so it can be tested with histories that are wrong on purpose
(`test_fault_check.py`) and run again on files that were kept:

    python fault_check.py HISTORY.jsonl OBSERVATION.json

A history is a list of records, each a JSON object with `event`:

- `sent` {id, client, action}: a request is about to be sent. More fields say what it means for the checks:
    - `register`, `value`: it sets a named register to a value (null: it removes it). Each register has one client,
      which waits for each answer, so writes to it never overlap.
    - `mark`, `mark_kept`: it leaves a mark that must never be there twice. With `mark_kept` it must be there once
      the request is acknowledged.
    - `session`, `text`: it is a message for that session (null: for a new one).
    - `request_id`: it answers a caller tool request.
    - `approval_id`, `decision`: it decides an approval.
    - `token_id`, `target`: whose request it is and what the audit log calls its object.
- `acknowledged` {id, result}: the answer said that it was done. `refused` {id, code}: the answer was an error.
  `unknown` {id}: the connection broke before an answer came. What was refused or is unknown may have happened or not;
  with `late` it may even happen after later requests, because it may be under way at another server.
- `shown` {log, data}: a follower was shown this event of a session's log, or of the log `debugger`.
- `database_crashed` {at}: the database lost its memory. What was shown in the last moments before it may be gone, and
  so may the audit rows of some actions; everything else that was acknowledged is kept.
- Anything else (`killed`, `restarted`) is for people who read the history. Every record has the time `at`, in seconds.

An observation is a JSON object; a part that is missing is not checked:

- `drained`: whether all accepted messages had the time to run.
- `integrity`: what `PRAGMA integrity_check` says, a list of lines.
- `left_running`, `left_behind`: texts that describe processes of killed servers, and files, mounts or control groups
  they left.
- `owners` {session: [server]}: the servers that own a session or run processes of it.
- `registers` {name: value}, `marks` {mark: count}: as above.
- `sessions` {id: {session, events, work}}: the session's row, its whole log, and how often the tool that its agent calls
  once each turn was run.
- `debugger`: the debugger's log. `audit`: the audit log, oldest first.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import sys
from typing import Any, Iterable

from fault_log_check import FINAL as FINAL
from fault_log_check import Record, Violation, check_session, user_messages

CRASH_WINDOW = 5.0
"""How many seconds before (and, since clients may be slow to note it, after) a crash of the database what was shown may be
of what it lost. It keeps back a commit for less than one; the rest is for a machine with much to do."""
NOT_KEPT_IN_A_CRASH = ("tool_call", "caller_tool_response", "workspace_file_put", "workspace_file_delete")
"""Actions whose audit rows survive a crash of the database only a moment after they were acknowledged."""

PROMISES = {
    "nothing acknowledged is missing": {
        "lost write", "half write", "lost session", "lost message", "lost work", "lost answer",
        "lost decision", "unobserved",
    },
    "what was shown stays": {"lost event", "changed event", "changed"},
    "nothing is there or owned twice": {"twice", "audit row twice", "owned twice"},
    "logs have no holes and keep their order": {"hole", "order"},
    "acknowledged actions are in the audit log": {"lost audit row"},
    "nothing is left running": {"left running"},
    "nothing is left behind": {"left behind", "stray"},
    "the database is whole": {"damaged"},
    "the server goes on": {"unfinished", "stuck", "crashed", "broken off", "client failed"},
}  # fmt: skip
"""What each kind of violation breaks."""


@dataclasses.dataclass
class Request:
    """A request with its outcome."""

    sent: Record
    outcome: str = "unknown"
    result: Any = None
    late: bool = False
    """It may still happen after requests that were sent later."""

    @property
    def acknowledged(self) -> bool:
        return self.outcome == "acknowledged"


def check(history: Iterable[Record], observation: Record) -> list[Violation]:
    """Every contradiction between what clients were told and what the server shows."""
    requests, shown = read(history)
    found: list[Violation] = []
    found += check_machine(observation)
    if "registers" in observation:
        found += check_registers(requests, observation["registers"])
    if "marks" in observation:
        found += check_marks(requests, observation["marks"])
    if "sessions" in observation:
        found += check_messages(requests, observation["sessions"], observation.get("drained", False))
        for id, seen in observation["sessions"].items():
            found += check_session(id, seen, observation.get("drained", False))
            found += check_shown(id, shown.get(id, []), seen["events"])
        for id in shown.keys() - observation["sessions"].keys() - {"debugger"}:
            found.append(
                Violation("lost session", f"session {id}", "its events were shown, and there is no such session")
            )
        found += check_answers(requests, observation["sessions"])
        found += check_decisions(requests, observation["sessions"])
    if "debugger" in observation:
        found += check_order("debugger", observation["debugger"])
        found += check_shown("debugger", shown.get("debugger", []), observation["debugger"])
    if "audit" in observation:
        found += check_audit(requests, observation["audit"])
    return found


def read(history: Iterable[Record]) -> tuple[list[Request], dict[str, list[Record]]]:
    """Requests in the order they were sent, and the events each log's followers were shown."""
    history = list(history)
    requests: dict[int, Request] = {}
    shown: dict[str, list[Record]] = collections.defaultdict(list)
    crashes = [record["at"] for record in history if record["event"] == "database_crashed"]

    def may_be_lost(record: Record) -> bool:
        return any(abs(record["at"] - crash) <= CRASH_WINDOW for crash in crashes)

    for record in history:
        match record["event"]:
            case "sent":
                if record["id"] in requests:
                    raise ValueError(f"request {record['id']} was sent twice")
                requests[record["id"]] = Request(record)
            case "acknowledged" | "refused" | "unknown" as outcome:
                request = requests[record["id"]]
                request.outcome, request.result = outcome, record.get("result")
                request.late = record.get("late", False)
                if request.sent["action"] in NOT_KEPT_IN_A_CRASH and may_be_lost(record):
                    request.outcome, request.late = "unknown", True
            case "shown" if may_be_lost(record):
                pass
            case "shown":
                shown[record["log"]].append(record["data"])
            case _:
                pass
    return list(requests.values()), shown


# -- the machine -------------------------------------------------------------------------------------


def check_machine(observation: Record) -> list[Violation]:
    found = []
    integrity = observation.get("integrity", ["ok"])
    if integrity != ["ok"]:
        found.append(Violation("damaged", "database", "; ".join(map(str, integrity))[:500]))
    for text in observation.get("left_running", []):
        found.append(Violation("left running", f"process {text.split()[0]}", text))
    for text in observation.get("left_behind", []):
        found.append(Violation("left behind", text, "it belongs to a server that was killed"))
    for session, servers in observation.get("owners", {}).items():
        if len(set(servers)) > 1:
            found.append(Violation("owned twice", f"session {session}", f"by {sorted(set(servers))}"))
    return found


# -- registers and marks -----------------------------------------------------------------------------


def check_registers(requests: list[Request], registers: Record) -> list[Violation]:
    """A register holds the value of its last acknowledged write, or one that was sent after it."""
    writes: dict[str, list[Request]] = collections.defaultdict(list)
    for request in requests:
        if request.sent.get("register"):
            writes[request.sent["register"]].append(request)
    found = []
    for name, wrote in writes.items():
        if name not in registers:
            found.append(Violation("unobserved", name, "the observation does not say what it holds"))
            continue
        now = registers[name]
        last = max((n for n, request in enumerate(wrote) if request.acknowledged), default=None)
        possible = [None] if last is None else [wrote[last].sent["value"]]
        possible += [request.sent["value"] for request in wrote[0 if last is None else last + 1 :]]
        possible += [request.sent["value"] for request in wrote if request.late]
        if now in possible:
            continue
        if now is not None and all(request.sent["value"] != now for request in wrote):
            found.append(Violation("half write", name, f"holds {now!r}, which nobody wrote; possible: {possible!r}"))
        else:
            found.append(Violation("lost write", name, f"holds {now!r}; possible: {possible!r}"))
    for name in registers.keys() - writes.keys():
        if registers[name] is not None:
            found.append(Violation("stray", name, f"holds {registers[name]!r}, and nobody wrote it"))
    return found


def check_marks(requests: list[Request], marks: dict[str, int]) -> list[Violation]:
    """No mark is there twice, and none that was acknowledged and is kept is missing."""
    found = []
    known = set()
    for request in requests:
        mark = request.sent.get("mark")
        if mark is None:
            continue
        known.add(mark)
        count = marks.get(mark, 0)
        if count > 1:
            found.append(Violation("twice", mark, f"there {count} times"))
        elif count == 0 and request.acknowledged and request.sent.get("mark_kept"):
            found.append(Violation("lost write", mark, "acknowledged and not there"))
    for mark in marks.keys() - known:
        found.append(Violation("stray", mark, "there, and nobody sent it"))
    return found


# -- sessions ----------------------------------------------------------------------------------------


def check_messages(requests: list[Request], sessions: Record, drained: bool) -> list[Violation]:
    """Every accepted message is in its session's log exactly once, in the order of its turns."""
    found = []
    places: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for id, seen in sessions.items():
        for event in user_messages(seen["events"]):
            places[event["text"]].append((id, event["index"]))
    ended = ended_sessions(requests)
    accepted: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
    texts = set()
    for request in requests:
        if request.sent["action"] != "session_message":
            continue
        text = request.sent["text"]
        texts.add(text)
        there = places.get(text, [])
        if len(there) > 1:
            found.append(Violation("twice", f"message {text!r}", f"in the logs at {there}"))
        if not request.acknowledged:
            continue
        session = request.sent.get("session") or request.result["session_id"]
        accepted[session].append((request.result["turn"], text))
        if session not in sessions:
            found.append(
                Violation("lost session", f"session {session}", f"message {text!r} was accepted, and it is not there")
            )
        elif not there and drained and session not in ended:
            status = sessions[session]["session"].get("status")
            found.append(
                Violation("lost message", f"message {text!r}", f"accepted and not run; session {session} is {status}")
            )
        elif there and there[0][0] != session:
            found.append(Violation("changed", f"message {text!r}", f"sent to {session}, in the log of {there[0][0]}"))
    for text in places.keys() - texts:
        found.append(Violation("stray", f"message {text!r}", f"nobody sent it; in the logs at {places[text]}"))
    for session, turns in accepted.items():
        found += check_turn_order(session, turns, places)
    return found


def check_turn_order(session: str, turns: list[tuple[int, str]], places: Record) -> list[Violation]:
    """A later turn is not in the log before an earlier one, nor without it."""
    found = []
    numbers = [turn for turn, _ in turns]
    if len(set(numbers)) < len(numbers):
        twice = [turn for turn, count in collections.Counter(numbers).items() if count > 1]
        found.append(Violation("twice", f"session {session}", f"two messages were accepted as turn {twice}"))
    before = -1
    skipped = None
    for turn, text in sorted(turns):
        there = places.get(text)
        if not there:
            skipped = skipped if skipped is not None else turn
            continue
        index = there[0][1]
        if skipped is not None:
            found.append(
                Violation("order", f"session {session}", f"turn {turn} ran, and turn {skipped} before it did not")
            )
        if index < before:
            found.append(Violation("order", f"session {session}", f"turn {turn} is at {index}, before an earlier turn"))
        before = max(before, index)
    return found


def check_decisions(requests: list[Request], sessions: Record) -> list[Violation]:
    """An acknowledged decision is what its approval ended with."""
    decisions = {
        event["approval_id"]: event["decision"]
        for seen in sessions.values()
        for event in seen["events"]
        if event["type"] == "approval_decided"
    }
    found = []
    for request in requests:
        if request.sent["action"] == "approval_decide" and request.acknowledged:
            approval, told = request.sent["approval_id"], {"allow": "allowed", "deny": "denied"}
            wanted, decided = told[request.sent["decision"]], decisions.get(approval)
            if decided != wanted:
                detail = f"acknowledged as {wanted}, and the log says {decided}"
                found.append(Violation("lost decision", f"approval {approval}", detail))
    return found


def check_answers(requests: list[Request], sessions: Record) -> list[Violation]:
    """An acknowledged answer of a caller is what its request ended with."""
    outcomes = {
        event["request_id"]: event["outcome"]
        for seen in sessions.values()
        for event in seen["events"]
        if event["type"] == "caller_tool_done"
    }
    found = []
    for request in requests:
        if request.sent["action"] == "caller_tool_response" and request.acknowledged:
            outcome = outcomes.get(request.sent["request_id"])
            if outcome not in ("answered", "error"):
                subject = f"answer to {request.sent['request_id']}"
                found.append(Violation("lost answer", subject, f"acknowledged, and the log says {outcome}"))
    return found


def check_shown(log: str, shown: list[Record], events: list[Record]) -> list[Violation]:
    """What a follower was shown is still there, word for word."""
    found = []
    there = {event["index"]: event for event in events}
    for event in shown:
        index = event["index"]
        if index not in there:
            found.append(Violation("lost event", f"{log} event {index}", f"shown and not there: {brief(event)}"))
        elif there[index] != event:
            found.append(
                Violation(
                    "changed event", f"{log} event {index}", f"shown as {brief(event)}, now {brief(there[index])}"
                )
            )
    return found


def check_order(log: str, events: list[Record]) -> list[Violation]:
    """Indexes only grow; a log of many sessions may have holes."""
    for earlier, later in zip(events, events[1:]):
        if later["index"] <= earlier["index"]:
            return [Violation("order", log, f"index {later['index']} follows {earlier['index']}")]
    return []


# -- audit -------------------------------------------------------------------------------------------


def check_audit(requests: list[Request], audit: list[Record]) -> list[Violation]:
    """Each acknowledged action has a row that says `ok`, and no request has more than one row."""
    found = check_order("audit", audit)
    good, all_rows = collections.Counter(), collections.Counter()
    for row in audit:
        key = (row.get("token_id"), row["action"], row.get("target"))
        all_rows[key] += 1
        good[key] += row["outcome"] == "ok"
    sent, acknowledged = collections.Counter(), collections.Counter()
    for request in requests:
        if "token_id" in request.sent:
            key = (request.sent["token_id"], request.sent["action"], audited_target(request))
            sent[key] += 1
            acknowledged[key] += request.acknowledged
    for key, count in sent.items():
        token, action, target = key
        subject = f"audit of {action} {target or ''}".strip()
        if good[key] < acknowledged[key]:
            found.append(
                Violation(
                    "lost audit row", subject, f"{acknowledged[key]} acknowledged to {token}, {good[key]} rows say ok"
                )
            )
        if all_rows[key] > count:
            found.append(Violation("audit row twice", subject, f"{count} sent by {token}, {all_rows[key]} rows"))
    return found


def audited_target(request: Request) -> str | None:
    """What the audit log calls the object of a request. That of a message which starts a session is the new session."""
    target = request.sent.get("target")
    if target is None and request.sent["action"] == "session_message" and request.acknowledged:
        return request.result.get("session_id")
    return target


# -- small parts -------------------------------------------------------------------------------------


def ended_sessions(requests: list[Request]) -> set[str]:
    """Sessions that a client asked to end: what waits in them need not run."""
    return {request.sent["session"] for request in requests if request.sent["action"] == "session_end"}


def brief(event: Record) -> str:
    text = json.dumps(event, sort_keys=True)
    return text if len(text) <= 200 else text[:200] + "…"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: fault_check.py HISTORY.jsonl OBSERVATION.json", file=sys.stderr)
        return 2
    history = [json.loads(line) for line in pathlib.Path(arguments[0]).read_text().splitlines() if line]
    observation = json.loads(pathlib.Path(arguments[1]).read_text())
    found = check(history, observation)
    for violation in found:
        print(violation)
    print(f"{len(history)} records, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

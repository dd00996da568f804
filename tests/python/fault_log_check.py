"""Checks the log of one session by itself: no hole, nothing twice, everything that began has ended once.

Part of `fault_check.py`, which compares logs with what clients were told.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

Record = dict[str, Any]

FINAL = ("ended", "failed")
"""Statuses of a session that is not active any more."""
WORK_TOOL = "tally"
"""The agents' scripts call a tool with this in its name once each turn."""


@dataclasses.dataclass(frozen=True)
class Violation:
    """One contradiction: its kind (for counting), what it is about, and the facts."""

    kind: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.detail}"


def check_session(id: str, seen: Record, drained: bool) -> list[Violation]:
    """A log by itself: no hole, each turn ended at most once, each caller request ended once, no work done twice."""
    found = []
    subject = f"session {id}"
    events = seen["events"]
    indexes = [event["index"] for event in events]
    if indexes != list(range(len(events))):
        wrong = next((n for n, index in enumerate(indexes) if n != index), len(indexes))
        found.append(Violation("hole", subject, f"index {indexes[wrong]} at place {wrong} of {len(indexes)}"))
    turns = [event["turn"] for event in events if event["type"] == "turn_completed"]
    if any(later <= earlier for earlier, later in zip(turns, turns[1:])):
        found.append(Violation("order", subject, f"turns completed in the order {turns}"))
    if not found:
        found += check_each_turn(subject, events)
    found += check_requests(subject, events, drained)
    found += check_approvals(subject, events, drained)
    found += check_results(subject, events)
    statuses = [event["status"] for event in events if event["type"] == "status"]
    if "ended" in statuses and statuses[-1] != "ended":
        found.append(Violation("order", subject, f"it went on after its end: {statuses}"))
    status = seen["session"].get("status")
    if statuses and status != statuses[-1]:
        found.append(Violation("changed", subject, f"its status is {status}, and its log says {statuses[-1]}"))
    if drained and status not in ("idle", *FINAL):
        found.append(Violation("unfinished", subject, f"still {status}"))
    if (work := seen.get("work")) is not None:
        begun = len(user_messages(events))
        told = sum(
            1
            for event in events
            if event["type"] == "tool_result" and event.get("ok") and event["tool_call_id"] in work_calls(events)
        )
        if work > begun:
            found.append(Violation("twice", subject, f"{begun} turns were begun, and their work was done {work} times"))
        if work < told:
            found.append(
                Violation("lost work", subject, f"the log tells of work done {told} times; it was done {work} times")
            )
    return found


def check_each_turn(subject: str, events: list[Record]) -> list[Violation]:
    """Between a message and the next one there is at most one completed turn and one round of work."""
    found = []
    completed = worked = 0
    text = None
    calls = work_calls(events)
    for event in events:
        if event["type"] == "message" and event["role"] == "user":
            completed = worked = 0
            text = event["text"]
        elif event["type"] == "turn_completed":
            completed += 1
            if completed > 1:
                found.append(Violation("twice", subject, f"two completed turns after message {text!r}"))
        elif event["type"] == "tool_call" and event["tool_call_id"] in calls:
            worked += 1
            if worked > 1:
                found.append(Violation("twice", subject, f"message {text!r} was worked on twice"))
    return found


def check_requests(subject: str, events: list[Record], drained: bool) -> list[Violation]:
    found = []
    asked = [event["request_id"] for event in events if event["type"] == "caller_tool_request"]
    done = collections.Counter(event["request_id"] for event in events if event["type"] == "caller_tool_done")
    for request, count in collections.Counter(asked).items():
        if count > 1:
            found.append(Violation("twice", subject, f"caller request {request} is there {count} times"))
        if done[request] > 1:
            found.append(Violation("twice", subject, f"caller request {request} was ended {done[request]} times"))
        if drained and done[request] == 0:
            found.append(Violation("unfinished", subject, f"caller request {request} has no end"))
    for request in done.keys() - set(asked):
        found.append(Violation("stray", subject, f"caller request {request} was ended and never made"))
    return found


def check_approvals(subject: str, events: list[Record], drained: bool) -> list[Violation]:
    """Each approval is asked for once and ends once."""
    found = []
    asked = collections.Counter(event["approval_id"] for event in events if event["type"] == "approval_requested")
    decided = collections.Counter(event["approval_id"] for event in events if event["type"] == "approval_decided")
    for approval, count in asked.items():
        if count > 1:
            found.append(Violation("twice", subject, f"approval {approval} was asked for {count} times"))
        if decided[approval] > 1:
            found.append(Violation("twice", subject, f"approval {approval} was decided {decided[approval]} times"))
        if drained and decided[approval] == 0:
            found.append(Violation("unfinished", subject, f"approval {approval} has no end"))
    for approval in decided.keys() - asked.keys():
        found.append(Violation("stray", subject, f"approval {approval} was decided and never asked for"))
    return found


def check_results(subject: str, events: list[Record]) -> list[Violation]:
    """No call of the agent has two results, and no result is without its call. An agent that was started anew may give a later
    call the id of an earlier one."""
    found = []
    is_open: dict[str, bool] = {}
    for event in events:
        if event["type"] == "tool_call":
            is_open[event["tool_call_id"]] = True
        elif event["type"] == "tool_result":
            call = event["tool_call_id"]
            if call not in is_open:
                found.append(Violation("stray", subject, f"call {call} has a result and was never made"))
            elif not is_open[call]:
                found.append(Violation("twice", subject, f"call {call} has two results"))
            is_open[call] = False
    return found


def user_messages(events: list[Record]) -> list[Record]:
    return [event for event in events if event["type"] == "message" and event["role"] == "user"]


def work_calls(events: list[Record]) -> set[str]:
    """Ids of the agent's calls of its once-a-turn tool."""
    return {e["tool_call_id"] for e in events if e["type"] == "tool_call" and WORK_TOOL in str(e.get("tool"))}

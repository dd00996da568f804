"""The checker of fault rounds finds what is wrong: each test breaks a history that is right in one way."""

from __future__ import annotations

import copy
import json

import pytest

import fault_check
from fault_check import check

SESSION = "gogol_1"


def event(index, type, **fields):
    return {"index": index, "ts": "2026-01-01T00:00:00Z", "session_id": SESSION, "type": type, **fields}


def log():
    """Two messages: the first was answered by a caller and completed, the second was cut short by a kill."""
    return [
        event(0, "status", status="starting"),
        event(1, "status", status="running"),
        event(2, "message", role="user", text="start-1"),
        event(3, "caller_tool_request", request_id="r1", caller_id="app", tool="note", arguments={}),
        event(4, "caller_tool_done", request_id="r1", outcome="answered"),
        event(5, "tool_call", tool_call_id="call_1", tool="@tally/add", arguments={"mark": "turn"}),
        event(6, "tool_result", tool_call_id="call_1", ok=True),
        event(7, "turn_completed", turn=1, stop_reason="end_turn", text="done"),
        event(8, "message", role="user", text="message-2"),
        event(9, "error", code="unavailable", message="the server restarted during turn 2"),
        event(10, "status", status="idle", reason="the server restarted"),
    ]


class Case:
    """A history and an observation that agree."""

    def __init__(self):
        self.history = []
        self.last = 0
        self.request("session_message", {"session_id": SESSION, "turn": 1}, session=None, text="start-1", token_id="t")
        self.request("session_message", {"turn": 2}, session=SESSION, text="message-2", target=SESSION, token_id="t")
        self.request("caller_tool_response", {}, request_id="r1", token_id="t", target=f"{SESSION} r1")
        self.request("workspace_file_put", {}, register="file w/a", value="one", token_id="t", target="w/a")
        self.request("workspace_file_put", {}, register="file w/a", value="two", token_id="t", target="w/a")
        self.request("token_create", {}, register="token x", value="active", mark="token x", token_id="t", target="x")
        self.request("token_revoke", {}, register="token x", value="revoked", token_id="t", target="tok_1")
        self.request("tool_call", {}, mark="tally-1", mark_kept=True, token_id="t", target=f"{SESSION} @tally/add")
        self.history += [{"event": "shown", "log": SESSION, "data": e} for e in log()[:9]]
        debug = [{"index": n, "kind": "tool_call", "session_id": SESSION} for n in (0, 1, 4)]
        self.history += [{"event": "shown", "log": "debugger", "data": e} for e in debug]
        self.history += [{"event": "killed", "round": 1}, {"event": "restarted", "round": 1}]
        self.seen = {
            "drained": True,
            "integrity": ["ok"],
            "left_running": [],
            "left_behind": [],
            "registers": {"file w/a": "two", "token x": "revoked"},
            "marks": {"token x": 1, "tally-1": 1},
            "sessions": {SESSION: {"session": {"status": "idle", "turn": 2}, "events": log(), "work": 1}},
            "debugger": copy.deepcopy(debug),
            "audit": [
                {"index": n, "action": r["action"], "token_id": "t", "outcome": "ok", "target": r.get("target", SESSION)}
                for n, r in enumerate(r for r in self.history if r["event"] == "sent")
            ],
        }

    def request(self, action, result=None, outcome="acknowledged", **fields):
        self.last += 1
        self.history.append({"event": "sent", "id": self.last, "client": "c", "action": action, **fields})
        if outcome == "acknowledged":
            self.history.append({"event": outcome, "id": self.last, "result": result})
        else:
            self.history.append({"event": outcome, "id": self.last})
        return self.last

    @property
    def events(self):
        return self.seen["sessions"][SESSION]["events"]

    def kinds(self):
        return sorted({violation.kind for violation in check(self.history, self.seen)})

    def finds(self, *kinds):
        assert self.kinds() == sorted(kinds), check(self.history, self.seen)


@pytest.fixture
def case():
    return Case()


def test_a_history_that_agrees_has_no_violation(case):
    case.finds()


def test_the_history_is_read_in_order(case):
    requests, shown = fault_check.read(case.history)
    assert [request.sent["id"] for request in requests] == list(range(1, case.last + 1))
    assert all(request.acknowledged for request in requests)
    assert set(shown) == {SESSION, "debugger"}
    with pytest.raises(ValueError):
        fault_check.read([*case.history, case.history[0]])


# -- the machine -------------------------------------------------------------------------------------


def test_a_damaged_database(case):
    case.seen["integrity"] = ["row 3 missing from index audit_by_token"]
    case.finds("damaged")


def test_a_process_left_running(case):
    case.seen["left_running"] = ["4711 (bwrap)"]
    case.finds("left running")


def test_a_control_group_left_behind(case):
    case.seen["left_behind"] = ["control group /sys/fs/cgroup/x"]
    case.finds("left behind")


# -- registers ---------------------------------------------------------------------------------------


def test_an_acknowledged_write_that_is_gone(case):
    case.seen["registers"]["file w/a"] = None
    case.finds("lost write")


def test_an_acknowledged_write_that_fell_back_to_the_one_before(case):
    case.seen["registers"]["file w/a"] = "one"
    case.finds("lost write")


def test_a_value_that_nobody_wrote_such_as_half_a_file(case):
    case.seen["registers"]["file w/a"] = "tw"
    case.finds("half write")


def test_a_revoked_token_that_works_again(case):
    case.seen["registers"]["token x"] = "active"
    case.finds("lost write")


def test_a_write_without_an_answer_may_have_happened_or_not(case):
    case.request("workspace_file_put", outcome="unknown", register="file w/a", value="three")
    case.finds()
    case.seen["registers"]["file w/a"] = "three"
    case.finds()
    case.seen["registers"]["file w/a"] = "one"
    case.finds("lost write")


def test_a_refused_write_may_have_happened_or_not(case):
    case.request("workspace_file_put", outcome="refused", register="file w/b", value="new")
    case.seen["registers"]["file w/b"] = None
    case.finds()
    case.seen["registers"]["file w/b"] = "new"
    case.finds()


def test_a_write_without_an_answer_does_not_undo_a_later_acknowledged_one(case):
    case.request("workspace_file_put", outcome="unknown", register="file w/a", value="three")
    case.request("workspace_file_put", {}, register="file w/a", value="four", token_id="t", target="w/a")
    case.seen["audit"].append(
        {"index": 99, "action": "workspace_file_put", "token_id": "t", "outcome": "ok", "target": "w/a"}
    )
    case.seen["registers"]["file w/a"] = "three"
    case.finds("lost write")


def test_an_acknowledged_removal_that_is_undone(case):
    case.request("workspace_file_delete", {}, register="file w/a", value=None)
    case.finds("lost write")
    case.seen["registers"]["file w/a"] = None
    case.finds()


def test_a_register_that_nobody_wrote(case):
    case.seen["registers"]["file w/.temporary"] = "a file"
    case.finds("stray")


def test_a_register_that_was_not_observed(case):
    del case.seen["registers"]["file w/a"]
    case.finds("unobserved")


# -- marks -------------------------------------------------------------------------------------------


def test_a_call_that_ran_twice(case):
    case.seen["marks"]["tally-1"] = 2
    case.finds("twice")


def test_an_acknowledged_call_that_left_nothing(case):
    del case.seen["marks"]["tally-1"]
    case.finds("lost write")


def test_a_call_without_an_answer_ran_at_most_once(case):
    case.request("tool_call", outcome="unknown", mark="tally-2", mark_kept=True)
    case.finds()
    case.seen["marks"]["tally-2"] = 1
    case.finds()
    case.seen["marks"]["tally-2"] = 2
    case.finds("twice")


def test_a_mark_that_is_not_kept_may_be_gone_and_not_be_there_twice(case):
    del case.seen["marks"]["token x"]
    case.finds()
    case.seen["marks"]["token x"] = 2
    case.finds("twice")


def test_a_mark_nobody_sent(case):
    case.seen["marks"]["tally-9"] = 1
    case.finds("stray")


# -- session logs ------------------------------------------------------------------------------------


def test_a_hole_in_a_log(case):
    for e in case.events[9:]:
        e["index"] += 1
    case.finds("hole")


def test_two_events_with_one_index(case):
    case.events[10]["index"] = 9
    case.finds("hole")


def test_an_event_that_was_shown_and_is_gone(case):
    case.history.append({"event": "shown", "log": SESSION, "data": event(11, "delta", text="x")})
    case.finds("lost event")


def test_an_event_that_was_shown_and_is_another_now(case):
    case.events[4]["ts"] = "2026-01-01T00:00:01Z"
    case.finds("changed event")


def test_a_session_that_was_followed_and_is_gone(case):
    case.history.append({"event": "shown", "log": "gogol_2", "data": event(0, "status", status="starting")})
    case.finds("lost session")


def test_a_session_that_was_accepted_and_is_gone(case):
    case.request("session_message", {"session_id": "gogol_3", "turn": 1}, session=None, text="start-3")
    case.finds("lost session")


def test_a_debugger_event_that_was_shown_and_is_gone(case):
    del case.seen["debugger"][2]
    case.finds("lost event")


def test_debugger_indexes_only_grow(case):
    case.seen["debugger"].append({"index": 2, "kind": "x"})
    case.finds("order")


# -- messages ----------------------------------------------------------------------------------------


def test_an_accepted_message_that_never_ran(case):
    case.request("session_message", {"turn": 3}, session=SESSION, text="message-3")
    case.finds("lost message")
    case.seen["drained"] = False
    case.finds()


def test_an_accepted_message_of_an_ended_session_need_not_run(case):
    case.request("session_message", {"turn": 3}, session=SESSION, text="message-3")
    case.request("session_end", {}, session=SESSION, register=f"end of {SESSION}", value="ended")
    case.events.append(event(11, "status", status="ended"))
    case.seen["sessions"][SESSION]["session"]["status"] = "ended"
    case.seen["registers"][f"end of {SESSION}"] = "ended"
    case.finds()


def test_a_message_that_ran_twice(case):
    case.events.append(event(11, "message", role="user", text="message-2"))
    case.finds("twice")


def test_a_message_without_an_answer_ran_at_most_once(case):
    case.request("session_message", outcome="unknown", session=SESSION, text="message-3")
    case.finds()
    case.events.append(event(11, "message", role="user", text="message-3"))
    case.finds()
    case.events.append(event(12, "message", role="user", text="message-3"))
    case.finds("twice")


def test_a_message_nobody_sent(case):
    case.events.append(event(11, "message", role="user", text="message-7"))
    case.finds("stray")


def test_messages_that_ran_in_another_order(case):
    case.request("session_message", {"turn": 4}, session=SESSION, text="message-4")
    case.request("session_message", {"turn": 3}, session=SESSION, text="message-3")
    case.events.append(event(11, "message", role="user", text="message-4"))
    case.events.append(event(12, "message", role="user", text="message-3"))
    case.finds("order")


def test_a_message_that_was_skipped(case):
    case.seen["drained"] = False
    case.request("session_message", {"turn": 3}, session=SESSION, text="message-3")
    case.request("session_message", {"turn": 4}, session=SESSION, text="message-4")
    case.events.append(event(11, "message", role="user", text="message-4"))
    case.finds("order")


def test_two_messages_accepted_as_one_turn(case):
    case.request("session_message", {"turn": 2}, session=SESSION, text="message-3")
    case.events.append(event(11, "message", role="user", text="message-3"))
    case.finds("twice")


def test_a_message_in_another_sessions_log(case):
    case.request("session_message", {"session_id": "gogol_2", "turn": 1}, session=None, text="start-2")
    case.seen["sessions"]["gogol_2"] = {"session": {"status": "idle"}, "events": [event(0, "status", status="idle")]}
    case.events.append(event(11, "message", role="user", text="start-2"))
    case.finds("changed")


# -- turns -------------------------------------------------------------------------------------------


def test_a_turn_that_completed_twice(case):
    case.events.append(event(11, "turn_completed", turn=1, stop_reason="end_turn", text="done"))
    case.finds("order")


def test_two_turns_completed_after_one_message(case):
    case.events.append(event(11, "turn_completed", turn=2, stop_reason="end_turn", text="done"))
    case.events.append(event(12, "turn_completed", turn=3, stop_reason="end_turn", text="done"))
    case.finds("twice")


def test_a_message_that_was_worked_on_twice(case):
    case.events.append(event(11, "tool_call", tool_call_id="call_2", tool="@tally/add", arguments={"mark": "turn"}))
    case.finds()
    case.events.append(event(12, "tool_call", tool_call_id="call_3", tool="@tally/add", arguments={"mark": "turn"}))
    case.finds("twice")


def test_work_that_was_done_more_often_than_turns_were_begun(case):
    case.seen["sessions"][SESSION]["work"] = 3
    case.finds("twice")


def test_work_that_the_log_tells_of_and_that_was_not_done(case):
    case.seen["sessions"][SESSION]["work"] = 0
    case.finds("lost work")


def test_a_session_that_goes_on_after_its_end(case):
    case.events.append(event(11, "status", status="ended"))
    case.events.append(event(12, "status", status="idle"))
    case.finds("order")


def test_a_status_that_differs_from_the_log(case):
    case.seen["sessions"][SESSION]["session"]["status"] = "failed"
    case.finds("changed")


def test_a_turn_that_never_ends(case):
    case.events[10] = event(10, "status", status="running")
    case.seen["sessions"][SESSION]["session"]["status"] = "running"
    case.finds("unfinished")


# -- caller requests ---------------------------------------------------------------------------------


def test_an_acknowledged_answer_that_was_dropped(case):
    for e in (
        case.events[4],
        next(r["data"] for r in case.history if r["event"] == "shown" and r["data"]["index"] == 4),
    ):
        e["outcome"] = "disconnected"
    case.finds("lost answer")


def test_a_caller_request_without_an_end(case):
    case.events.append(event(11, "caller_tool_request", request_id="r2", caller_id="app", tool="note", arguments={}))
    case.finds("unfinished")
    case.seen["drained"] = False
    case.finds()


def test_a_caller_request_that_ended_twice(case):
    case.events.append(event(11, "caller_tool_done", request_id="r1", outcome="disconnected"))
    assert "twice" in case.kinds()


def test_an_end_without_a_caller_request(case):
    case.events.append(event(11, "caller_tool_done", request_id="r9", outcome="disconnected"))
    case.finds("stray")


# -- audit -------------------------------------------------------------------------------------------


def test_an_acknowledged_action_without_an_audit_row(case):
    del case.seen["audit"][3]
    case.finds("lost audit row")


def test_an_acknowledged_action_whose_audit_row_tells_of_an_error(case):
    case.seen["audit"][5]["outcome"] = "unavailable"
    case.finds("lost audit row")


def test_one_action_with_two_audit_rows(case):
    case.seen["audit"].append({**case.seen["audit"][5], "index": 100})
    case.finds("audit row twice")


def test_an_action_without_an_answer_has_at_most_one_audit_row(case):
    case.request("project_create", outcome="unknown", token_id="t", target="p")
    case.finds()
    row = {"action": "project_create", "token_id": "t", "outcome": "ok", "target": "p"}
    case.seen["audit"].append({"index": 100, **row})
    case.finds()
    case.seen["audit"].append({"index": 101, **row})
    case.finds("audit row twice")


def test_audit_indexes_only_grow(case):
    case.seen["audit"][4]["index"] = 3
    case.finds("order")


# -- the program -------------------------------------------------------------------------------------


def test_the_program_reads_files_and_says_how_many_it_found(case, tmp_path, capsys):
    history, seen = tmp_path / "history.jsonl", tmp_path / "observation.json"
    history.write_text("".join(json.dumps(record) + "\n" for record in case.history))
    seen.write_text(json.dumps(case.seen))
    assert fault_check.main([str(history), str(seen)]) == 0
    case.seen["integrity"] = ["broken"]
    seen.write_text(json.dumps(case.seen))
    assert fault_check.main([str(history), str(seen)]) == 1
    assert "damaged: database" in capsys.readouterr().out
    assert fault_check.main([]) == 2


# -- several servers ---------------------------------------------------------------------------------


def test_a_session_that_two_servers_run(case):
    case.seen["owners"] = {SESSION: ["http://a", "http://a"]}
    case.finds()
    case.seen["owners"] = {SESSION: ["http://a", "http://b"]}
    case.finds("owned twice")


def test_a_request_that_another_server_may_have_may_happen_late(case):
    case.request("workspace_file_put", outcome="unknown", register="file w/a", value="three")
    case.history[-1]["late"] = True
    case.request("workspace_file_put", {}, register="file w/a", value="four")
    for value in ("three", "four"):
        case.seen["registers"]["file w/a"] = value
        case.finds()
    case.seen["registers"]["file w/a"] = "two"
    case.finds("lost write")


def ask(case, decision="allowed"):
    """An approval that was asked for and decided."""
    case.events.append(event(11, "approval_requested", approval_id="ask_1", tool="t"))
    case.events.append(event(12, "approval_decided", approval_id="ask_1", decision=decision))


def test_an_approval_ends_once(case):
    ask(case)
    case.finds()
    case.events.append(event(13, "approval_decided", approval_id="ask_1", decision="cancelled"))
    case.finds("twice")


def test_an_approval_without_an_end(case):
    ask(case)
    del case.events[-1]
    case.finds("unfinished")
    case.seen["drained"] = False
    case.finds()


def test_an_approval_that_was_asked_for_twice_or_never(case):
    ask(case)
    case.events[-1]["approval_id"] = "ask_2"
    case.seen["drained"] = False
    case.finds("stray")
    case.events[-1] = event(12, "approval_requested", approval_id="ask_1", tool="t")
    case.finds("twice")


def test_an_acknowledged_decision_that_was_not_carried_out(case):
    ask(case)
    case.request("approval_decide", {}, approval_id="ask_1", decision="allow")
    case.finds()
    case.events[-1]["decision"] = "cancelled"
    case.finds("lost decision")


def test_a_call_with_two_results(case):
    case.seen["sessions"][SESSION]["work"] = 2
    case.events.append(event(11, "message", role="user", text="message-3"))
    case.request("session_message", {"turn": 3}, session=SESSION, text="message-3")
    case.events.append(event(12, "tool_result", tool_call_id="call_1", ok=False))
    case.finds("twice")
    case.events[-1]["tool_call_id"] = "call_9"
    case.finds("stray")


def test_what_was_shown_just_before_the_database_crashed_may_be_gone_and_no_more(case):
    for n, record in enumerate(case.history):
        record["at"] = float(n)
    crash = len(case.history) + 100.0
    case.history.append({"event": "shown", "log": SESSION, "data": event(11, "delta", text="x"), "at": crash - 1})
    case.history.append({"event": "database_crashed", "at": crash})
    case.finds()
    case.history[-2]["at"] = crash - 60
    case.finds("lost event")


def test_an_accepted_message_survives_a_crash_of_the_database(case):
    for record in case.history:
        record["at"] = 100.0
    case.history.append({"event": "database_crashed", "at": 100.5})
    del case.events[8:]
    case.seen["sessions"][SESSION]["session"]["status"] = "running"
    case.seen["drained"] = False
    case.finds()
    case.seen["drained"] = True
    assert "lost message" in case.kinds()

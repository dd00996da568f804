import { describe, expect, test } from "vitest";
import { CallTimes } from "../lib/call_times";
import { addEvent, foldCalls, markdownParts, MIN_FOLDED_UNASKED, openCalls, settledRows, turnTimes, type TimelineRow } from "../lib/timeline";
import type { DebugEvent, SessionEvent } from "../lib/types";
import { axisMarks, rowOf, spansOf } from "../lib/waterfall";

const at = (ms: number) => new Date(ms).toISOString();
const debug = (index: number, kind: string, ms: number, more: Record<string, unknown> = {}): DebugEvent => ({ index, ts: at(ms), kind, ...more });
const rowsOf = (...events: [type: string, ms: number, more?: Record<string, unknown>][]) => {
  const rows: TimelineRow[] = [];
  events.forEach(([type, ms, more = {}], index) => addEvent(rows, { index, ts: at(ms), session_id: "s", type, ...more } as SessionEvent));
  return rows;
};

describe("approvals in the timeline", () => {
  test("a decision closes its request, wherever it comes", () => {
    const rows = rowsOf(
      ["approval_requested", 0, { approval_id: "a", tool: "x" }],
      ["approval_requested", 1, { approval_id: "b", tool: "y" }],
      ["approval_decided", 5, { approval_id: "a", decision: "denied", by: { token_id: "t", name: "anna" }, reason: "no" }],
    );
    expect(rows.map((r) => [r.event["tool"], r.outcome])).toEqual([["x", "denied"], ["y", undefined]]);
    expect(rows[0]).toMatchObject({ took: 5, decision: { by: "anna", reason: "no", at: at(5) } });
  });
});

describe("the waterfall", () => {
  const turns = [{ turn: 1, from: 0, to: 100 }, { turn: 2, from: 100, to: 300 }];

  test("parallel calls lie beside each other, and model requests belong to the turn they were made in", () => {
    const events = [
      debug(0, "tool_call", 60, { turn: 2, tool: "a", started: at(110), duration_ms: 50, ok: true }),
      debug(1, "tool_call", 65, { turn: 2, tool: "b", started: at(111), duration_ms: 50, ok: false }),
      debug(2, "model_request", 50, { provider: "p", model: "m", started: at(10), duration_ms: 40, status: 200 }),
      debug(3, "model_request", 250, { provider: "p", started: at(200), duration_ms: 50, status: 500 }),
    ];
    expect(spansOf(events, turns, 2, 0).map((s) => [s.name, s.part, s.from, s.to, s.ok])).toEqual([
      ["a", "tool", 110, 160, true], ["b", "tool", 111, 161, false], ["p", "model", 200, 250, false],
    ]);
    expect(spansOf(events, turns, 1, 0).map((s) => s.name)).toEqual(["m"]);
    expect(spansOf(events, turns, undefined, 0)).toHaveLength(4);
  });

  test("waiting for a person is shown within its call, or alone while the call still waits", () => {
    const events = [
      debug(0, "approval_requested", 110, { approval_id: "1", tool: "a" }),
      debug(1, "approval_decided", 150, { approval_id: "1", decision: "allowed" }),
      // Its duration counts from when it was allowed.
      debug(2, "tool_call", 160, { turn: 2, tool: "a", started: at(110), duration_ms: 10, ok: true }),
      debug(3, "approval_requested", 170, { approval_id: "2", tool: "a" }),
      debug(4, "tool_call", 190, { turn: 2, tool: "lent", source: "caller", started: at(180), duration_ms: 10, ok: true }),
    ];
    const spans = spansOf(events, turns, 2, 290);
    expect(spans.map((s) => [s.name, s.part, s.to - s.from, s.waits.length])).toEqual([["a", "tool", 50, 1], ["a", "waiting", 120, 0], ["lent", "waiting", 10, 0]]);
    expect(spans[0]?.waits).toEqual([{ from: 110, to: 150 }]);
  });

  test("calls that wait at the same time have each their own wait, by their arguments", () => {
    const ask = (index: number, ms: number, id: string) => debug(index, "approval_requested", ms, { approval_id: id, tool: "a", arguments: { n: id } });
    const allow = (index: number, ms: number, id: string) => debug(index, "approval_decided", ms, { approval_id: id, decision: "allowed" });
    const ran = (index: number, ms: number, id: string, began: number) => debug(index, "tool_call", ms, { turn: 2, tool: "a", arguments: { n: id }, started: at(began), duration_ms: 5, ok: true });
    const spans = spansOf([ask(0, 110, "1"), ask(1, 111, "2"), allow(2, 150, "2"), ran(3, 155, "2", 111), allow(4, 190, "1"), ran(5, 195, "1", 110)], turns, 2, 290);
    expect(spans.map((s) => [s.event.index, s.to - s.from, s.waits[0]?.to])).toEqual([[5, 85, 190], [3, 44, 150]]);
  });

  test("what a person calls after the turn is not part of it", () => {
    const events = [
      debug(0, "tool_call", 60, { turn: 1, tool: "a", started: at(50), duration_ms: 10, ok: true }),
      debug(1, "tool_call", 900, { turn: 1, tool: "a", started: at(890), duration_ms: 10, ok: true }),
    ];
    expect(spansOf(events, [{ turn: 1, from: 0, to: 100 }], 1, 0)).toHaveLength(1);
    expect(spansOf(events, [], 1, 0)).toHaveLength(2);
  });

  test("the axis has a few round marks", () => {
    expect(axisMarks(0, 486)).toEqual([0, 200, 400]);
    expect(axisMarks(0, 1)).toEqual([0, 0.5, 1]);
    expect(axisMarks(100, 110).length).toBeLessThanOrEqual(8);
  });

  test("turns begin with their message", () => {
    const rows = rowsOf(["message", 5, { role: "user", text: "a" }], ["turn_completed", 50, { turn: 1 }], ["message", 70, { role: "user", text: "b" }]);
    expect(turnTimes(rows, 90)).toEqual([{ turn: 1, from: 5, to: 50 }, { turn: 2, from: 70, to: 90 }]);
  });
});

test("runs of successful calls fold into one row and open again", () => {
  const call = (id: number, ok: boolean): [string, number, Record<string, unknown>][] => [
    ["tool_call", id, { tool_call_id: id, tool: "x", arguments: {} }], ["tool_result", id + 1, { tool_call_id: id, ok }],
  ];
  const rows = rowsOf(...call(1, true), ...call(2, true), ...call(3, true), ...call(4, false), ...call(5, true));
  const folded = foldCalls(rows, {});
  expect(folded.map((r) => r.type)).toEqual(["folded", "tool_call", "tool_result", "tool_call", "tool_result"]);
  expect(folded[0]?.text).toBe("3 calls: x");
  expect(foldCalls(rows, { [folded[0]!.key]: true })).toHaveLength(rows.length);
  // A run that has not changed is the same object: nothing is drawn again.
  expect(foldCalls([...rows], {})[0]).toBe(folded[0]);
});

test("many calls fold without being asked, once something has followed them", () => {
  const call = (id: number): [string, number, Record<string, unknown>][] => [
    ["tool_call", id, { tool_call_id: id, tool: "x", arguments: {} }], ["tool_result", id + 1, { tool_call_id: id, ok: true }],
  ];
  const calls = [1, 2, 3, 4, 5, 6].flatMap(call);
  const shown = (rows: TimelineRow[], isOpen?: (row: TimelineRow) => boolean) => foldCalls(rows, {}, MIN_FOLDED_UNASKED, settledRows(rows), isOpen).map((r) => r.type);
  expect(shown(rowsOf(...calls))).toHaveLength(12);
  expect(shown(rowsOf(...calls, ["tool_call", 20, { tool_call_id: 20, tool: "x" }]))).toHaveLength(13);
  expect(shown(rowsOf(...calls, ["turn_completed", 30]))).toEqual(["folded", "turn_completed"]);
  expect(shown(rowsOf(...calls.slice(2), ["turn_completed", 30]))).toHaveLength(11);
  // What is open to be read stays.
  expect(shown(rowsOf(...calls, ["turn_completed", 30]), (row) => row.event.index === 4)).toHaveLength(13);
});

test("calls under way are spans without an end, and a span leads to its row", () => {
  const rows = rowsOf(
    ["message", 100, { role: "user", text: "hi" }],
    ["tool_call", 110, { tool_call_id: 1, tool: "mcp_a", arguments: { n: 1 } }],
    ["tool_result", 130, { tool_call_id: 1, ok: true }],
    ["tool_call", 140, { tool_call_id: 2, tool: "mcp_a", arguments: { n: 2 } }],
    ["tool_call", 150, { tool_call_id: 3, tool: "lent", arguments: {} }],
    ["caller_tool_request", 151, { request_id: "r", caller_id: "c", tool: "lent" }],
  );
  const under = openCalls(rows);
  expect(under.map((r) => [r.type, r.event.index])).toEqual([["tool_call", 3], ["tool_call", 4], ["caller_tool_request", 5]]);
  const done = debug(7, "tool_call", 130, { turn: 1, tool: "a", arguments: { n: 1 }, started: at(111), duration_ms: 19, ok: true });
  const spans = spansOf([done], turnTimes(rows, 200), 1, 200, under);
  expect(spans.map((s) => [s.name, s.part, s.open, s.from, s.to])).toEqual([["a", "tool", false, 111, 130], ["mcp_a", "tool", true, 140, 200], ["lent", "waiting", true, 151, 200]]);
  expect(spans.map((s) => rowOf(rows, s.event)?.event.index)).toEqual([1, 3, 5]);
  expect(new Set(spans.map((s) => s.key)).size).toBe(3);
  expect(openCalls(rowsOf(["tool_call", 1, { tool_call_id: 1, tool: "a" }], ["turn_completed", 2]))).toEqual([]);
});

test("a session as Markdown keeps its code apart", () => {
  const rows = rowsOf(["message", 0, { role: "user", text: "hi" }], ["tool_call", 1, { tool_call_id: 1, tool: "x", arguments: { a: "```" } }], ["tool_result", 2, { tool_call_id: 1, ok: true, result: "r" }]);
  const text = [...markdownParts(rows, "A\ntitle")].join("\n\n");
  expect(text.startsWith("# A title\n\n**You**\n\nhi\n\n**Call** `x`\n\n````\n")).toBe(true);
});

describe("how long a call took", () => {
  const call = (ms: number, tool: string, args: unknown): SessionEvent => ({ index: 0, ts: at(ms), session_id: "s", type: "tool_call", tool, arguments: args });
  const measured = (index: number, began: number, took: number, tool: string, args: unknown) => debug(index, "tool_call", began + took, { tool, arguments: args, started: at(began), duration_ms: took });

  test("is told by the gate, whose clock does not wait for the agent's report", () => {
    const times = new CallTimes();
    // Read from the end: the later ones come first.
    times.add([measured(3, 40, 7.5, "read", { path: "b" })]);
    times.add([measured(1, 10, 2, "read", { path: "a" }), measured(2, 10, 900, "read", { path: "slow" })]);
    // The call and its result were reported at the same time.
    expect(times.durationOf(call(13, "read", { path: "a" }), 13)).toBe(2);
    expect(times.durationOf(call(50, "read", { path: "b" }), 50)).toBe(7.5);
    expect(times.durationOf(call(10, "read", { path: "slow" }), 915)).toBe(900);
    // An agent that prefixes the name with that of the MCP server.
    expect(times.durationOf(call(13, "mcp__oubliette__read", { path: "a" }), 13)).toBe(2);
  });

  test("is not taken from another call", () => {
    const times = new CallTimes();
    times.add([measured(1, 10, 2, "read", { path: "a" }), measured(2, 9_000, 3, "read", { path: "a" })]);
    expect(times.durationOf(call(13, "write", { path: "a" }), 13)).toBeUndefined();
    expect(times.durationOf(call(13, "read", { path: "other" }), 13)).toBeUndefined();
    // Ended after the result was reported, or long before the call.
    expect(times.durationOf(call(3, "read", { path: "a" }), 4)).toBeUndefined();
    expect(times.durationOf(call(8_000, "read", { path: "a" }), 8_500)).toBeUndefined();
    // Known a moment later.
    const late = call(100, "late", {});
    expect(times.durationOf(late, 120)).toBeUndefined();
    times.add([measured(3, 99, 20, "late", {})]);
    expect(times.durationOf(late, 120)).toBe(20);
  });

  test("a call that was made twice has its own duration each time", () => {
    const times = new CallTimes();
    times.add([measured(1, 10, 2, "read", {}), measured(2, 20, 5, "read", {})]);
    expect([times.durationOf(call(12, "read", {}), 13), times.durationOf(call(22, "read", {}), 26)]).toEqual([2, 5]);
  });
});

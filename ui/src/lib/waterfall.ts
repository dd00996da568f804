// The calls and model requests of a turn or a session as spans on one time axis.
import type { TimelineRow, TurnTimes } from "./timeline";
import type { DebugEvent } from "./types";

export interface WaterfallSpan {
  key: string;
  event: DebugEvent;
  /** Whether it is still under way; `to` is then now. */
  open: boolean;
  name: string;
  /** What the time went into: a tool, a model, or waiting for a caller or a person. */
  part: "tool" | "model" | "waiting";
  ok: boolean;
  /** Milliseconds since the epoch. */
  from: number;
  to: number;
  /** Within the span: when it waited for a person. */
  waits: { from: number; to: number }[];
}

/** When an event began, in milliseconds. `started` is missing in events recorded by older servers. */
export function beginOf(event: DebugEvent): number {
  return event["started"] === undefined ? Date.parse(event.ts) - Number(event["duration_ms"] ?? 0) : Date.parse(String(event["started"]));
}

/** Clocks of events that belong together may differ by this much, in milliseconds. */
const SLACK_MS = 5;

/** Whether an event belongs to a turn; without one, every event does. */
function isInside(event: DebugEvent, turn: number | undefined, times: TurnTimes | undefined): boolean {
  if (turn === undefined) return true;
  const from = times ? beginOf(event) : 0;
  // A call that a person makes after the turn has its number, too.
  if (event["turn"] !== undefined) return event["turn"] === turn && (times === undefined || from <= times.to + SLACK_MS);
  return times !== undefined && from >= times.from - SLACK_MS && from <= times.to + SLACK_MS;
}

/** Whether a turn has any span. */
export function hasSpans(timed: DebugEvent[], turns: TurnTimes[], turn: number): boolean {
  const times = turns.find((t) => t.turn === turn);
  return timed.findLast((event) => isInside(event, turn, times)) !== undefined;
}

/** The spans of one turn, or of the whole session without one; in the order they began. */
export function spansOf(events: DebugEvent[], turns: TurnTimes[], turn: number | undefined, now: number, underWay: TimelineRow[] = []): WaterfallSpan[] {
  const times = turn === undefined ? undefined : turns.find((t) => t.turn === turn);
  const inside = (event: DebugEvent) => isInside(event, turn, times);
  const decided = new Map(events.filter((e) => e.kind === "approval_decided").map((e) => [String(e["approval_id"]), e]));
  const waits = events
    .filter((e) => e.kind === "approval_requested" && inside(e))
    .map((event) => {
      const end = decided.get(String(event["approval_id"]));
      return { event, ok: end?.["decision"] === "allowed", open: end === undefined, from: Date.parse(event.ts), to: end ? Date.parse(end.ts) : now };
    });
  const used = new Set<DebugEvent>();
  const spans = events.filter((e) => e["duration_ms"] !== undefined && inside(e)).map((event): WaterfallSpan => {
    const from = beginOf(event);
    const ended = Math.max(Date.parse(event.ts), from + Number(event["duration_ms"]));
    const own = waits
      .filter((w) => !used.has(w.event) && w.event["tool"] === event["tool"] && w.from >= from - SLACK_MS && w.to <= ended + SLACK_MS)
      .filter((w) => JSON.stringify(w.event["arguments"]) === JSON.stringify(event["arguments"]))
      .slice(0, 1);
    // The gate counts a call's duration from when it was allowed.
    const to = own.length ? ended : from + Number(event["duration_ms"]);
    for (const wait of own) used.add(wait.event);
    const model = event.kind === "model_request";
    return {
      key: String(event.index), event, open: false, from, to,
      name: String(event["tool"] ?? event["model"] ?? `${String(event["provider"] ?? event.kind)}${String(event["path"] ?? "")}`),
      part: model ? "model" : event["source"] === "caller" ? "waiting" : "tool",
      ok: event["ok"] === undefined ? Number(event["status"] ?? 200) < 400 : event["ok"] === true,
      waits: own.map(({ from, to }) => ({ from, to })),
    };
  });
  // A call that still waits, or was refused, has no span of its own.
  for (const { event, ok, open, from, to } of waits) {
    if (!used.has(event)) spans.push({ key: String(event.index), event, open, name: String(event["tool"]), part: "waiting", ok: ok || open, from, to, waits: [] });
  }
  // What is under way has no event of the debugger yet. What waits for a person is there already.
  if (turn === undefined || turn === turns.at(-1)?.turn) {
    const waiting = waits.filter((w) => w.open).map((w) => String(w.event["tool"]));
    for (const { key, type, event } of underWay) {
      const name = String(event["tool"]);
      if (waiting.some((tool) => isSameTool(name, tool)) || (type === "tool_call" && underWay.some((row) => row.type === "caller_tool_request" && isSameTool(name, String(row.event["tool"]))))) continue;
      const from = Date.parse(event.ts);
      spans.push({ key, event: { ...event, kind: type }, open: true, name, part: type === "tool_call" ? "tool" : "waiting", ok: true, from, to: Math.max(from, now), waits: [] });
    }
  }
  return spans.sort((a, b) => a.from - b.from);
}

/** Whether an agent calls a tool by this name. Some prefix it with that of the MCP server or the caller. */
const isSameTool = (called: string, tool: string): boolean => called === tool || called.endsWith(`_${tool}`);

/** The row of the timeline that an event of the debugger is about: the call, the approval, or for a model request what came of it. */
export function rowOf(rows: TimelineRow[], event: DebugEvent): TimelineRow | undefined {
  if (event["approval_id"] !== undefined) return rows.findLast((row) => row.event["approval_id"] === event["approval_id"]);
  // A call that is under way is itself a row's event.
  if (event["type"] !== undefined) return rows.findLast((row) => row.event.index === event.index);
  const [from, to] = [beginOf(event) - SLACK_MS, Date.parse(event.ts)];
  const after = rows.filter((row) => Date.parse(row.event.ts) >= from);
  if (event.kind === "tool_call" || event.kind === "tool_blocked") {
    const wanted = JSON.stringify(event["arguments"] ?? {});
    const same = (row: TimelineRow) => row.type === "tool_call" && isSameTool(String(row.event["tool"]), String(event["tool"])) && JSON.stringify(row.event["arguments"] ?? {}) === wanted;
    // The agent may report a call before the gate has begun it.
    return after.find(same) ?? rows.findLast((row) => Date.parse(row.event.ts) < from && same(row));
  }
  return event.kind === "model_request" ? (after.find((row) => Date.parse(row.event.ts) >= to - SLACK_MS) ?? after.at(-1)) : undefined;
}

/** Round steps for the marks of an axis of this many milliseconds: at most five. */
export function axisMarks(from: number, to: number): number[] {
  const rough = Math.max(0.001, (to - from) / 4);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
  const marks: number[] = [];
  for (let at = Math.ceil(from / step) * step; at <= to && marks.length < 8; at += step) marks.push(at);
  return marks;
}

// The calls and model requests of a turn or a session as spans on one time axis.
import type { TurnTimes } from "./timeline";
import type { DebugEvent } from "./types";

export interface WaterfallSpan {
  event: DebugEvent;
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
export function spansOf(events: DebugEvent[], turns: TurnTimes[], turn: number | undefined, now: number): WaterfallSpan[] {
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
      event, from, to,
      name: String(event["tool"] ?? event["model"] ?? `${String(event["provider"] ?? event.kind)}${String(event["path"] ?? "")}`),
      part: model ? "model" : event["source"] === "caller" ? "waiting" : "tool",
      ok: event["ok"] === undefined ? Number(event["status"] ?? 200) < 400 : event["ok"] === true,
      waits: own.map(({ from, to }) => ({ from, to })),
    };
  });
  // A call that still waits, or was refused, has no span of its own.
  for (const { event, ok, open, from, to } of waits) {
    if (!used.has(event)) spans.push({ event, name: String(event["tool"]), part: "waiting", ok: ok || open, from, to, waits: [] });
  }
  return spans.sort((a, b) => a.from - b.from);
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

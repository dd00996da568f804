// A session's events as rows of the timeline: text deltas are joined, and a call's result follows the call.
import type { SessionEvent, Usage } from "./types";

export interface TimelineRow {
  key: string;
  type: string;
  event: SessionEvent;
  /** The text of a message, or the joined text of successive deltas. */
  text?: string;
  /** For a call: its duration in milliseconds, once it has ended. */
  took?: number;
  /** For a caller's request or an approval: how it ended. */
  outcome?: string;
  /** For a call: whether it succeeded, once it has ended. */
  ok?: boolean;
  /** For a status: whether its reason was told as an error just before. */
  repeats?: boolean;
  /** For an approval: who decided, and why. */
  decision?: { by?: string; reason?: string; at: string };
}

const HIDDEN_TYPES = new Set(["usage"]);

const isSameText = (one: unknown, other: unknown): boolean =>
  typeof one === "string" && typeof other === "string" && one.replace(/\s+/g, " ").trim() === other.replace(/\s+/g, " ").trim();

/** Adds one event to the rows, in place. A changed row is replaced by a new object, so that views notice it. */
export function addEvent(rows: TimelineRow[], event: SessionEvent): void {
  const last = rows[rows.length - 1];
  const key = `${event.type}-${event.index}`;
  switch (event.type) {
    case "delta":
    case "thought":
      if (last?.type === event.type) {
        rows[rows.length - 1] = { ...last, text: (last.text ?? "") + String(event["text"] ?? "") };
      } else {
        rows.push({ key, type: event.type, event, text: String(event["text"] ?? "") });
      }
      return;
    case "message": {
      // The complete message replaces the deltas it was streamed in.
      const row = { key, type: "message", event, text: String(event["text"] ?? "") };
      if (event["role"] === "assistant") {
        const place = rows.findLastIndex((r) => r.type === "delta" || (r.type === "message" && r.event["role"] === "user"));
        if (place >= 0 && rows[place]?.type === "delta") {
          rows[place] = { ...row, key: rows[place].key };
          return;
        }
      }
      rows.push(row);
      return;
    }
    case "plan": {
      const place = rows.findLastIndex((r) => r.type === "plan" || r.type === "turn_completed");
      if (place >= 0 && rows[place]?.type === "plan") rows[place] = { ...rows[place], event };
      else rows.push({ key, type: "plan", event });
      return;
    }
    case "tool_result": {
      const place = rows.findLastIndex((r) => r.type === "tool_call" && r.event["tool_call_id"] === event["tool_call_id"]);
      const call = rows[place];
      if (!call) {
        rows.push({ key, type: "tool_result", event });
        return;
      }
      const took = Date.parse(event.ts) - Date.parse(call.event.ts);
      rows[place] = { ...call, took, ok: event["ok"] === true };
      rows.splice(place + 1, 0, { key, type: "tool_result", event, took });
      return;
    }
    case "approval_decided": {
      const place = rows.findLastIndex((r) => r.type === "approval_requested" && r.event["approval_id"] === event["approval_id"]);
      const asked = rows[place];
      if (!asked) {
        rows.push({ key, type: event.type, event });
        return;
      }
      const by = event["by"];
      const name = by && typeof by === "object" ? ((by as Record<string, unknown>)["name"] ?? (by as Record<string, unknown>)["token_id"]) : by;
      rows[place] = {
        ...asked,
        outcome: String(event["decision"]),
        took: Date.parse(event.ts) - Date.parse(asked.event.ts),
        decision: { at: event.ts, ...(name ? { by: String(name) } : {}), ...(event["reason"] ? { reason: String(event["reason"]) } : {}) },
      };
      return;
    }
    case "caller_tool_done": {
      const place = rows.findLastIndex((r) => r.type === "caller_tool_request" && r.event["request_id"] === event["request_id"]);
      const asked = rows[place];
      if (asked) rows[place] = { ...asked, outcome: String(event["outcome"]), took: Date.parse(event.ts) - Date.parse(asked.event.ts) };
      else rows.push({ key, type: event.type, event });
      return;
    }
    case "status":
      rows.push({ key, type: event.type, event, ...(last?.type === "error" && isSameText(last.event["message"], event["reason"]) ? { repeats: true } : {}) });
      return;
    default:
      if (!HIDDEN_TYPES.has(event.type)) rows.push({ key, type: event.type, event });
  }
}

/** The least number of calls in a row that are folded into one when the reader asks for it, and without being asked. */
export const MIN_FOLDED = 3;
export const MIN_FOLDED_UNASKED = 6;

/** Folded runs by their first row. A run that has not changed stays the same object, so that views need not look at it again. */
const foldedRuns = new WeakMap<TimelineRow, { last: TimelineRow; length: number; row: TimelineRow }>();

const isFoldable = ({ type, ok, event, outcome }: TimelineRow): boolean =>
  (type === "tool_call" && ok === true) || (type === "tool_result" && event["ok"] === true) || (type === "caller_tool_request" && outcome === "answered");

/** The row for a run of successful calls, `rows[from]` up to but without `rows[to]`. */
function foldRun(rows: TimelineRow[], from: number, to: number, key: string, calls: number): TimelineRow {
  const [first, last] = [rows[from]!, rows[to - 1]!];
  const known = foldedRuns.get(first);
  if (known && known.last === last && known.length === to - from) return known.row;
  const names = new Set<string>();
  let took = 0;
  for (let i = from; i < to; i++) {
    const row = rows[i]!;
    if (row.type === "tool_result") continue;
    if (names.size < 5) names.add(String(row.event["tool"]).slice(0, 60));
    took += row.took ?? 0;
  }
  const listed = [...names];
  const text = `${calls} calls: ${listed.slice(0, 4).join(", ")}${listed.length > 4 ? " and others" : ""}`;
  const row: TimelineRow = { key, type: "folded", event: first.event, text, took };
  foldedRuns.set(first, { last, length: to - from, row });
  return row;
}

const CALLS = new Set(["tool_call", "tool_result", "caller_tool_request"]);

/** How many rows there are before the calls at the end, which may go on. */
export function settledRows(rows: TimelineRow[]): number {
  return rows.findLastIndex((row) => !CALLS.has(row.type)) + 1;
}

/** Calls that are under way: without a result since the last turn ended. */
export function openCalls(rows: TimelineRow[]): TimelineRow[] {
  const found: TimelineRow[] = [];
  for (let i = rows.length - 1; i >= 0 && rows[i]!.type !== "turn_completed"; i--) {
    const row = rows[i]!;
    if (row.type === "tool_call" ? row.took === undefined : row.type === "caller_tool_request" && row.outcome === undefined) found.push(row);
  }
  return found.reverse();
}

/** The rows with each run of at least `least` successful calls replaced by one row of type `folded`, unless it is `opened` or among the
 * rows from `until` on. A row that `isKept` is not folded. */
export function foldCalls(rows: TimelineRow[], opened: Record<string, boolean>, least = MIN_FOLDED, until = rows.length, isKept = (_row: TimelineRow) => false): TimelineRow[] {
  const out: TimelineRow[] = [];
  for (let from = 0; from < rows.length; ) {
    let to = from;
    let calls = 0;
    for (; to < rows.length && isFoldable(rows[to]!) && !isKept(rows[to]!); to++) if (rows[to]!.type !== "tool_result") calls++;
    const key = `folded-${rows[from]!.key}`;
    if (calls >= least && from < until && !opened[key]) out.push(foldRun(rows, from, to, key, calls));
    else for (let i = from; i < to; i++) out.push(rows[i]!);
    if (to < rows.length) out.push(rows[to]!);
    from = to + 1;
  }
  return out;
}

/** Times of one turn, in milliseconds since the epoch. */
export interface TurnTimes {
  turn: number;
  from: number;
  to: number;
}

/** When each turn began and ended: from the message that asked for it to its end. */
export function turnTimes(rows: TimelineRow[], now: number): TurnTimes[] {
  const found: TurnTimes[] = [];
  let from: number | undefined;
  for (const { type, event } of rows) {
    if (type === "message" && event["role"] === "user") from ??= Date.parse(event.ts);
    if (type !== "turn_completed") continue;
    const to = Date.parse(event.ts);
    found.push({ turn: Number(event["turn"] ?? found.length + 1), from: from ?? to, to });
    from = undefined;
  }
  if (from !== undefined) found.push({ turn: (found.at(-1)?.turn ?? 0) + 1, from, to: Math.max(from, now) });
  return found;
}

/** One turn of the outline. */
export interface OutlineTurn {
  /** Its number; 0 while it runs. */
  turn: number;
  /** The index of the message that asked for it. */
  index: number;
  text: string;
  calls: number;
  failed: number;
  /** The first failures, each with the event to show. */
  failures: { index: number; text: string }[];
  state: "running" | "idle" | "failed" | "ended";
  took?: number;
  usage?: Usage;
}

const MAX_LISTED_FAILURES = 3;

/** The turns of a session, each from its message to its end. */
export function outlineOf(rows: TimelineRow[]): OutlineTurn[] {
  const found: OutlineTurn[] = [];
  let open: OutlineTurn | undefined;
  let from = 0;
  const fail = (index: number, text: string) => {
    if (!open) return;
    open.failed++;
    if (open.failures.length < MAX_LISTED_FAILURES) open.failures.push({ index, text });
  };
  for (const { type, event, text, ok } of rows) {
    if (type === "message" && event["role"] === "user") {
      if (open) open.state = "ended";
      open = { turn: 0, index: event.index, text: text ?? "", calls: 0, failed: 0, failures: [], state: "running" };
      from = Date.parse(event.ts);
      found.push(open);
    } else if (!open) continue;
    else if (type === "tool_call" || type === "caller_tool_request") {
      if (type === "tool_call") open.calls++;
      if (ok === false) fail(event.index, String(event["tool"]));
    } else if (type === "error") fail(event.index, String(event["message"]));
    else if (type === "turn_completed") {
      open.turn = Number(event["turn"] ?? 0);
      open.took = Date.parse(event.ts) - from;
      open.state = event["stop_reason"] === "error" ? "failed" : event["stop_reason"] === "cancelled" ? "ended" : "idle";
      if (event["usage"]) open.usage = event["usage"] as Usage;
      open = undefined;
    }
  }
  return found;
}

/** A session's rows as paragraphs of Markdown, for a report or an issue; one at a time, since there may be many. */
export function* markdownParts(rows: TimelineRow[], title: string): Generator<string> {
  const fence = (text: string) => {
    let longest = 2;
    for (const [run] of text.matchAll(/`+/g)) longest = Math.max(longest, run.length);
    const marks = "`".repeat(longest + 1);
    return `${marks}\n${text}\n${marks}`;
  };
  const json = (value: unknown) => fence(JSON.stringify(value, null, 2) ?? "");
  yield `# ${title.replace(/\s+/g, " ")}`;
  for (const { type, event, text, outcome } of rows) {
    if (type === "message" || type === "delta") yield `**${event["role"] === "user" ? "You" : "Agent"}**\n\n${text ?? ""}`;
    else if (type === "tool_call" || type === "caller_tool_request") yield `**Call** \`${String(event["tool"])}\`\n\n${json(event["arguments"])}`;
    else if (type === "tool_result") yield `**${event["ok"] ? "Result" : "Failed"}**\n\n${json(event["result"])}`;
    else if (type === "approval_requested") yield `**Approval** \`${String(event["tool"])}\`: ${outcome ?? "pending"}`;
    else if (type === "error") yield `**Error** ${String(event["code"])}: ${String(event["message"])}`;
    else if (type === "turn_completed") yield `---`;
  }
}

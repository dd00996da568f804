// A session's events as rows of the timeline: text deltas are joined, and a call's result follows the call.
import type { SessionEvent } from "./types";

export interface TimelineRow {
  key: string;
  type: string;
  event: SessionEvent;
  /** The text of a message, or the joined text of successive deltas. */
  text?: string;
  /** For a call: its duration in milliseconds, once it has ended. */
  took?: number;
  /** For a caller's request: how it ended. */
  outcome?: string;
}

const HIDDEN_TYPES = new Set(["usage"]);

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
      rows[place] = { ...call, took };
      rows.splice(place + 1, 0, { key, type: "tool_result", event, took });
      return;
    }
    case "caller_tool_done": {
      const place = rows.findLastIndex((r) => r.type === "caller_tool_request" && r.event["request_id"] === event["request_id"]);
      const asked = rows[place];
      if (asked) rows[place] = { ...asked, outcome: String(event["outcome"]), took: Date.parse(event.ts) - Date.parse(asked.event.ts) };
      else rows.push({ key, type: event.type, event });
      return;
    }
    default:
      if (!HIDDEN_TYPES.has(event.type)) rows.push({ key, type: event.type, event });
  }
}

// A session's events as the rows a person reads: pieces of text joined, a call's result beside the call.
import type { SessionEvent } from "./types";

export interface Row {
  key: string;
  type: string;
  event: SessionEvent;
  /** The joined text of a run of pieces. */
  text?: string;
  /** For a call: when it ended, in milliseconds since it began. */
  took?: number;
  /** For a caller's request: how it ended. */
  outcome?: string;
}

const QUIET = new Set(["usage"]);

/** Adds one event to the rows, in place; rows are replaced, not changed, so that views see it. */
export function add(rows: Row[], event: SessionEvent): void {
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
      // The whole message takes the place of the pieces it was streamed in.
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
      if (!QUIET.has(event.type)) rows.push({ key, type: event.type, event });
  }
}

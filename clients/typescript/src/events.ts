/** The events of a session's log, as the server sends them. */

import type { ErrorCode } from "./errors.js";

/** The status of a session. `ended` is final; a message starts a `failed` session again if that is possible. */
export type SessionStatus = "starting" | "running" | "idle" | "switching" | "ended" | "failed";

/** What every event has. */
export interface EventHeader {
  /** Position in the session's log: 0, 1, 2, … without gaps. */
  readonly index: number;
  /** When it was written, as RFC 3339. */
  readonly ts: string;
  readonly session_id: string;
}

/** The agent called a function that a caller lent. */
export interface CallerToolRequest {
  readonly type: "caller_tool_request";
  readonly request_id: string;
  readonly caller_id: string;
  /** The tool's name without the caller id. */
  readonly tool: string;
  readonly arguments: Record<string, unknown>;
}

/** A request to a caller ended. */
export interface CallerToolDone {
  readonly type: "caller_tool_done";
  readonly request_id: string;
  readonly outcome: "answered" | "error" | "timeout" | "disconnected" | "cancelled";
}

/** A call waits for a person, who decides with `approvals.allow` or `approvals.deny`. */
export interface ApprovalRequested {
  readonly type: "approval_requested";
  readonly approval_id: string;
  readonly tool: string;
  readonly canonical: string;
  readonly source: string;
  readonly arguments: unknown;
  /** The entry of agent.json that makes the call wait. */
  readonly rule: unknown;
  readonly expires_at: string;
}

/** An approval was decided, expired or was cancelled. */
export interface ApprovalDecided {
  readonly type: "approval_decided";
  readonly approval_id: string;
  readonly decision: "allowed" | "denied" | "expired" | "cancelled";
  readonly by?: string;
  readonly reason?: string;
}

/** The agent finished a turn. */
export interface TurnCompleted {
  readonly type: "turn_completed";
  /** Number of the turn, from 1. */
  readonly turn: number;
  /** Why it stopped: `end_turn`, `cancelled`, `max_tokens`, … */
  readonly stop_reason: string;
  /** All text of the agent in this turn. */
  readonly text: string;
}

/** Type and fields of an event. */
export type EventBody =
  | { readonly type: "status"; readonly status: SessionStatus; readonly reason?: string }
  | { readonly type: "message"; readonly role: "user" | "assistant"; readonly text: string }
  | { readonly type: "delta"; readonly text: string }
  | { readonly type: "thought"; readonly text: string }
  | { readonly type: "plan"; readonly entries: unknown }
  | { readonly type: "usage"; readonly [field: string]: unknown }
  | { readonly type: "tool_call"; readonly tool_call_id: string; readonly tool: string; readonly arguments: unknown }
  | { readonly type: "tool_result"; readonly tool_call_id: string; readonly ok: boolean; readonly result?: unknown }
  | CallerToolRequest
  | CallerToolDone
  | ApprovalRequested
  | ApprovalDecided
  | TurnCompleted
  | { readonly type: "error"; readonly code: ErrorCode; readonly message: string };

/** One event of a session. A newer server may send types that are not listed: have a default branch. */
export type SessionEvent = EventHeader & EventBody;

/** The event in this text; undefined if it holds none: a newer server may send messages that are not events. */
export function parseEvent(text: string): SessionEvent | undefined {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return undefined;
  }
  if (typeof value !== "object" || value === null) return undefined;
  const { index, type } = value as { index?: unknown; type?: unknown };
  return Number.isSafeInteger(index) && typeof type === "string" ? (value as SessionEvent) : undefined;
}

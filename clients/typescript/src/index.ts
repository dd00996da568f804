/**
 * Lend functions of your program to an agent, in ten lines. In the order data flows:
 *
 * - `client`: the server's address and the token; single calls.
 * - `sessions`, `workspaces`, `approvals`: what the server offers, with types.
 * - `lend`: which functions are lent; `schema`: the types of their arguments, from JSON Schema.
 * - `sse`: bytes to server-sent events; `events`: the events of a session.
 * - `follow`: reading the event stream, with reconnects; `requests`: running the lent function for each request and
 *   answering it once.
 * - `session`: the program's handle on the session; `errors`: what is thrown.
 *
 * @module
 */

export type { AllowOptions, Approval, ApprovalCalls, ApprovalStatus, DenyOptions } from "./approvals.js";
export { Oubliette, type CallArguments, type CallOptions, type ClientOptions } from "./client.js";
export { EndedError, OublietteError, RefusedError, UnreachableError, isRefused, type ErrorCode } from "./errors.js";
export type {
  ApprovalDecided,
  ApprovalRequested,
  CallerToolDone,
  CallerToolRequest,
  EventBody,
  EventHeader,
  SessionEvent,
  SessionStatus,
  TurnCompleted,
} from "./events.js";
export type { StreamOptions } from "./follow.js";
export type { CallerContext, Lend, LendOptions, ToolCall, ToolDeclaration, ToolFunction } from "./lend.js";
export type { FromSchema, JsonSchema, ObjectSchema, SchemaType } from "./schema.js";
export type { Session, Turn } from "./session.js";
export type { EventPage, MessageOptions, MessageReply, SessionCalls, SessionInfo } from "./sessions.js";
export type { WorkspaceCalls, WorkspaceInfo } from "./workspaces.js";

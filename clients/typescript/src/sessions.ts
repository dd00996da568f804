/** Sessions by their ids: messages, events, status. Objects have the server's field names. */

import type { CallOptions, Oubliette } from "./client.js";
import type { SessionEvent, SessionStatus } from "./events.js";
import { followSession, type StreamOptions } from "./follow.js";
import type { CallerContext } from "./lend.js";

/** The arguments of `session_message` beside the text. */
export interface MessageOptions {
  /** An existing session; without it the message starts one. */
  session_id?: string;
  /** The agent's slug; default: the project's. */
  agent?: string;
  /** Default: the only project the token sees. */
  project_id?: string;
  workspace_id?: string;
  /** Whether the session gets a new workspace. */
  create_workspace?: boolean;
  context?: CallerContext;
  /** Whether the answer comes when the turn has ended, with its text; raise `timeoutMs` for long turns. */
  wait?: boolean;
}

/** The answer to a message. */
export interface MessageReply {
  session_id: string;
  /** The number of the turn the message began. */
  turn: number;
  status: SessionStatus;
  /** With `wait`: all of the turn's message text. */
  text?: string;
}

/** A session. */
export interface SessionInfo {
  session_id: string;
  project_id: string;
  agent: string;
  status: SessionStatus;
  parent_id?: string;
  depth: number;
  /** Ids of the approvals the session waits for. */
  pending_approvals?: string[];
  [field: string]: unknown;
}

/** A page of events. */
export interface EventPage {
  events: SessionEvent[];
  /** The index of the last event of the page, else the one asked for. */
  last_index: number;
  status: SessionStatus;
  children?: { session_id: string; events: SessionEvent[]; last_index: number }[];
}

/** Calls about sessions. */
export class SessionCalls {
  readonly #client: Oubliette;

  constructor(client: Oubliette) {
    this.#client = client;
  }

  /** Sends a message to a session, or starts one with it. */
  message(text: string, message: MessageOptions = {}, options?: CallOptions): Promise<MessageReply> {
    return this.#client.call("session_message", { ...message, message: text }, options);
  }

  get(sessionId: string, options?: CallOptions): Promise<SessionInfo> {
    return this.#client.call("session_get", { session_id: sessionId }, options);
  }

  /** One page of sessions; `next_cursor` is there when there are more. */
  list(
    filter: { project_id?: string; status?: SessionStatus; limit?: number; cursor?: string } = {},
    options?: CallOptions,
  ): Promise<{ sessions: SessionInfo[]; next_cursor?: string }> {
    return this.#client.call("session_list", filter, options);
  }

  /** One page of a session's log. `wait_ms` waits for the first event, at most 50 000. */
  events(
    sessionId: string,
    page: { since_index?: number; max_events?: number; wait_ms?: number; include_children?: boolean } = {},
    options?: CallOptions,
  ): Promise<EventPage> {
    return this.#client.call("session_events", { ...page, session_id: sessionId }, options);
  }

  /**
   * A session's events, each once and in order, replayed from the log and then live, across lost connections and
   * restarts of the server. Ends with the session; before that, leave the loop or abort `signal`.
   */
  async *follow(sessionId: string, options: StreamOptions = {}): AsyncGenerator<SessionEvent, void, void> {
    for await (const { event, isRepeat } of followSession(this.#client, sessionId, options)) {
      if (isRepeat) continue;
      yield event;
      if (event.type === "status" && event.status === "ended") return;
    }
  }

  /** Cancels the running turn. */
  cancel(sessionId: string, options?: CallOptions): Promise<{ session_id: string; turn: number; cancelled: boolean }> {
    return this.#client.call("session_cancel", { session_id: sessionId }, options);
  }

  /** Replaces the session's agent by another. */
  switchAgent(
    sessionId: string,
    agent: string,
    options?: CallOptions,
  ): Promise<{ session_id: string; agent: string; drained: boolean; took_ms: number }> {
    return this.#client.call("session_switch_agent", { session_id: sessionId, agent }, options);
  }

  end(sessionId: string, options?: CallOptions): Promise<SessionInfo> {
    return this.#client.call("session_end", { session_id: sessionId }, options);
  }
}

/** The declaration of lent functions, and the start of a session with them. */

import type { Oubliette } from "./client.js";
import type { SessionEvent } from "./events.js";
import type { FromSchema, ObjectSchema } from "./schema.js";
import { Session } from "./session.js";
import type { MessageOptions } from "./sessions.js";

/** How many requests run at once by default. */
const DEFAULT_CONCURRENCY = 256;

/** How functions are lent. */
export interface LendOptions {
  /** How many requests run at once, at least 1; default 256. Further ones wait. */
  concurrency?: number;
}

/** How one function is declared. */
export interface ToolDeclaration<Schema extends ObjectSchema = ObjectSchema> {
  /** What the tool does, for the model. */
  description?: string;
  /** The JSON Schema of the arguments, of type object; without one the arguments are any object. */
  inputSchema?: Schema;
}

/** What a function is told about its call, beside the arguments. */
export interface ToolCall {
  /** The request's id, unique in the server. */
  readonly requestId: string;
  /** Aborted when nobody waits for the result any more: the call was cancelled or timed out, or the session stopped. */
  readonly signal: AbortSignal;
}

/** A function an agent may call. Its result is sent as JSON; what it throws is the tool's error. */
export type ToolFunction<Arguments> = (args: Arguments, call: ToolCall) => unknown;

/** One lent function. */
export interface LentTool {
  readonly declaration: ToolDeclaration;
  readonly run: ToolFunction<any>;
}

/** The `context` argument of `session_message`: caller id and tool declarations. */
export interface CallerContext {
  caller_id: string;
  caller_tools: ({ name: string } & ToolDeclaration)[];
}

/** The functions a program lends to an agent, under one caller id. */
export class Lend {
  readonly client: Oubliette;
  readonly callerId: string;
  readonly concurrency: number;
  /** The functions by their names. */
  readonly tools: Map<string, LentTool> = new Map();
  /** The functions called for every event. */
  readonly listeners: ((event: SessionEvent) => void)[] = [];

  constructor(client: Oubliette, callerId: string, options: LendOptions = {}) {
    this.client = client;
    this.callerId = callerId;
    this.concurrency = Math.max(1, options.concurrency ?? DEFAULT_CONCURRENCY);
  }

  /**
   * Lends a function. The type of its arguments is inferred from `inputSchema`; the server checks them against it
   * before the function is called.
   */
  tool<const Schema extends ObjectSchema = { readonly type: "object" }>(
    name: string,
    declaration: ToolDeclaration<Schema>,
    run: ToolFunction<FromSchema<Schema>>,
  ): this {
    if (this.tools.has(name)) throw new TypeError(`${JSON.stringify(name)} is lent already`);
    this.tools.set(name, { declaration, run });
    return this;
  }

  /**
   * Calls a function for every event of the session, once and in order. What it throws is reported as an uncaught
   * error, as with the platform's event targets; the session is followed on.
   */
  onEvent(listener: (event: SessionEvent) => void): this {
    this.listeners.push(listener);
    return this;
  }

  /** Sends the message, which declares the tools, and answers requests for them until the session ends or `stop`. */
  start(message: string, options: MessageOptions = {}): Promise<Session> {
    return Session.start(this, message, options);
  }

  /** The `context` argument of `session_message`: caller id and tool declarations. */
  context(): CallerContext {
    const tools = [...this.tools].map(([name, { declaration }]) => ({ name, ...declaration }));
    return { caller_id: this.callerId, caller_tools: tools };
  }
}

/** The connection to the server: its address, the token, single calls and plain requests. */

import { ApprovalCalls } from "./approvals.js";
import { OublietteError, RefusedError, UnreachableError, errorText, type ErrorCode } from "./errors.js";
import { Lend, type LendOptions } from "./lend.js";
import { SessionCalls } from "./sessions.js";
import { WorkspaceCalls } from "./workspaces.js";

/** How a client sends its requests. */
export interface ClientOptions {
  /** How long a call may take, in milliseconds; default 60 000. */
  timeoutMs?: number;
  /** Replaces the platform's `fetch`, for example one that goes through a proxy. */
  fetch?: typeof fetch;
}

/** How one call is sent. */
export interface CallOptions {
  /** Ends the call; it then throws the signal's reason. */
  signal?: AbortSignal | undefined;
  /** How long the call may take, in milliseconds; default: the client's. */
  timeoutMs?: number | undefined;
}

/** Arguments of a server's tool: a JSON object with the server's field names. */
export type CallArguments = object;

const DEFAULT_TIMEOUT_MS = 60_000;

/** A client for one server, with one token. Nothing is sent before a call or a session starts. */
export class Oubliette {
  /** Sessions: messages, events, status. */
  readonly sessions: SessionCalls;
  /** Workspaces and their files. */
  readonly workspaces: WorkspaceCalls;
  /** Calls that wait for a person. */
  readonly approvals: ApprovalCalls;
  readonly #base: URL;
  readonly #headers: Readonly<Record<string, string>>;
  readonly #timeoutMs: number;
  readonly #fetch: typeof fetch;

  /** `address` is the server's, such as `http://127.0.0.1:8080`; `token` is one of its tokens. */
  constructor(address: string, token: string, options: ClientOptions = {}) {
    if (!/^https?:\/\//i.test(address)) {
      throw new TypeError("the address must start with http:// or https://");
    }
    this.#base = new URL(address);
    if (!this.#base.pathname.endsWith("/")) this.#base.pathname += "/";
    // Checked here, because the platform's error for a bad header would show the token.
    if (!/^[\x21-\x7e]*$/.test(token)) {
      throw new TypeError("the token holds characters a token cannot have");
    }
    this.#headers = { Authorization: `Bearer ${token}` };
    this.#timeoutMs = options.timeoutMs ?? DEFAULT_TIMEOUT_MS;
    // Not kept as a method: a browser's `fetch` refuses to be called on another object.
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init));
    this.sessions = new SessionCalls(this);
    this.workspaces = new WorkspaceCalls(this);
    this.approvals = new ApprovalCalls(this);
  }

  /** The server's address. */
  get address(): string {
    return this.#base.href;
  }

  /** Begins a declaration of functions under this caller id: the agent sees `<caller_id>_<tool>`. */
  lend(callerId: string, options: LendOptions = {}): Lend {
    return new Lend(this, callerId, options);
  }

  /** Calls one of the server's own tools (`session_message`, `project_list`, …) and returns its result object. */
  async call<Result = any>(tool: string, args: CallArguments = {}, options: CallOptions = {}): Promise<Result> {
    const init = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(args),
    };
    return (await this.requestJson(`api/tools/${encodeURIComponent(tool)}`, init, options)) as Result;
  }

  /** Sends a request and reads its answer as JSON. */
  async requestJson(path: string, init: RequestInit, options: CallOptions = {}): Promise<unknown> {
    const text = await this.request(path, init, options, (response) => response.text());
    try {
      return JSON.parse(text);
    } catch {
      throw new OublietteError("unexpected answer: it is not JSON");
    }
  }

  /**
   * Sends a request below the server's address and reads the answer with `read`, both within the timeout. A refusal
   * of the server is thrown as `RefusedError`.
   */
  async request<Body>(
    path: string,
    init: RequestInit,
    options: CallOptions,
    read: (response: Response) => Promise<Body> | Body,
  ): Promise<Body> {
    const attempt = new AbortController();
    const timeoutMs = options.timeoutMs ?? this.#timeoutMs;
    const timer = setTimeout(() => attempt.abort(), timeoutMs);
    const unlink = abortWith(attempt, options.signal);
    try {
      return await read(await this.open(path, { ...init, signal: attempt.signal }));
    } catch (why) {
      options.signal?.throwIfAborted();
      if (attempt.signal.aborted) throw new UnreachableError(`no answer within ${timeoutMs} ms`);
      throw why instanceof OublietteError ? why : unreachable(why);
    } finally {
      clearTimeout(timer);
      unlink();
    }
  }

  /**
   * Sends a request and returns its response once the server has accepted it; the body is not read yet. A request that
   * got no answer throws what the platform's `fetch` throws.
   */
  async open(path: string, init: RequestInit): Promise<Response> {
    const response = await this.#fetch(new URL(path, this.#base).href, {
      ...init,
      headers: { ...(init.headers as Record<string, string> | undefined), ...this.#headers },
      // The token says who asks; a cookie of the console in the same browser must not.
      credentials: "omit",
      cache: "no-store",
    });
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

/** The error that a response with an error status stands for. */
async function refusal(response: Response): Promise<OublietteError> {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text) as { error: { code: unknown; message: unknown } };
    if (typeof error.code === "string" && typeof error.message === "string") {
      return new RefusedError(error.code as ErrorCode, error.message);
    }
  } catch {
    // Without our error body it most likely comes from a proxy in between.
  }
  if (response.status >= 500) return new UnreachableError(`HTTP ${response.status}`);
  if (response.status === 401) return new RefusedError("unauthenticated", "the token is not valid");
  return new OublietteError(`unexpected answer: HTTP ${response.status}`);
}

/** The error for a request that got no answer. The innermost cause says what happened; the outer ones only that it did. */
export function unreachable(why: unknown): UnreachableError {
  let cause = why;
  while (cause instanceof Error && cause.cause instanceof Error) cause = cause.cause;
  return new UnreachableError(errorText(cause), { cause: why });
}

/** Aborts a controller when the signal is aborted; returns a function that ends this. */
export function abortWith(controller: AbortController, signal: AbortSignal | undefined): () => void {
  // Not `AbortSignal.any`: in some releases of Node 20 and 22 such a signal is lost to the garbage collector.
  const abort = (): void => controller.abort();
  if (signal?.aborted) abort();
  signal?.addEventListener("abort", abort, { once: true });
  return () => signal?.removeEventListener("abort", abort);
}

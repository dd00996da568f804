/** The program's handle on a session while its functions are lent. */

import { EndedError, OublietteError, RefusedError } from "./errors.js";
import type { CallerToolRequest, SessionEvent } from "./events.js";
import { followSession } from "./follow.js";
import type { Lend } from "./lend.js";
import { RequestHandler } from "./requests.js";
import type { MessageOptions, MessageReply } from "./sessions.js";

/** How many turns' outcomes are kept for `Session.turn` called after their end. */
const MAX_KEPT_TURNS = 64;
/** How many events are read at once when a session is joined. */
const LOG_PAGE_EVENTS = 1_000;

/** A completed turn. */
export interface Turn {
  /** Its number in the session, from 1. */
  readonly turn: number;
  /** Why it ended: `end_turn`, `cancelled`, `max_tokens`, … */
  readonly stop_reason: string;
  /** All text of the agent in this turn. */
  readonly text: string;
}

/** The state of an existing session's log at the moment a program joins it. */
interface JoinPoint {
  lastIndex: number;
  /** Requests without an answer yet, left by an earlier run of this program. */
  openRequests: CallerToolRequest[];
}

/** A session that may call this program's functions. `Lend.start` makes it. */
export class Session {
  /** The session's id. */
  readonly id: string;
  readonly #lend: Lend;
  readonly #requests: RequestHandler;
  readonly #stopped = new AbortController();
  readonly #turns = new Map<number, Turn | OublietteError>();
  #lastTurn: number;
  /** The error event of the running or last turn. */
  #turnError: OublietteError | undefined;
  /** Whether the turn with that error has ended. */
  #hasTurnFailed = false;
  /** Why the session ended, or why its stream cannot be read any more. */
  #endReason: unknown;
  #isWithdrawn = false;
  /** Whoever waits for a turn or the end; each is called after a change. */
  #waiting: (() => void)[] = [];

  private constructor(lend: Lend, reply: MessageReply, joined: JoinPoint) {
    this.#lend = lend;
    this.id = reply.session_id;
    this.#lastTurn = reply.turn;
    this.#requests = new RequestHandler(lend, this.id);
    for (const request of joined.openRequests) this.#requests.start(request);
    void this.#follow(joined.lastIndex);
  }

  /** Sends the first message and begins to follow the session. Programs call `Lend.start`. */
  static async start(lend: Lend, message: string, options: MessageOptions): Promise<Session> {
    const joined = options.session_id
      ? await readExistingLog(lend, options.session_id)
      : { lastIndex: -1, openRequests: [] };
    const reply = await lend.client.sessions.message(message, { ...options, context: lend.context() });
    return new Session(lend, reply, joined);
  }

  /** The number of the turn that the last message began. */
  get lastTurn(): number {
    return this.#lastTurn;
  }

  /**
   * Sends another message and returns the number of the turn it begins. It declares the functions again: a server
   * that was restarted has forgotten them.
   */
  async message(text: string, options: MessageOptions = {}): Promise<number> {
    // A failure known by now is not of the turn that this message begins.
    if (this.#hasTurnFailed && this.#turnError) this.#keepOutcome(this.#lastTurn, this.#turnError);
    const context = this.#isWithdrawn ? {} : { context: this.#lend.context() };
    const reply = await this.#lend.client.sessions.message(text, { ...context, ...options, session_id: this.id });
    this.#lastTurn = reply.turn;
    return reply.turn;
  }

  /** Sends another message and waits for its turn to end. */
  async ask(text: string, options: MessageOptions = {}): Promise<Turn> {
    return this.turn(await this.message(text, options));
  }

  /** Waits for a turn to end: the one with this number, or the one the last message began. Throws if it failed. */
  async turn(number?: number): Promise<Turn> {
    const wanted = number ?? this.#lastTurn;
    for (;;) {
      const outcome = this.#turns.get(wanted);
      if (outcome instanceof OublietteError) throw outcome;
      if (outcome) return outcome;
      if (this.#hasTurnFailed && this.#turnError) throw this.#turnError;
      if (this.#endReason !== undefined) throw this.#endReason;
      await this.#change();
    }
  }

  /** Waits until the session ends or is no longer followed, and returns the reason. Requests are answered meanwhile. */
  async ended(): Promise<unknown> {
    while (this.#endReason === undefined) await this.#change();
    return this.#endReason;
  }

  /** Sends a message that withdraws the functions. The session continues without them. */
  async withdraw(text: string, options: MessageOptions = {}): Promise<number> {
    this.#isWithdrawn = true;
    const context = { caller_id: this.#lend.callerId, caller_tools: [] };
    return this.message(text, { ...options, context });
  }

  /** Ends the session. */
  async end(): Promise<void> {
    await this.#lend.client.sessions.end(this.id);
  }

  /** Stops answering requests and following events; the session itself continues. */
  stop(): void {
    this.#requests.stop();
    this.#stopped.abort();
    this.#setEndReason(new EndedError("its stream is no longer followed"));
  }

  async #follow(since: number): Promise<void> {
    const options = { since, callerId: this.#lend.callerId, signal: this.#stopped.signal };
    try {
      for await (const { event, isRepeat } of followSession(this.#lend.client, this.id, options)) {
        // A repeated request is passed on too: the handler ignores those it has already seen.
        if (event.type === "caller_tool_request") this.#requests.start(event);
        if (!isRepeat) this.#record(event);
        if (this.#endReason !== undefined) break;
      }
    } catch (why) {
      this.#setEndReason(why);
    }
    this.#requests.stop();
  }

  /** Records what the program may wait for: completed turns, errors, the end. */
  #record(event: SessionEvent): void {
    for (const listener of this.#lend.listeners) report(() => listener(event));
    switch (event.type) {
      case "caller_tool_done":
        this.#requests.stopIfUnanswered(event);
        return;
      case "turn_completed":
        this.#keepOutcome(event.turn, { turn: event.turn, stop_reason: event.stop_reason, text: event.text });
        break;
      case "error":
        this.#turnError = new RefusedError(event.code, event.message);
        break;
      case "status":
        if (event.status === "running") this.#clearTurnError();
        if (event.status === "idle") this.#hasTurnFailed = this.#turnError !== undefined;
        if (event.status === "ended" || event.status === "failed") {
          this.#setEndReason(new EndedError(event.reason ?? event.status));
        }
        break;
      default:
        return;
    }
    this.#announceChange();
  }

  #keepOutcome(turn: number, outcome: Turn | OublietteError): void {
    this.#clearTurnError();
    this.#turns.set(turn, outcome);
    if (this.#turns.size > MAX_KEPT_TURNS) {
      const [oldest] = this.#turns.keys();
      if (oldest !== undefined) this.#turns.delete(oldest);
    }
  }

  #clearTurnError(): void {
    this.#turnError = undefined;
    this.#hasTurnFailed = false;
  }

  #setEndReason(why: unknown): void {
    this.#endReason ??= why;
    this.#announceChange();
  }

  #change(): Promise<void> {
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  #announceChange(): void {
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const resume of waiting) resume();
  }
}

/** Calls a function; what it throws is reported as an uncaught error, not thrown here. */
function report(run: () => void): void {
  try {
    run();
  } catch (why) {
    queueMicrotask(() => {
      throw why;
    });
  }
}

/** Reads an existing session's log to its end, so that requests answered earlier are not run again. */
async function readExistingLog(lend: Lend, sessionId: string): Promise<JoinPoint> {
  const open = new Map<string, CallerToolRequest>();
  let lastIndex = -1;
  for (;;) {
    const { events } = await lend.client.sessions.events(sessionId, {
      since_index: lastIndex,
      max_events: LOG_PAGE_EVENTS,
    });
    const last = events.at(-1);
    if (!last) return { lastIndex, openRequests: [...open.values()] };
    lastIndex = last.index;
    for (const event of events) {
      if (event.type === "caller_tool_request") open.set(event.request_id, event);
      if (event.type === "caller_tool_done") open.delete(event.request_id);
    }
  }
}

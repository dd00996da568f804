/** Runs the lent function for each request of the agent and sends its answer, once. */

import type { Oubliette } from "./client.js";
import { RefusedError, errorText, isTransient } from "./errors.js";
import type { CallerToolDone, CallerToolRequest } from "./events.js";
import { delay } from "./follow.js";
import type { Lend } from "./lend.js";

/** How many request ids are remembered, to recognise repeated requests. */
const MAX_REMEMBERED_IDS = 10_000;
/**
 * The waits between attempts to send an answer, in milliseconds: 40 s in total, within the minute after which the
 * server's default timeout ends the request.
 */
const RETRY_WAITS_MS = [50, 100, 300, 1_000, 3_000, 9_000, 27_000];

type Answer = { readonly result: unknown } | { readonly error: string };

/** Runs and answers the requests of one session. */
export class RequestHandler {
  readonly #lend: Lend;
  readonly #sessionId: string;
  readonly #slots: Slots;
  /** The requests seen, oldest first. */
  readonly #seen = new Map<string, AbortController>();

  constructor(lend: Lend, sessionId: string) {
    this.#lend = lend;
    this.#sessionId = sessionId;
    this.#slots = new Slots(lend.concurrency);
  }

  /** Starts the function for a request, unless the request is another caller's or has been seen before. */
  start(request: CallerToolRequest): void {
    const id = request.request_id;
    if (request.caller_id !== this.#lend.callerId || this.#seen.has(id)) return;
    const running = new AbortController();
    this.#seen.set(id, running);
    if (this.#seen.size > MAX_REMEMBERED_IDS) {
      const [oldest] = this.#seen.keys();
      if (oldest !== undefined) this.#seen.delete(oldest);
    }
    void this.#serve(request, running.signal);
  }

  /** Stops the function of a request that ended without an answer (cancelled, timed out): nobody waits for its result. */
  stopIfUnanswered(done: CallerToolDone): void {
    if (done.outcome !== "answered" && done.outcome !== "error") this.#seen.get(done.request_id)?.abort();
  }

  /** Stops all functions; their answers are not sent. */
  stop(): void {
    for (const running of this.#seen.values()) running.abort();
  }

  async #serve(request: CallerToolRequest, signal: AbortSignal): Promise<void> {
    await this.#slots.acquire();
    let answer: Answer | undefined;
    try {
      if (!signal.aborted) answer = await Promise.race([this.#run(request, signal), aborted(signal)]);
    } finally {
      this.#slots.release();
    }
    if (answer) await sendAnswer(this.#lend.client, this.#sessionId, request.request_id, answer, signal);
  }

  /** Runs the function; whatever it throws is the tool's error. */
  async #run(request: CallerToolRequest, signal: AbortSignal): Promise<Answer> {
    const tool = this.#lend.tools.get(request.tool);
    if (!tool) return { error: `this program lends no tool ${request.tool}` };
    try {
      const result = await tool.run(request.arguments ?? {}, { requestId: request.request_id, signal });
      // Throws for what JSON cannot carry, such as a cycle.
      if (result !== undefined && JSON.stringify(result) === undefined) {
        return { error: `the result is not JSON: a ${typeof result}` };
      }
      return { result: result ?? null };
    } catch (why) {
      return { error: errorText(why) };
    }
  }
}

/** Resolves to nothing when the signal is aborted. */
function aborted(signal: AbortSignal): Promise<undefined> {
  return new Promise((resolve) => {
    signal.addEventListener("abort", () => resolve(undefined), { once: true });
  });
}

/** Sends an answer, with retries, until the server accepts it or refuses it for good. */
async function sendAnswer(
  client: Oubliette,
  sessionId: string,
  requestId: string,
  answer: Answer,
  signal: AbortSignal,
): Promise<void> {
  for (const wait of RETRY_WAITS_MS) {
    try {
      await client.call("caller_tool_response", { session_id: sessionId, request_id: requestId, ...answer }, { signal });
      return;
    } catch (why) {
      if (signal.aborted) return;
      const isResultRefused =
        why instanceof RefusedError && (why.code === "invalid_argument" || why.code === "limit_exceeded");
      if (isResultRefused && "result" in answer) {
        // Too large or invalid: send that as the tool's error, so that the agent learns of it.
        answer = { error: `the answer was refused: ${why.reason}` };
      } else if (isTransient(why)) {
        await delay(wait, signal);
      } else {
        // Too late, or answered before: a retry would not change that.
        return;
      }
    }
  }
}

/** A counting semaphore: at most so many at once, the others wait in order. */
class Slots {
  readonly #waiting: (() => void)[] = [];

  constructor(private free: number) {}

  acquire(): Promise<void> {
    if (this.free > 0) {
      this.free -= 1;
      return Promise.resolve();
    }
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  release(): void {
    const next = this.#waiting.shift();
    if (next) next();
    else this.free += 1;
  }
}

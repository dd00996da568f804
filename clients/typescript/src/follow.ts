/** Reads a session's event stream, and reconnects after the last event seen. */

import { abortWith, unreachable, type Oubliette } from "./client.js";
import { OublietteError, UnreachableError, isTransient } from "./errors.js";
import { parseEvent, type SessionEvent } from "./events.js";
import { SseParser } from "./sse.js";

/** The first wait before reconnecting and the longest, in milliseconds; it doubles in between. */
const RECONNECT_WAIT_MS = { first: 50, longest: 5_000 } as const;
/** A stream without any bytes for this long, not even a keep-alive comment, is treated as broken. */
const SILENCE_TIMEOUT_MS = 75_000;

/** Which events are followed, and as whom. */
export interface StreamOptions {
  /** The stream begins after this index; default -1, before the first event. */
  since?: number | undefined;
  /** The caller that the stream marks as present. */
  callerId?: string | undefined;
  /** Ends the stream. */
  signal?: AbortSignal | undefined;
}

/** An event as it was delivered. Delivery is at least once: an index not above the last one is a repeat. */
export interface DeliveredEvent {
  event: SessionEvent;
  isRepeat: boolean;
}

/** Follows a session across lost connections, until `signal` is aborted or an error is final, which it throws. */
export async function* followSession(
  client: Oubliette,
  sessionId: string,
  options: StreamOptions,
): AsyncGenerator<DeliveredEvent, void, void> {
  let last = options.since ?? -1;
  let wait: number = RECONNECT_WAIT_MS.first;
  while (!options.signal?.aborted) {
    const before = last;
    try {
      for await (const event of readConnection(client, sessionId, { ...options, since: last })) {
        const isRepeat = event.index <= last;
        last = Math.max(last, event.index);
        yield { event, isRepeat };
      }
    } catch (why) {
      if (options.signal?.aborted) return;
      if (!isTransient(why)) throw why;
    }
    if (last > before) wait = RECONNECT_WAIT_MS.first;
    await delay(wait, options.signal);
    wait = Math.min(wait * 2, RECONNECT_WAIT_MS.longest);
  }
}

/** The events of one connection; throws when it breaks. */
async function* readConnection(
  client: Oubliette,
  sessionId: string,
  { since = -1, callerId, signal }: StreamOptions,
): AsyncGenerator<SessionEvent, void, void> {
  const query = new URLSearchParams({ since_index: String(since) });
  if (callerId !== undefined) query.set("caller_id", callerId);
  const headers: Record<string, string> = { Accept: "text/event-stream" };
  if (since >= 0) headers["Last-Event-ID"] = String(since);
  const connection = new AbortController();
  const silence = new Countdown(SILENCE_TIMEOUT_MS, () => connection.abort());
  const unlink = abortWith(connection, signal);
  try {
    const path = `api/sessions/${encodeURIComponent(sessionId)}/events?${query}`;
    const { body } = await client.open(path, { headers, signal: connection.signal });
    if (!body) throw new UnreachableError("the stream has no body");
    const reader = body.getReader();
    // The platform may have let go of the signal once the response was there; a cancelled reader ends in any case.
    connection.signal.addEventListener("abort", () => void reader.cancel().catch(() => {}));
    const parser = new SseParser();
    for (;;) {
      silence.restart();
      const { done, value } = await reader.read();
      if (done) throw new UnreachableError("the stream ended");
      for (const data of parser.push(value)) {
        const event = parseEvent(data);
        if (event) yield event;
      }
    }
  } catch (why) {
    if (silence.isOver) throw new UnreachableError("the stream fell silent");
    if (why instanceof RangeError) throw new OublietteError(why.message);
    throw why instanceof OublietteError ? why : unreachable(why);
  } finally {
    silence.stop();
    unlink();
    connection.abort();
  }
}

/** Calls a function once, if it is not restarted or stopped in time. */
class Countdown {
  isOver = false;
  #timer: ReturnType<typeof setTimeout>;

  constructor(
    private readonly milliseconds: number,
    private readonly whenOver: () => void,
  ) {
    this.#timer = this.#start();
  }

  restart(): void {
    this.stop();
    this.#timer = this.#start();
  }

  stop(): void {
    clearTimeout(this.#timer);
  }

  #start(): ReturnType<typeof setTimeout> {
    return setTimeout(() => {
      this.isOver = true;
      this.whenOver();
    }, this.milliseconds);
  }
}

/** Waits; an aborted signal ends the wait early. */
export function delay(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const finish = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", finish);
      resolve();
    };
    const timer = setTimeout(finish, milliseconds);
    signal?.addEventListener("abort", finish);
  });
}

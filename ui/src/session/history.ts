// Reads a log that may be long: its beginning and its end first, because the end is what a reader wants to see; what is between
// follows. A short log is read with one or two requests.
import { ApiError, sizedTool } from "../lib/api";

/** The most events in one request; the server's maximum. */
const MAX_PAGE_EVENTS = 1000;
/** Events in the first request. An event may have megabytes: how many make a page of the wanted size is known after it. */
const FIRST_PAGE_EVENTS = 64;
/** The wanted size of a page, in characters: what is parsed in a few milliseconds. */
const PAGE_CHARS = 500_000;
const RETRY_MS = 700;

/** Work that takes longer is done in slices of this many milliseconds, so that a click is answered in between. */
export const SLICE_MS = 8;

/** Lets the page answer to what a person does before more work is done. */
export const yieldToPage = (): Promise<void> => new Promise((done) => setTimeout(done));

/** The longest time for which reading in the background waits for a page that is busy, in milliseconds. */
const MAX_IDLE_WAIT_MS = 250;

/** Waits until the page has nothing better to do. */
export const whenIdle = (): Promise<void> =>
  "requestIdleCallback" in window ? new Promise((done) => requestIdleCallback(() => done(), { timeout: MAX_IDLE_WAIT_MS })) : yieldToPage();

interface LogPage<Event> {
  events: Event[];
  last_index: number;
  /** Whether there may be events after it. */
  more: boolean;
}

export class LogReader<Event extends { index: number }> {
  /** Events in the next request. */
  pageEvents = FIRST_PAGE_EVENTS;
  closed = false;
  readonly #tool: "session_events" | "debugger_events";
  readonly #session: string;

  constructor(tool: "session_events" | "debugger_events", session: string) {
    this.#tool = tool;
    this.#session = session;
  }

  /** One page after an index. Waits for a server that restarts or a login that has ended; `undefined`: there is no such log. */
  async page(since: number, most = this.pageEvents): Promise<LogPage<Event> | undefined> {
    const asked = { session_id: this.#session, since_index: since, max_events: most };
    while (!this.closed) {
      try {
        const { body, chars } = await sizedTool<Omit<LogPage<Event>, "more">>(this.#tool, asked);
        const found = body.events.length;
        if (found > 1) this.pageEvents = Math.max(1, Math.min(MAX_PAGE_EVENTS, Math.floor((PAGE_CHARS * found) / chars)));
        return { ...body, more: found >= most };
      } catch (error) {
        if (error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 401 && error.status !== 429) return undefined;
        await new Promise((done) => setTimeout(done, RETRY_MS));
      }
    }
    return undefined;
  }

  /** The beginning of the log: all of it if it is short. */
  async beginning(): Promise<LogPage<Event> | undefined> {
    const first = await this.page(-1);
    if (!first?.more) return first;
    const second = await this.page(first.last_index);
    return second && { ...second, events: first.events.concat(second.events) };
  }

  /** The last index of a log that has events after `known`; found with few small requests. */
  async lastIndex(known: number): Promise<number> {
    const isBeyond = async (index: number) => ((await this.page(index, 1))?.events.length ?? 0) > 0;
    let low = known;
    let step = MAX_PAGE_EVENTS;
    let high = known + step;
    while (!this.closed && (await isBeyond(high))) {
      step *= 4;
      [low, high] = [high, high + step];
    }
    while (!this.closed && high - low > 1) {
      const half = Math.floor((low + high) / 2);
      if (await isBeyond(half)) low = half;
      else high = half;
    }
    return high;
  }

  /** All events after `since` up to and including `to`. */
  async between(since: number, to: number): Promise<Event[]> {
    const found: Event[] = [];
    let last = since;
    while (last < to) {
      const page = await this.page(last, Math.min(this.pageEvents, to - last));
      if (!page?.events.length) break;
      for (const event of page.events) if (event.index <= to) found.push(event);
      last = page.last_index;
    }
    return found;
  }
}

// What is known of one session: its events as rows of the timeline and the debugger's events. A long session is opened at its
// end; earlier events follow in the background. New ones are taken in once per animation frame.
import { tick } from "svelte";
import { follow, type Stream } from "../lib/api";
import { CallTimes } from "../lib/call_times";
import { addEvent, type TimelineRow } from "../lib/timeline";
import type { DebugEvent, SessionEvent } from "../lib/types";
import { LogReader, SLICE_MS, whenIdle, yieldToPage } from "./history";

/** Events of the debugger that are kept; earlier ones are on the command line. */
const MAX_DEBUG_EVENTS = 20_000;
/** The longest time for which new events wait when showing them takes long, in milliseconds. */
const MAX_DELAY_MS = 300;
/** With many events, the debugger's are shown this often, in milliseconds: whoever reads them does not read 60 states a second. */
const DEBUG_EVERY_MS = 250;
const MANY_DEBUG_EVENTS = 2_000;
/** Kinds of which there may be thousands; the others are steps of the session itself. */
const FREQUENT_KINDS = new Set(["tool_call", "tool_blocked", "model_request", "approval_requested", "approval_decided"]);

interface LogHandlers {
  /** Called with every event that arrives while the session is open, not with those that were there before. */
  event: (event: SessionEvent) => void;
  /** Whether the stream is connected. */
  state: (live: boolean) => void;
}

export class SessionLog {
  rows = $state.raw<TimelineRow[]>([]);
  /** Index of the first event in `rows`; earlier ones are still being read. */
  first = $state(0);
  /** The session's state by its last event that says so, and why; empty: not known yet. */
  status = $state("");
  reason = $state("");
  debug = $state.raw<DebugEvent[]>([]);
  /** The debugger's events about the session itself: builds, switches, health. */
  steps = $state.raw<DebugEvent[]>([]);
  /** Where each called tool is from, by its names. */
  sources = $state.raw<ReadonlyMap<string, string>>(new Map());
  readonly #callTimes = new CallTimes();

  readonly #events: LogReader<SessionEvent>;
  readonly #debugEvents: LogReader<DebugEvent>;
  readonly #streams: Stream[] = [];
  readonly #id: string;
  readonly #handlers: LogHandlers;
  #closed = false;

  /** The events in `rows`, and those that wait to be shown. */
  #known: SessionEvent[] = [];
  #waiting: SessionEvent[] = [];
  #debugHead: DebugEvent[] = [];
  #debugTail: DebugEvent[] = [];
  #waitingDebug: DebugEvent[] = [];
  #debugShownAt = 0;
  #frame = 0;
  #delay: ReturnType<typeof setTimeout> | undefined;
  #debugDelay: ReturnType<typeof setTimeout> | undefined;
  /** How long the last update took, in milliseconds. */
  #cost = 0;
  readonly #sources = new Map<string, string>();

  constructor(id: string, handlers: LogHandlers) {
    this.#id = id;
    this.#handlers = handlers;
    this.#events = new LogReader("session_events", id);
    this.#debugEvents = new LogReader("debugger_events", id);
    void this.#open();
  }

  /** How long a call took, as the gate measured it; undefined if that is not known, or not yet. */
  durationOf(row: TimelineRow): number | undefined {
    // What the gate has told since may tell it.
    void this.debug;
    return row.took === undefined ? undefined : this.#callTimes.durationOf(row.event, Date.parse(row.event.ts) + row.took);
  }

  close(): void {
    this.#closed = true;
    this.#events.closed = this.#debugEvents.closed = true;
    for (const stream of this.#streams) stream.close();
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#delay);
    clearTimeout(this.#debugDelay);
  }

  async #open(): Promise<void> {
    const page = await this.#events.beginning();
    if (!page || this.#closed) return;
    const last = page.more ? await this.#events.lastIndex(page.last_index) : page.last_index;
    const from = Math.max(page.last_index, last - this.#events.pageEvents);
    const tail = await this.#events.between(from, last);
    if (this.#closed) return;
    if (from === page.last_index) this.#show(page.events.concat(tail), 0);
    else this.#show(tail, from + 1);
    this.#streams.push(
      follow<SessionEvent>(`/api/sessions/${encodeURIComponent(this.#id)}/events`, last, {
        event: (event) => {
          this.#waiting.push(event);
          this.#handlers.event(event);
          this.#soon();
        },
        state: this.#handlers.state,
      }),
    );
    void this.#openDebug();
    if (from > page.last_index) await this.#readEarlier(page.events, page.last_index, from);
  }

  /** Shows the events of a session that is being opened. */
  #show(events: SessionEvent[], first: number): void {
    const rows: TimelineRow[] = [];
    for (const event of events) {
      addEvent(rows, event);
      this.#noteStatus(event);
    }
    this.#known = events;
    this.rows = rows;
    this.first = first;
  }

  #noteStatus(event: SessionEvent): void {
    if (event.type !== "status") return;
    this.status = String(event["status"]);
    this.reason = String(event["reason"] ?? "");
  }

  /**
   * Reads the events between the beginning and the end. Rows are made anew from all events whenever these have doubled:
   * what came earlier may change later rows (a result belongs to its call), and so all of it is done at most twice.
   */
  async #readEarlier(beginning: SessionEvent[], beginsAt: number, endsBefore: number): Promise<void> {
    let missing = endsBefore;
    let chunks: SessionEvent[][] = [];
    let collected = 0;
    while (missing > beginsAt && !this.#closed) {
      const since = Math.max(beginsAt, missing - this.#events.pageEvents);
      const chunk = await this.#events.between(since, missing);
      if (this.#closed) return;
      chunks.unshift(chunk);
      collected += chunk.length;
      missing = since;
      if (missing <= beginsAt) {
        chunks.unshift(beginning);
        missing = -1;
      }
      if (missing < 0 || collected >= this.#known.length) {
        await this.#prepend(chunks, missing + 1);
        chunks = [];
        collected = 0;
      }
      await whenIdle();
    }
  }

  /** Puts earlier events before those that are known. */
  async #prepend(chunks: SessionEvent[][], first: number): Promise<void> {
    const earlier = chunks.flat();
    const rows: TimelineRow[] = [];
    let until = performance.now() + SLICE_MS;
    let done = 0;
    // Events that arrive meanwhile are added to `#known`, so its length is asked for each time.
    const at = (i: number) => (i < earlier.length ? earlier[i]! : this.#known[i - earlier.length]!);
    while (done < earlier.length + this.#known.length) {
      addEvent(rows, at(done++));
      if (done % 64 || performance.now() < until) continue;
      await yieldToPage();
      if (this.#closed) return;
      until = performance.now() + SLICE_MS;
    }
    this.#known = earlier.concat(this.#known);
    this.rows = rows;
    this.first = first;
  }

  /** Reads the debugger's events: the beginning, then the end, then what is between, the latest first. */
  async #openDebug(): Promise<void> {
    const reader = this.#debugEvents;
    const page = await reader.beginning();
    if (!page || this.#closed) return;
    this.#debugHead = page.events;
    this.#note(page.events);
    this.#showDebug();
    const last = page.more ? await reader.lastIndex(page.last_index) : page.last_index;
    if (this.#closed) return;
    this.#streams.push(
      follow<DebugEvent>(`/api/debugger?session_id=${encodeURIComponent(this.#id)}`, last, {
        event: (event) => {
          this.#waitingDebug.push(event);
          this.#soon();
        },
        state: () => {},
      }),
    );
    // The index counts over the whole server: how many events of this session are in a part of it is not known before.
    let width = reader.pageEvents;
    for (let to = last; to > page.last_index && this.#debugTail.length < MAX_DEBUG_EVENTS && !this.#closed; ) {
      const since = Math.max(page.last_index, to - width);
      const chunk = await reader.between(since, to);
      if (this.#closed) return;
      this.#note(chunk);
      this.#debugTail = chunk.concat(this.#debugTail);
      if (chunk.length < reader.pageEvents / 4) width *= 4;
      to = since;
      this.#showDebug();
      await whenIdle();
    }
  }

  /** Takes what the views need to know of the debugger's events without going through all of them. */
  #note(events: DebugEvent[]): void {
    const steps: DebugEvent[] = [];
    let named = false;
    this.#callTimes.add(events);
    for (const event of events) {
      if (!FREQUENT_KINDS.has(event.kind)) steps.push(event);
      if (event.kind !== "tool_call" && event.kind !== "tool_registered") continue;
      const source = event.kind === "tool_call" ? String(event["source"]) : "catalog";
      for (const name of [event["tool"], event["canonical"]]) {
        if (this.#sources.get(String(name)) === source) continue;
        this.#sources.set(String(name), source);
        named = true;
      }
    }
    if (named) this.sources = new Map(this.#sources);
    if (steps.length) this.steps = [...this.steps, ...steps].sort((a, b) => a.index - b.index);
  }

  #showDebug(): void {
    this.debug = [...this.#debugHead, ...this.#debugTail].slice(-MAX_DEBUG_EVENTS);
    this.#debugShownAt = performance.now();
  }

  /** Shows what has arrived in the next frame; less often when that takes long, so that at most a quarter of the time goes into it. */
  #soon(): void {
    if (this.#frame || this.#delay) return;
    // A hidden page has no frames.
    if (document.hidden) this.#delay = setTimeout(() => this.#flush(), MAX_DELAY_MS);
    else if (this.#cost < 8) this.#frame = requestAnimationFrame(() => this.#flush());
    else this.#delay = setTimeout(() => (this.#frame = requestAnimationFrame(() => this.#flush())), Math.min(MAX_DELAY_MS, this.#cost * 3));
  }

  #flush(): void {
    this.#frame = 0;
    this.#delay = undefined;
    if (this.#closed) return;
    const begun = performance.now();
    void tick().then(() => (this.#cost = performance.now() - begun));
    if (this.#waiting.length) {
      const rows = this.rows.slice();
      for (const event of this.#waiting) {
        addEvent(rows, event);
        this.#noteStatus(event);
        this.#known.push(event);
      }
      this.#waiting = [];
      this.rows = rows;
    }
    if (!this.#waitingDebug.length) return;
    const wait = this.debug.length < MANY_DEBUG_EVENTS ? 0 : this.#debugShownAt + DEBUG_EVERY_MS - begun;
    if (wait > 0) {
      this.#debugDelay ??= setTimeout(() => ((this.#debugDelay = undefined), this.#soon()), wait);
      return;
    }
    this.#note(this.#waitingDebug);
    this.#debugTail = this.#debugTail.concat(this.#waitingDebug).slice(-MAX_DEBUG_EVENTS);
    this.#waitingDebug = [];
    this.#showDebug();
  }
}

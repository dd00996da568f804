// A session whose events are made here: as many as wanted, and streamed as fast as wanted, whatever the speed of the server and its
// agents. A proxy in front of a real server answers for this one session; everything else is the server's.
import { createServer, request } from "node:http";
import { readFileSync } from "node:fs";
import { join } from "node:path";

/** How often streamed events are sent, in milliseconds. */
const TICK_MS = 20;
const STARTED = Date.parse("2026-01-01T00:00:00Z");

/** One turn: a message, steps of text with calls and their results, its end. */
export function* turnEvents(turn, steps) {
  yield { type: "message", role: "user", text: `Go on, ${turn}` };
  yield { type: "status", status: "running" };
  for (let step = 0; step < steps; step++) {
    const text = `Step ${step} of turn ${turn}: look at \`src/lib.rs\`, then **decide** what comes next.`;
    for (let at = 0; at < text.length; at += 24) yield { type: "delta", text: text.slice(at, at + 24) };
    yield { type: "message", role: "assistant", text };
    for (let call = 0; call < 4; call++) {
      const tool_call_id = `${turn}-${step}-${call}`;
      yield { type: "tool_call", tool_call_id, tool: "files_read", arguments: { path: `src/part_${call}.rs`, lines: 40 } };
      yield { type: "tool_result", tool_call_id, ok: call !== 3, result: { content: [{ type: "text", text: `fn part_${call}() {}\n`.repeat(10) }] } };
    }
  }
  yield { type: "turn_completed", turn, stop_reason: "end_turn", text: "" };
  yield { type: "status", status: "idle" };
}

function send(followers, event) {
  for (const follower of followers) follower.write(`id: ${event.index}\ndata: ${JSON.stringify(event)}\n\n`);
}

export class SyntheticSession {
  /** Answers for `session` of `server`, beginning with about this many events. `dist`: the console's files, if not the server's own. */
  static async start(server, session, { events, dist }) {
    const made = new SyntheticSession();
    Object.assign(made, { upstream: server, session, dist, turn: 0, events: [], followers: new Set(), debug: [], debugFollowers: new Set() });
    while (made.events.length < events) made.add(turnEvents(++made.turn, 150));
    made.http = createServer((ask, answer) => made.answer(ask, answer));
    await new Promise((done) => made.http.listen(0, "127.0.0.1", done));
    made.url = `http://127.0.0.1:${made.http.address().port}`;
    return made;
  }

  close() {
    clearInterval(this.timer);
    this.http.closeAllConnections();
    return new Promise((done) => this.http.close(done));
  }

  add(list) {
    for (const event of list) this.append(event);
  }

  /** Appends an event, and to the debugger's log what the gate would have said about it. */
  append(event) {
    const at = (index) => new Date(STARTED + index * 10).toISOString();
    const index = this.events.length;
    const placed = { index, ts: at(index), session_id: this.session, ...event };
    this.events.push(placed);
    send(this.followers, placed);
    if (event.type !== "tool_result") return;
    const call = { kind: "tool_call", tool: "files_read", canonical: "@files/read", source: "catalog", agent: "long", turn: this.turn, ok: event.ok, arguments: { path: "src/part.rs" }, duration_ms: 7, started: at(index - 1), result: event.result };
    const told = { index: this.debug.length, ts: at(index), session_id: this.session, ...call };
    this.debug.push(told);
    send(this.debugFollowers, told);
  }

  /** Streams this many events a second, turn after turn, until it is told to stop. */
  stream(perSecond) {
    let next = turnEvents(++this.turn, 150);
    const begun = Date.now();
    let sent = 0;
    this.timer = setInterval(() => {
      const due = Math.floor(((Date.now() - begun) / 1000) * perSecond) - sent;
      for (let i = 0; i < due; i++) {
        let one = next.next();
        if (one.done) [next, one] = [turnEvents(++this.turn, 150), undefined];
        one ??= next.next();
        this.append(one.value);
      }
      sent += due;
    }, TICK_MS);
    return () => clearInterval(this.timer);
  }

  answer(ask, answer) {
    const url = new URL(ask.url, this.url);
    const since = Number(url.searchParams.get("since_index"));
    if (url.pathname === `/api/sessions/${this.session}/events`) return this.follow(this.events, this.followers, since, answer);
    if (url.pathname === "/api/debugger" && url.searchParams.get("session_id") === this.session) return this.follow(this.debug, this.debugFollowers, since, answer);
    if (this.dist && (url.pathname === "/" || url.pathname.startsWith("/assets/"))) return this.file(url.pathname, answer);
    const parts = [];
    ask.on("data", (part) => parts.push(part));
    ask.on("end", () => {
      const body = Buffer.concat(parts);
      const log = { "/api/tools/session_events": this.events, "/api/tools/debugger_events": this.debug }[url.pathname];
      const asked = log ? JSON.parse(body) : {};
      if (asked.session_id !== this.session) return this.forward(ask, body, answer);
      const { since_index: since, max_events: most } = asked;
      const events = log.slice(since + 1, since + 1 + most);
      answer.setHeader("content-type", "application/json");
      answer.end(JSON.stringify({ events, last_index: events.at(-1)?.index ?? since, status: "idle" }));
    });
  }

  follow(log, followers, since, answer) {
    answer.writeHead(200, { "content-type": "text/event-stream" });
    answer.write(": here\n\n");
    for (const event of log.slice(since + 1)) send([answer], event);
    followers.add(answer);
    answer.on("close", () => followers.delete(answer));
  }

  file(path, answer) {
    const kind = { js: "text/javascript", css: "text/css", svg: "image/svg+xml" }[path.split(".").pop()] ?? "text/html";
    answer.setHeader("content-type", kind);
    answer.end(readFileSync(join(this.dist, path === "/" ? "index.html" : path)));
  }

  forward(ask, body, answer) {
    const to = new URL(this.upstream.url);
    const headers = { ...ask.headers, host: to.host, ...(ask.headers.origin ? { origin: to.origin } : {}) };
    const out = request({ host: to.hostname, port: to.port, method: ask.method, path: ask.url, headers }, (got) => {
      answer.writeHead(got.statusCode, got.headers);
      got.pipe(answer);
    });
    out.on("error", () => answer.destroy());
    answer.on("close", () => out.destroy());
    out.end(body);
  }
}

/** A clock of a page's main thread: milliseconds that it computed, whatever else the machine does. */
export async function cpuClock(page) {
  const session = await page.context().newCDPSession(page);
  await session.send("Performance.enable", { timeDomain: "threadTicks" });
  return async () => {
    const { metrics } = await session.send("Performance.getMetrics");
    return Math.round(metrics.find((m) => m.name === "TaskDuration").value * 1000);
  };
}

/** How much taller than the page the browser's window is made, in pixels: more than its own bars take. */
const ROOM_FOR_BARS = 200;

/**
 * Makes the window taller than the page. Chromium counts its own bars as part of a window that was asked for with the page's size, so
 * the lower edge of the page is outside; what is drawn there is never presented, and an interaction there seems to last until
 * something else on the page is drawn.
 */
export async function showWholePage(page) {
  const session = await page.context().newCDPSession(page);
  const { windowId, bounds } = await session.send("Browser.getWindowForTarget");
  await session.send("Browser.setWindowBounds", { windowId, bounds: { width: bounds.width, height: bounds.height + ROOM_FOR_BARS } });
}

/** Does something, and counts how many elements were styled anew and how many objects laid out for it, at the most in one pass. */
export async function stylingAndLayout(page, run) {
  const session = await page.context().browser().newBrowserCDPSession();
  const events = [];
  session.on("Tracing.dataCollected", ({ value }) => events.push(...value));
  await session.send("Tracing.start", { transferMode: "ReportEvents", traceConfig: { includedCategories: ["devtools.timeline"] } });
  await run();
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  const ended = new Promise((done) => session.once("Tracing.tracingComplete", done));
  await session.send("Tracing.end");
  await ended;
  await session.detach();
  const most = (name, count) => Math.max(0, ...events.filter((e) => e.name === name && e.ph === "X").map((e) => count(e.args) ?? 0));
  return {
    styled: most("UpdateLayoutTree", (args) => args.elementCount),
    laidOut: most("Layout", (args) => args.beginData?.dirtyObjects),
    passes: events.filter((e) => e.name === "Layout").length,
  };
}

// How fast the console is, printed as JSON: `node tests/node/measure-console.mjs`. The goals are in ui/DESIGN.md. Times in
// `interaction_ms` are what a person waits, and worth nothing on a machine that is busy with something else; `cpu_ms` is what the
// page's main thread did meanwhile, by its own clock, and says what the console costs on any machine. The session's events are
// made by synthetic-session.mjs, so that neither the server nor an agent sets the pace. `bare_field` is what the same keys take on a page that
// has nothing but a field at its lower edge: the browser's and the machine's own share. `over_goal` names what took longer than the goal.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { Bench, id, row } from "./console-browser.mjs";
import { ROOT } from "./harness.mjs";
import { SyntheticSession, cpuClock, showWholePage } from "./synthetic-session.mjs";

const EVENTS = Number(process.env.OUBLIETTE_MEASURE_EVENTS ?? 50_000);
const PER_SECOND = Number(process.env.OUBLIETTE_MEASURE_RATE ?? 500);
const DIST = join(ROOT, "ui/dist");
/** The longest that a person may wait from an interaction to the next paint, in milliseconds. */
const GOAL_MS = 200;
const TYPED = "typed while it is long";

/** Longest time from an interaction to the next paint, in milliseconds, since it was last asked for. */
const noteInteractions = () => {
  window.longest = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((e) => (window.longest = Math.max(window.longest, e.duration)))).observe({ type: "event", durationThreshold: 16, buffered: true });
};
const longest = (p) => p.evaluate(async () => {
  for (let i = 0; i < 5; i++) await new Promise(requestAnimationFrame);
  // The browser reports an interaction some time after its paint; without this it would count as part of the next one.
  await new Promise((done) => setTimeout(done, 500));
  const found = window.longest;
  window.longest = 0;
  return Math.round(found);
});

const figures = {};
const size = (file) => gzipSync(readFileSync(join(DIST, file))).length;
const html = readFileSync(join(DIST, "index.html"), "utf8");
const first = ["index.html", ...[...html.matchAll(/(?:src|href)="\/([^"]+)"/g)].map((m) => m[1])];
figures.first_page_bytes = first.reduce((sum, file) => sum + size(file), 0);
figures.all_bytes = [...new Set([...first, ...readdirSync(join(DIST, "assets")).map((file) => `assets/${file}`)])].reduce((sum, file) => sum + size(file), 0);

const bench = await Bench.start();
let synthetic;
try {
  await bench.api("project_create", { name: "Measured" });
  await bench.server.putAgent("long", bench.admin, [[{ say: "hi" }]], { name: "Long" });
  const session = (await bench.api("session_message", { message: "Go", agent: "long", wait: true })).session_id;
  synthetic = await SyntheticSession.start(bench.server, session, { events: EVENTS, dist: DIST });

  // First paint with a cold cache and a processor that is four times slower.
  const cold = await bench.browser.newPage();
  const throttle = await cold.context().newCDPSession(cold);
  await throttle.send("Emulation.setCPUThrottlingRate", { rate: 4 });
  await cold.goto(bench.server.url);
  await cold.waitForSelector(id("login-token"));
  figures.first_paint_ms_at_4x = Math.round(await cold.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? -1));
  await cold.close();

  const bare = await bench.browser.newPage({ viewport: { width: 1400, height: 900 } });
  await showWholePage(bare);
  await bare.setContent('<textarea style="position: fixed; bottom: 0"></textarea>');
  await bare.evaluate(noteInteractions);
  await bare.locator("textarea").pressSequentially(TYPED);
  figures.bare_field = { interaction_ms: await longest(bare) };
  await bare.close();

  const p = await bench.browser.newPage({ viewport: { width: 1400, height: 900 } });
  p.setDefaultTimeout(120_000);
  await showWholePage(p);
  await p.goto(`${synthetic.url}/#/sessions`);
  await bench.login(p);
  await p.evaluate(noteInteractions);
  const cpu = await cpuClock(p);
  /** Does something; what a person waited for it, and what it cost. */
  const measured = async (run) => {
    await longest(p);
    const before = await cpu();
    await run();
    const interaction_ms = await longest(p);
    return { interaction_ms, cpu_ms: (await cpu()) - before };
  };
  const begun = Date.now();
  figures.open = await measured(async () => {
    await p.evaluate((session) => (location.hash = `/sessions/${session}`), session);
    await p.waitForSelector(row("turn_completed"));
  });
  figures.open.ms = Date.now() - begun;
  figures.read_all = await measured(() => p.locator(id("reading-earlier")).waitFor({ state: "detached" }));
  figures.rows = Number(await p.getAttribute(id("timeline"), "data-rows"));
  figures.rows_on_page = await p.locator(id("timeline")).evaluate((box) => box.childElementCount);

  const use = async () => {
    const found = {};
    found.typing = await measured(() => p.locator(id("composer")).pressSequentially(TYPED));
    // Rows that stream in move: whichever is there is opened.
    const box = await p.locator(id("timeline")).boundingBox();
    found.opening_a_row = await measured(() => p.mouse.click(box.x + box.width / 2, box.y + box.height - 90));
    await p.mouse.move(400, 400);
    found.scrolling = await measured(async () => {
      for (let i = 0; i < 20; i++) await p.mouse.wheel(0, -600);
    });
    const outline = p.getByRole("button", { name: "Outline" });
    found.outline = await measured(() => outline.click());
    const field = p.getByLabel("Find in this session");
    found.searching = await measured(() => field.pressSequentially("step 42"));
    await p.locator(id("found")).waitFor();
    await field.fill("");
    const fold = p.getByRole("button", { name: "Fold calls" });
    found.folding = await measured(() => fold.click());
    await fold.click();
    found.debugger = await measured(() => p.click(id("debugger-toggle")));
    await p.waitForSelector(id("debugger-row"));
    found.debugger_filter = await measured(() => p.getByLabel("Filter by text").pressSequentially("part_2"));
    await p.getByLabel("Filter by text").fill("");
    await p.click(id("debugger-toggle"));
    await outline.click();
    await p.fill(id("composer"), "");
    const newest = p.getByRole("button", { name: "Newest" });
    if (await newest.count()) await newest.click();
    return found;
  };
  figures.still = await use();
  const stop = synthetic.stream(PER_SECOND);
  const [from, since] = [Date.now(), synthetic.events.length];
  const watched = await measured(() => p.waitForFunction((count) => Number(document.querySelector("[data-testid=timeline]").dataset.rows) >= count, figures.rows + 2000));
  figures.streaming = { events_a_second: Math.round(((synthetic.events.length - since) / (Date.now() - from)) * 1000), main_thread_busy: Number((watched.cpu_ms / (Date.now() - from)).toFixed(2)), ...(await use()) };
  stop();
  const slow = (group, found) => Object.entries(found).filter(([, figure]) => figure?.interaction_ms > GOAL_MS).map(([name]) => `${group}${name}`);
  figures.over_goal = [...slow("", figures), ...slow("still.", figures.still), ...slow("streaming.", figures.streaming)];
} finally {
  await synthetic?.close();
  await bench.close();
}
console.log(JSON.stringify(figures, null, 2));

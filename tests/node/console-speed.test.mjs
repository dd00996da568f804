// What the console costs with fifty thousand events, and while five hundred a second stream in. Measured by the clock of the
// page's main thread, which stands still while other programs have the processor; what a person waits is measured by
// measure-console.mjs on a machine that does nothing else.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, id, row } from "./console-browser.mjs";
import { DEADLINE } from "./harness.mjs";
import { SyntheticSession, cpuClock, stylingAndLayout } from "./synthetic-session.mjs";

const EVENTS = 50_000;
const PER_SECOND = 500;
const STREAMED = 3_000;
/** The most that one interaction may compute, in milliseconds: what a person does not notice as waiting. */
const MAX_INTERACTION_MS = 200;
/** The most elements that typing may style or lay out anew; the page has about five hundred. */
const MAX_TOUCHED = 60;

let bench, synthetic, session;
before(async () => {
  bench = await Bench.start();
  await bench.api("project_create", { name: "Long" });
  await bench.server.putAgent("long", bench.admin, [[{ say: "hi" }]]);
  session = (await bench.api("session_message", { message: "Go", agent: "long", wait: true })).session_id;
  synthetic = await SyntheticSession.start(bench.server, session, { events: EVENTS, dist: process.env.OUBLIETTE_CONSOLE_DIST });
});
after(async () => {
  await synthetic?.close();
  await bench?.close();
});

test("fifty thousand events, and five hundred a second, leave the page time to answer", async (t) => {
  const context = await bench.browser.newContext({ viewport: { width: 1400, height: 900 } });
  t.after(() => context.close());
  context.setDefaultTimeout(DEADLINE);
  const p = await context.newPage();
  await p.goto(`${synthetic.url}/#/sessions/${session}`);
  await bench.login(p);
  await p.waitForSelector(row("turn_completed"));
  await p.locator(id("reading-earlier")).waitFor({ state: "detached" });
  const cpu = await cpuClock(p);
  const rows = async () => Number(await p.getAttribute(id("timeline"), "data-rows"));
  const known = await rows();
  assert.ok(known > EVENTS / 2, `${known} rows`);

  /** What an interaction and the two frames after it compute. */
  const cost = async (what, run) => {
    const begun = await cpu();
    await run();
    await p.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    const spent = (await cpu()) - begun;
    assert.ok(spent < MAX_INTERACTION_MS, `${what} computes for ${spent} ms`);
  };
  // Typing changes the field and nothing around it. Counted, since a time would say as much about the machine.
  const touches = async (what, run) => {
    const { styled, laidOut } = await stylingAndLayout(p, run);
    assert.ok(styled < MAX_TOUCHED && laidOut < MAX_TOUCHED, `${what} styles ${styled} elements and lays out ${laidOut}`);
  };
  await touches("the focus", () => p.locator(id("composer")).focus());
  await touches("the first key", () => p.keyboard.press("x"));
  await touches("a new line", () => p.keyboard.press("Shift+Enter"));
  await touches("a longer text", () => p.keyboard.insertText("pasted\n".repeat(20)));
  await p.fill(id("composer"), "");
  await p.locator(id("composer")).focus();
  await cost("a key", () => p.keyboard.press("x"));
  await cost("opening a row", () => p.locator(`${row("tool_call")} summary`).last().click());
  await cost("the outline", () => p.getByRole("button", { name: "Outline" }).click());
  await p.locator(id("outline")).waitFor();
  await cost("folding", () => p.getByRole("button", { name: "Fold calls" }).click());
  await p.getByRole("button", { name: "Fold calls" }).click();
  await cost("the debugger", () => p.click(id("debugger-toggle")));
  await p.waitForSelector(id("debugger-row"));
  await cost("a letter of the debugger's filter", () => p.getByLabel("Filter by text").press("p"));
  await p.getByLabel("Filter by text").fill("");
  await p.click(id("debugger-toggle"));

  const [begun, since] = [await cpu(), synthetic.events.length];
  const stop = synthetic.stream(PER_SECOND);
  // The last event that was streamed is shown, so all before it were taken in.
  await p.waitForFunction((wanted) => Number(document.querySelector("[data-testid=timeline]").dataset.rows) >= wanted, known + STREAMED / 2);
  stop();
  const [spent, streamed] = [(await cpu()) - begun, synthetic.events.length - since];
  // At this pace half of the main thread's time is left, at the least.
  assert.ok(spent < (streamed / PER_SECOND) * 500, `${streamed} events compute for ${spent} ms`);
  const shown = await p.locator(id("timeline")).evaluate((box) => box.childElementCount);
  assert.ok(shown < 250, `${shown} rows are on the page`);
  // What was typed is there.
  assert.equal(await p.inputValue(id("composer")), "x");
});

// The book, as the server serves it: reached from the console, read and searched in a real browser under the strict
// policy. `Bench.page` fails a test in which anything was refused by the policy or loaded from elsewhere.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, id } from "./console-browser.mjs";

let bench;
before(async () => {
  bench = await Bench.start();
});
after(() => bench?.close());

test("the book is one click away", async (t) => {
  const page = await bench.loggedIn(t);
  const [book] = await Promise.all([page.context().waitForEvent("page"), page.click(id("docs-link"))]);
  await book.waitForSelector("h1");
  if (!(await book.$("nav"))) {
    t.skip("the book was not built (cargo xtask docs)");
    return;
  }
  assert.equal(new URL(book.url()).pathname, "/docs/");
  await book.click("nav >> text=oubliette.toml");
  await book.waitForSelector("nav a[aria-current=page] >> text=oubliette.toml");
  await book.fill("#search", "idle_sleep");
  await book.locator("#results a", { hasText: "[session]" }).click();
  await book.waitForURL(/reference-config\.html#session$/);
  // Pictures are there, and wide tables do not make the page wider than the window.
  await book.setViewportSize({ width: 400, height: 800 });
  await book.goto(`${bench.server.url}/docs/concepts.html`);
  assert.ok(await book.evaluate(() => [...document.images].every((image) => image.complete && image.naturalWidth > 0)));
  assert.ok(await book.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth));
});

test("every page of the book fits a phone, and its links and pictures work as they are served", async (t) => {
  const page = await bench.page(t);
  await page.setViewportSize({ width: 360, height: 740 });
  await page.goto(`${bench.server.url}/docs/`);
  if (!(await page.$("nav"))) {
    t.skip("the book was not built (cargo xtask docs)");
    return;
  }
  const pages = await page.$$eval("nav a", (links) => links.map((link) => link.href));
  assert.ok(pages.length > 30);
  const linked = new Map();
  const ids = new Map();
  const wrong = [];
  for (const address of pages) {
    await page.goto(address);
    const seen = await page.evaluate(() => ({
      width: document.documentElement.scrollWidth,
      pictures: [...document.images].filter((image) => !image.complete || image.naturalWidth === 0).map((image) => image.src),
      links: [...document.links].map((link) => link.href),
      ids: [...document.querySelectorAll("[id]")].map((one) => one.id),
    }));
    if (seen.width > 360) wrong.push(`${address} is ${seen.width} wide`);
    wrong.push(...seen.pictures.map((picture) => `${address}: ${picture} is not shown`));
    ids.set(address, seen.ids);
    for (const link of seen.links) linked.set(link, address);
  }
  for (const [link, address] of linked) {
    const [target, fragment] = link.split("#");
    if (!target.startsWith(bench.server.url)) continue;
    if (!ids.has(target)) {
      if ((await fetch(target)).status !== 200) wrong.push(`${address}: there is no ${target}`);
    } else if (fragment && !ids.get(target).includes(decodeURIComponent(fragment))) {
      wrong.push(`${address}: ${target} has no #${fragment}`);
    }
  }
  assert.deepEqual(wrong, []);
});

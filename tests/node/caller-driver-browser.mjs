// The driver of the TypeScript client, in a page of Chromium: commands on stdin, replies and notes on stdout. The page is
// of the server's own origin, which is the only one the server answers; its files are put there by the browser's driver.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";
import { DEADLINE, HERE, ROOT } from "./harness.mjs";

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const PAGE = `<!doctype html><link rel="icon" href="data:,"><script type="module">
  import * as library from "./dist/index.js";
  import { CallerDriver } from "./caller-driver.mjs";
  window.driver = new CallerDriver(library, (line) => window.writeLine(JSON.stringify(line)));
</script>`;

const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: FLAGS, timeout: DEADLINE });
/** The page of each origin. */
const pages = new Map();

/** Gives the page's own files, and lets the rest through to the server. */
async function serveFile(route) {
  const path = new URL(route.request().url()).pathname.slice("/driver/".length);
  if (path === "") return route.fulfill({ contentType: "text/html", body: PAGE });
  const file = path.startsWith("dist/") ? join(ROOT, "clients/typescript", path) : join(HERE, path);
  return route.fulfill({ contentType: "text/javascript", body: readFileSync(file, "utf8") });
}

async function openPage(origin) {
  const page = await browser.newPage();
  page.setDefaultTimeout(DEADLINE);
  page.on("pageerror", (error) => console.error(error));
  await page.exposeFunction("writeLine", (line) => console.log(line));
  await page.route(`${origin}/driver/**`, serveFile);
  await page.goto(`${origin}/driver/`);
  await page.waitForFunction(() => window.driver);
  return page;
}

/** The page that each caller lives in. */
const homes = new Map();

async function run(command) {
  if (command.do === "start") {
    if (!pages.has(command.url)) pages.set(command.url, openPage(command.url));
    homes.set(command.caller, pages.get(command.url));
  }
  const page = await homes.get(command.caller);
  await page.evaluate((command) => window.driver.run(command), command);
}

for await (const line of createInterface({ input: process.stdin })) {
  run(JSON.parse(line)).catch((error) => console.error(error));
}
await browser.close();
process.exit(0);

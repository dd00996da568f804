// What the browser tests share: a browser, a page that tolerates neither script errors nor outside requests, and
// the first steps of every story.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { chromium } from "playwright-core";
import { DEADLINE, HERE, Server } from "./harness.mjs";

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const SHOTS = process.env.OUBLIETTE_SCREENSHOTS;
/** A console just built, in place of the one in the program: saves a build of the server while working on it. */
const DIST = process.env.OUBLIETTE_CONSOLE_DIST;

export const MODULES = join(HERE, "node_modules");
export const NODE = join(MODULES, "node/bin/node");

/** By its mark. */
export const id = (name) => `[data-testid="${name}"]`;

/** A row of the timeline. */
export const row = (type) => `${id("timeline")} > [data-type="${type}"]`;

/** Notes every toast: each stays for a few seconds only, and who looks late must not miss it. */
function noteToasts() {
  window.toasts = [];
  const note = (node) => node.nodeType === Node.ELEMENT_NODE && node.matches("[data-testid=toast]") && window.toasts.push(node.textContent);
  new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach(note))).observe(document, { childList: true, subtree: true });
}

/** The next toast with these words, shown already or to come. Each is found once. */
export async function toast(page, text) {
  await page.waitForFunction((text) => {
    const place = window.toasts.findIndex((said) => said.includes(text));
    return place >= 0 && window.toasts.splice(0, place + 1);
  }, text);
}

/** Presses a save button (its mark or locator) and, having seen what changes, writes it. */
export async function save(page, button) {
  await (typeof button === "string" ? page.locator(id(button)) : button).click();
  await page.locator(`${id("review")} [data-sign]:not([data-sign=same])`).first().waitFor();
  await page.click(id("review-save"));
}

export class Bench {
  static async start(config = "") {
    const bench = new Bench();
    bench.server = await Server.start({ config: `[trust]\nread_only = ["${MODULES}"]\n${config}` });
    bench.admin = bench.server.token("admin");
    bench.browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: FLAGS });
    return bench;
  }

  async close() {
    await this.browser?.close();
    await this.server?.close();
  }

  api(tool, args) {
    return this.server.api(tool, this.admin, args);
  }

  async page(t, options = {}) {
    const context = await this.browser.newContext({ viewport: { width: 1400, height: 900 }, ...options });
    context.setDefaultTimeout(DEADLINE);
    await context.addInitScript(noteToasts);
    if (DIST) await context.route((url) => url.pathname === "/" || url.pathname.startsWith("/assets/"), override);
    const page = await context.newPage();
    const outside = [];
    const errors = [];
    context.on("request", (r) => r.url().startsWith(this.server.url) || outside.push(r.url()));
    context.on("weberror", (e) => errors.push(String(e.error())));
    context.on("console", (m) => m.type() === "error" && /Content Security|violat/i.test(m.text()) && errors.push(m.text()));
    t.after(async () => {
      assert.deepEqual(outside.filter((u) => !u.startsWith("data:") && !u.startsWith("blob:")), [], "no outside request");
      assert.deepEqual(errors, [], "no script error");
      await context.close();
    });
    return page;
  }

  async loggedIn(t, { token = this.admin, at = "", ...options } = {}) {
    const page = await this.page(t, options);
    await page.goto(`${this.server.url}/#/${at}`);
    await this.login(page, token);
    return page;
  }

  async login(page, token = this.admin) {
    await page.fill(id("login-token"), token);
    await page.click(id("login-submit"));
    await page.waitForSelector("nav[aria-label=Pages]");
  }

  async open(page, path) {
    await page.goto(`${this.server.url}/#/${path}`);
  }

  async start(page, agent, message = "go") {
    await page.click(id("new-session"));
    await page.waitForSelector(`${id("agent-picker")} option[value="${agent}"]`, { state: "attached" });
    await page.selectOption(id("agent-picker"), agent);
    await page.fill(id("composer"), message);
    await page.click(id("send"));
    await page.waitForSelector("main[data-session]");
    return page.getAttribute("main[data-session]", "data-session");
  }
}

/** The processes that a process started, however far down, with these words in their command line. */
export function started(root, words) {
  const parents = new Map();
  for (const name of readdirSync("/proc").filter((n) => /^\d+$/.test(n))) {
    try {
      // The name in brackets may hold anything; what follows it does not.
      parents.set(Number(name), Number(readFileSync(`/proc/${name}/stat`, "utf8").split(") ").pop().split(" ")[1]));
    } catch {
      // gone meanwhile
    }
  }
  const beneath = (pid) => pid === root || (parents.has(pid) && beneath(parents.get(pid)));
  return [...parents.keys()].filter((pid) => {
    try {
      return pid !== root && beneath(pid) && readFileSync(`/proc/${pid}/cmdline`, "utf8").replaceAll("\0", " ").includes(words);
    } catch {
      return false;
    }
  });
}

/** Ends one process, unless it is gone already. */
export function kill(pid) {
  try {
    process.kill(pid, "SIGKILL");
  } catch {
    // gone meanwhile
  }
}

export async function shot(page, name) {
  if (!SHOTS) return;
  mkdirSync(SHOTS, { recursive: true });
  await page.screenshot({ path: join(SHOTS, `${name}.png`) });
}

async function override(route) {
  const path = new URL(route.request().url()).pathname;
  const real = await route.fetch({ url: new URL("/", route.request().url()).href });
  const headers = real.headers();
  const kind = { js: "text/javascript", css: "text/css" }[path.split(".").pop()] ?? "text/html";
  const body = readFileSync(join(DIST, path === "/" ? "index.html" : path));
  await route.fulfill({ body, contentType: kind, headers: { "content-security-policy": headers["content-security-policy"] } });
}

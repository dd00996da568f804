// Every page as a picture, at four widths, in light and dark, compared with the pictures in pictures/. They are small on
// purpose: a page that lost its layout is seen at any size, one pixel of a letter never is. OUBLIETTE_UPDATE_PICTURES=1
// takes them anew; look at each before it is committed.
import assert from "node:assert/strict";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { Bench, id, row, shot } from "./console-browser.mjs";
import { HERE } from "./harness.mjs";

const KEPT = join(HERE, "pictures");
const UPDATE = process.env.OUBLIETTE_UPDATE_PICTURES;
const SIZES = [[360, 720], [768, 900], [1440, 900], [2560, 1300]];
/** Width of a kept picture, in pixels. */
const KEPT_WIDTH = 80;
/** A pixel differs when a channel does by more than this, of 255. */
const CHANNEL_TOLERANCE = 56;
/** The share of pixels that may differ. */
const SHARE_TOLERANCE = 0.03;

let bench, session;
before(async () => {
  bench = await Bench.start();
  const { server, admin } = bench;
  await bench.api("project_create", { name: "Website", description: "The public pages." });
  const builtin = (id, builtinPolicy) => bench.api("catalog_put", { id, definition: { id, kind: "builtin", builtinPolicy } });
  await builtin("files", { name: "fs_read", allowedPaths: ["./"] });
  await builtin("drafts", { name: "fs_write", allowedPaths: ["drafts/"] });
  await builtin("shell", { name: "shell_exec", allowedCommands: ["ls", "wc"], timeoutMs: 60000 });
  const call = (tool, args) => ({ call: { tool, arguments: args } });
  await server.putAgent("writer", admin, [[
    { say: "I look at what is there, then write a draft.\n" },
    call("@shell/shell_exec", { argv: ["ls", "-l"] }),
    call("@drafts/fs_write", { path: "drafts/welcome.md", content: "# Welcome\n\nAn agent wrote this, in a sandbox.\n" }),
    call("@files/fs_read", { path: "drafts/welcome.md" }),
    call("no_such_tool", {}),
    { say: "The draft is in `drafts/welcome.md`:\n\n```js\nconst page = await render(\"drafts/welcome.md\");\n```\n\n- short\n- **friendly**" },
  ]], { name: "Writer", description: "Drafts pages from notes.", prompt: "You draft pages.", tools: { use: ["files", "drafts", "shell"], allowed: ["@files/*", "@drafts/*", "@shell/shell_exec"] } });
  await server.putAgent("publisher", admin, [[{ say: "I publish it." }, call("@drafts/fs_write", { path: "drafts/published.md", content: "# Welcome\n" })]], { name: "Publisher", tools: { use: ["drafts"], ask: ["@drafts/fs_write"] } });
  session = (await bench.api("session_message", { message: "Draft the welcome page from what is in the workspace", agent: "writer", wait: true })).session_id;
  await bench.api("session_message", { message: "Publish the welcome page", agent: "publisher" });
});
after(() => bench?.close());

/** Makes what differs from run to run the same: numbers, times, ids, lengths of bars; nothing blinks or turns. */
function settle() {
  const style = document.createElement("style");
  style.textContent = `*, *::before, *::after { animation: none !important; transition: none !important; caret-color: transparent !important; }
    .waterfall .track i, .time-chart svg > :not(line), .share, .bars rect { visibility: hidden !important; } .toasts { display: none !important; }
    /* What this machine has. */
    .checks li > *, .about { visibility: hidden !important; } .checks li:nth-child(n + 6) { display: none !important; }`;
  document.head.append(style);
  const walker = document.createTreeWalker(document.querySelector("#app"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest("h1, select")) continue;
    const text = node.nodeValue.replace(/(gogol|proj|tok|appr|srv)_\w+/g, "id").replace(/[0-9a-f]{8}-[0-9a-f-]{20,}/g, "id").replace(/\d[\d.,:-]*( ?(ms|s|min|h|d|B|KiB|MiB)\b)?/g, "0");
    if (text !== node.nodeValue) node.nodeValue = text;
  }
}

/** Shrinks a picture and, with another one, says which share of their pixels differs. Runs in the browser, which reads PNG. */
async function shrinkAndCompare({ taken, kept, width, tolerance }) {
  const load = async (base64) => createImageBitmap(await (await fetch(`data:image/png;base64,${base64}`)).blob());
  const draw = (image, w, h) => {
    const canvas = new OffscreenCanvas(w, h);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, w, h);
    return { canvas, pixels: context.getImageData(0, 0, w, h).data };
  };
  const image = await load(taken);
  const height = Math.round((image.height / image.width) * width);
  const small = draw(image, width, height);
  const bytes = new Uint8Array(await (await small.canvas.convertToBlob({ type: "image/png" })).arrayBuffer());
  const png = btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));
  if (!kept) return { png };
  const old = await load(kept);
  if (old.width !== width || old.height !== height) return { png, share: 1 };
  const before = draw(old, width, height).pixels;
  let differing = 0;
  for (let i = 0; i < before.length; i += 4) {
    if ([0, 1, 2].some((c) => Math.abs(before[i + c] - small.pixels[i + c]) > tolerance)) differing++;
  }
  return { png, share: differing / (before.length / 4) };
}

const PAGES = {
  home: async (p) => {
    await bench.open(p, "");
    await p.locator("[data-tile=waiting] .big", { hasText: "1" }).waitFor();
    await p.locator(`${id("session-list")} [data-session]`).nth(1).waitFor();
  },
  session: async (p) => {
    await bench.open(p, `sessions/${session}`);
    await p.waitForSelector(row("turn_completed"));
    await p.locator(id("session-status"), { hasText: "idle" }).waitFor();
    if (p.viewportSize().width > 1100) await p.locator(id("tool-row")).first().waitFor();
  },
  debugger: async (p) => {
    await bench.open(p, `sessions/${session}?debugger=1&panel=none&kind=tool_call`);
    await p.waitForSelector(row("turn_completed"));
    await p.locator(`${id("waterfall")} .span`).nth(2).waitFor();
    await p.locator(id("debugger-row")).nth(2).waitFor();
  },
  approvals: async (p) => {
    await bench.open(p, "approvals");
    await p.locator(id("approval")).waitFor();
  },
  agents: async (p) => {
    await bench.open(p, "agents/writer");
    await p.locator(`${id("rule-preview")}[data-judged=true]`).waitFor();
    await p.locator(id("tool-row")).first().waitFor();
  },
  review: async (p) => {
    await bench.open(p, "agents/writer");
    await p.locator(`${id("rule-preview")}[data-judged=true]`).waitFor();
    await p.getByLabel("Description").fill("Writes what it is asked to.");
    await p.keyboard.press("Control+s");
    await p.locator(`${id("review")} [data-sign=added]`).first().waitFor();
  },
  catalog: async (p) => {
    await bench.open(p, "catalog/shell");
    await p.getByLabel("Allowed commands").waitFor();
    await p.locator("aside.list [data-status=green]").first().waitFor();
  },
  projects: async (p) => {
    await bench.open(p, "projects");
    await p.locator("[data-project]").first().waitFor();
  },
  usage: async (p) => {
    await bench.open(p, "usage");
    await p.locator("[data-group=session]").waitFor();
  },
  figures: async (p) => {
    await bench.open(p, "figures");
    await p.locator("[data-group=tools] tbody tr").nth(1).waitFor();
  },
  admin: async (p) => {
    await bench.open(p, "admin/tokens");
    await p.getByRole("button", { name: "Revoke" }).first().waitFor();
  },
  servers: async (p) => {
    await bench.open(p, "admin/servers");
    await p.locator("[data-server]").waitFor();
  },
  audit: async (p) => {
    await bench.open(p, "admin/audit");
    await p.locator(`${id("audit")} [data-action]`).first().waitFor();
  },
  doctor: async (p) => {
    await bench.open(p, "admin/doctor");
    await p.locator(`${id("doctor")} [data-check="sandbox"]`).waitFor();
  },
};

async function everyPage(t, colorScheme) {
  const p = await bench.loggedIn(t, { colorScheme, bypassCSP: true });
  // Leaving an edit asks.
  p.on("dialog", (dialog) => dialog.accept());
  const problems = [];
  for (const [width, height] of SIZES) {
    await p.setViewportSize({ width, height });
    for (const [name, show] of Object.entries(PAGES)) {
      const file = `${name}-${width}-${colorScheme}.png`;
      const kept = !UPDATE && existsSync(join(KEPT, file)) ? readFileSync(join(KEPT, file), "base64") : undefined;
      let found;
      // What arrives just then may be in the picture; the next one shows whether it stays.
      for (let attempt = 0; attempt < 4; attempt++) {
        await p.goto("about:blank");
        await show(p);
        await shot(p, `${name}-${width}-${colorScheme}`);
        await p.evaluate(settle);
        const taken = (await p.screenshot()).toString("base64");
        found = await p.evaluate(shrinkAndCompare, { taken, kept, width: KEPT_WIDTH, tolerance: CHANNEL_TOLERANCE });
        if (!kept || found.share <= SHARE_TOLERANCE) break;
      }
      if (UPDATE) {
        mkdirSync(KEPT, { recursive: true });
        writeFileSync(join(KEPT, file), Buffer.from(found.png, "base64"));
      } else if (!kept) problems.push(`${file} is missing: take it with OUBLIETTE_UPDATE_PICTURES=1`);
      else if (found.share > SHARE_TOLERANCE) problems.push(`${file}: ${(found.share * 100).toFixed(1)} % of it looks different`);
    }
  }
  assert.deepEqual(problems, []);
}

test("every page looks as it did, from 360 to 2560 pixels, in light", (t) => everyPage(t, "light"));

test("every page looks as it did, from 360 to 2560 pixels, in dark", (t) => everyPage(t, "dark"));

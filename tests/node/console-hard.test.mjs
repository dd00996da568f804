// What is hard on a console: very long sessions, very large results, and text that would like to be a script.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, id, MODULES, NODE, row, save, toast } from "./console-browser.mjs";
import { until } from "./harness.mjs";

/** Each of these would run if it were ever taken for markup. */
const IMG = '<img src=x onerror="window.ran=1">';
const SCRIPT = "<script>window.ran=1</script>";
const LINK = "[click](javascript:window.ran=1)";
/** Turned around, with characters that nobody sees. */
const RTL = "\u202Eمرحبا بالعالم\u202C שלום\u200B\u200D\u2066x\u2069";
const LONG = "W".repeat(10_000);

/** An MCP server with names as long, as reversed and as unseen as they may be, and images good and bad. */
function strange() {
  const long = "N".repeat(10_000);
  const odd = "\u202Eabc\u200B\u200Ddef";
  const answer = (id, result) => process.stdout.write(JSON.stringify({ jsonrpc: "2.0", id, result }) + "\n");
  const good = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
  // The same file, whose header claims 60,000 pixels a side.
  const bytes = Buffer.from(good, "base64");
  bytes.writeUInt32BE(60_000, 16);
  bytes.writeUInt32BE(60_000, 20);
  let rest = "";
  process.stdin.on("data", (data) => {
    const lines = (rest + data).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const { id, method, params } = JSON.parse(line);
      if (method === "initialize") answer(id, { protocolVersion: params.protocolVersion, capabilities: { tools: {} }, serverInfo: { name: long, version: odd } });
      else if (method === "tools/list") {
        answer(id, { tools: [long, odd, "echo", "bomb", "picture"].map((name) => ({ name, description: `${odd} ${long}`, inputSchema: { type: "object", properties: { [long]: { type: "string", description: odd } } } })) });
      } else if (method === "tools/call" && params.name !== "echo") answer(id, { content: [{ type: "image", mimeType: "image/png", data: params.name === "bomb" ? bytes.toString("base64") : good }] });
      else if (id !== undefined) answer(id, { content: [{ type: "text", text: `${odd} ${long}` }] });
    }
  });
}

/** An MCP server whose every word is hostile, and one tool whose result is ten megabytes. */
function odd() {
  const IMG = '<img src=x onerror="window.ran=1">';
  const answer = (id, result) => process.stdout.write(JSON.stringify({ jsonrpc: "2.0", id, result }) + "\n");
  const schema = { type: "object", properties: { [IMG]: { type: "string", description: IMG, enum: [IMG], default: IMG } } };
  let rest = "";
  process.stdin.on("data", (data) => {
    const lines = (rest + data).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const { id, method, params } = JSON.parse(line);
      if (method === "initialize") {
        answer(id, { protocolVersion: params.protocolVersion, capabilities: { tools: {} }, serverInfo: { name: IMG, version: IMG } });
      } else if (method === "tools/list") {
        answer(id, { tools: [
          { name: IMG, description: IMG, inputSchema: schema },
          { name: "echo", description: IMG, inputSchema: { type: "object", properties: { nested: { type: "object" }, list: { type: "array", items: { type: "string" } } } } },
          { name: "big", description: "As many bytes as asked for.", inputSchema: { type: "object", properties: { bytes: { type: "integer" } } } },
        ] });
      } else if (method === "tools/call") {
        const text = params.name === "big" ? "x".repeat(params.arguments.bytes) : `${IMG} ${JSON.stringify(params.arguments)}`;
        answer(id, { content: [{ type: "text", text }] });
      } else if (id !== undefined) answer(id, {});
    }
  });
}
const stdio = (id, code) => ({
  id, kind: "mcp", transport: "stdio", command: NODE, args: ["-e", code], read_only: [MODULES],
  timeouts: { startupMs: 120000 }, restart: { maxAttempts: 0 },
});

let bench, server, project;
before(async () => {
  bench = await Bench.start();
  server = bench.server;
  project = (await bench.api("project_create", { name: `${IMG} project` })).project_id;
  await bench.api("catalog_put", { id: "odd", definition: stdio("odd", `(${odd})()`) });
  await bench.api("catalog_put", { id: "dead", definition: { ...stdio("dead", `console.error(${JSON.stringify(IMG + SCRIPT)}); process.exit(1)`), description: IMG } });
  await bench.api("catalog_put", { id: "strange", definition: { ...stdio("strange", `(${strange})()`), description: RTL } });
  await server.putAgent("strange", bench.admin, [[
    { say: `${RTL} ${LONG}\n\n| ${LONG} | b |\n|---|---|\n| ${RTL} | d |\n` },
    { call: { tool: "@strange/echo", arguments: { [LONG]: RTL, path: LONG } } },
    { call: { tool: LONG.slice(0, 200), arguments: {} } },
  ]], { name: `${RTL} ${"W".repeat(80)}`, description: LONG.slice(0, 1_000), tools: { use: ["strange"] } });
  await server.putAgent("pictures", bench.admin, [[{ call: { tool: "@strange/bomb", arguments: {} } }, { call: { tool: "@strange/picture", arguments: {} } }]], { name: "Pictures", tools: { use: ["strange"] } });
  await server.putAgent("evil", bench.admin, [[
    { say: `${IMG} ${LINK} ${SCRIPT}\n\n\`\`\`html\n${SCRIPT}\n\`\`\`\n` },
    { call: { tool: SCRIPT, arguments: { x: IMG } } },
    { call: { tool: "odd_echo", arguments: { list: [IMG] } } },
  ]], { name: `${IMG} Evil`, description: IMG, tools: { use: ["odd", "dead"], aliases: { fine: `@odd/${IMG}` } } });
  await server.putAgent("big", bench.admin, [[{ say: "Reading." }, { call: { tool: "odd_big", arguments: { bytes: 10_000_000 } } }, { say: "Read." }]], { name: "Big", tools: { use: ["odd"] } });
  // A call that is stopped at the gate costs next to nothing: ten thousand events in a moment.
  const stopped = Array.from({ length: 50 }, (_, i) => ({ tool: "no_such_tool", arguments: { i } }));
  const turn = Array.from({ length: 100 }, (_, i) => [{ say: `Step ${i}.` }, { parallel: stopped }]).flat();
  await server.putAgent("long", bench.admin, [turn, [{ say: "One more thing." }]], { name: "Long" });
});
after(() => bench?.close());

const nothingRan = async (page, where) => {
  assert.equal(await page.evaluate(() => window.ran), undefined, `a script ran: ${where}`);
  assert.equal(await page.locator("#app img, #app script, #app iframe, [onerror]").count(), 0, `markup was made: ${where}`);
};

test("ten thousand events are shown, scroll, and leave the page usable", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "go on and on", project_id: project, agent: "long", wait: true });
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  await p.waitForSelector(row("turn_completed"));
  await p.fill(id("composer"), "typed meanwhile");
  const timeline = p.locator(id("timeline"));
  await p.waitForFunction(() => Number(document.querySelector("[data-testid=timeline]").dataset.rows) > 10_000);
  // A new reader starts at the end; only what is near is on the page.
  await p.waitForFunction(() => {
    const box = document.querySelector("[data-testid=timeline]");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  });
  const rendered = () => timeline.evaluate((box) => box.childElementCount);
  const few = async () => assert.ok((await rendered()) < 250, `${await rendered()} rows are on the page`);
  await few();

  // Scrolling by the wheel brings earlier rows and moves nothing else: each step moves what is in sight by as much.
  const firstShown = async () => Number(await timeline.getAttribute("data-hidden"));
  const beginning = await firstShown();
  await timeline.hover();
  for (let i = 0; i < 25; i++) {
    // A row in sight before and after the step.
    const before = await timeline.evaluate((box) => {
      const { top } = box.getBoundingClientRect();
      window.watched = [...box.children].find((row) => row.dataset.type && row.getBoundingClientRect().top > top + 20);
      return window.watched.getBoundingClientRect().top;
    });
    await p.mouse.wheel(0, -150);
    await until(() => p.evaluate((from) => Math.abs(window.watched.getBoundingClientRect().top - from - 150) <= 2, before), `step ${i} to end`);
  }
  assert.ok((await firstShown()) < beginning - 20, "earlier rows are there");
  await few();
  // The scroll bar leads through all of it, to the first row.
  await timeline.evaluate((box) => (box.scrollTop = 0));
  await p.locator(row("message"), { hasText: "go on and on" }).waitFor();
  assert.equal(await firstShown(), 0);
  await few();
  // What was opened is open when it comes back.
  const opened = p.locator(row("tool_call")).first();
  await opened.locator("summary").click();
  await opened.locator(".value").first().waitFor();
  await timeline.evaluate((box) => (box.scrollTop = box.scrollHeight));
  await until(async () => (await firstShown()) > 5_000, "the end");
  await timeline.evaluate((box) => (box.scrollTop = 0));
  await opened.locator(".value").first().waitFor();
  // A link leads into the middle, and the outline to the beginning.
  const { events } = await bench.api("session_events", { session_id, since_index: 5_000, max_events: 100 });
  const middle = events.find((e) => e.type === "tool_call");
  await bench.open(p, `sessions/${session_id}?event=${middle.index}`);
  const call = p.locator(`${row("tool_call")}[data-target="true"]`);
  await call.locator("summary").click();
  await call.locator(".value").first().waitFor();
  assert.equal(await p.inputValue(id("composer")), "typed meanwhile");

  // What arrives does not move what is being read.
  const place = () => call.evaluate((element) => element.getBoundingClientRect().top);
  const settled = await until(async () => {
    const first = await place();
    for (let i = 0; i < 5; i++) await p.evaluate(() => new Promise(requestAnimationFrame));
    return first === (await place()) && { top: first };
  }, "the page to rest");
  const rows = Number(await timeline.getAttribute("data-rows"));
  await bench.api("session_message", { message: "more", session_id, wait: true });
  await p.waitForFunction((n) => Number(document.querySelector("[data-testid=timeline]").dataset.rows) >= n, rows + 3);
  assert.ok(Math.abs((await place()) - settled.top) <= 1, "the reader's place stays");
  await p.getByRole("button", { name: "Newest" }).click();
  await p.getByText("One more thing.").waitFor();
  await p.click(id("outline-toggle"));
  await p.locator(id("outline")).getByRole("button", { name: /^go on and on/ }).click();
  await p.locator(`${row("message")}[data-target="true"]`, { hasText: "go on and on" }).waitFor();
  // Its whole content is searched, not only what is on the page.
  await p.getByLabel("Find in this session").fill("Step 50.");
  await p.locator(row("message"), { hasText: "Step 50." }).waitFor();
  await p.getByLabel("Find in this session").fill("");

  // The debugger holds as many.
  await p.click(id("debugger-toggle"));
  await p.waitForSelector(`${id("debugger-row")}[data-kind="tool_blocked"]`);
  await p.getByLabel("Kind").selectOption("tool_blocked");
  await p.getByLabel("Filter by text").fill("no_such_tool");
  await p.locator(id("debugger-count"), { hasText: "5000 of" }).waitFor();
});

test("a long session opens at its end, while what came before is still being read", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "a long way", project_id: project, agent: "long", wait: true });
  const p = await bench.loggedIn(t, { at: "sessions", permissions: ["clipboard-read", "clipboard-write"] });
  // Whole pages from the middle are held; the beginning and the end are not.
  let release;
  const held = new Promise((resolve) => (release = resolve));
  await p.route("**/api/tools/session_events", async (route) => {
    const { since_index, max_events } = route.request().postDataJSON();
    if (since_index > 1_500 && since_index < 8_500 && max_events > 1) await held;
    await route.continue();
  });
  await bench.open(p, `sessions/${session_id}`);
  await p.waitForSelector(row("turn_completed"));
  await p.locator(id("reading-earlier")).waitFor();
  assert.equal(await p.locator(row("message"), { hasText: "a long way" }).count(), 0);
  // It is usable: typed into, opened, followed. What is copied would not be all of it yet.
  await p.locator(`${row("tool_call")} summary`).last().click();
  await p.locator(`${row("tool_call")} .value`).first().waitFor();
  await p.fill(id("composer"), "typed meanwhile");
  assert.ok(await p.locator(id("copy-markdown")).isDisabled());
  release();
  await p.locator(id("reading-earlier")).waitFor({ state: "detached" });
  await p.waitForFunction(() => Number(document.querySelector("[data-testid=timeline]").dataset.rows) > 10_000);
  // Every call has its own result beneath it, across the pages.
  await p.click(id("copy-markdown"));
  await toast(p, "Copied as Markdown");
  const parts = (await p.evaluate(() => navigator.clipboard.readText())).split("\n\n").filter((part) => /^\*\*(Call|Failed)\*\*/.test(part));
  assert.equal(parts.length, 10_000, "every call and every result");
  parts.forEach((part, i) => assert.match(part, i % 2 ? /^\*\*Failed/ : /^\*\*Call/, `part ${i}`));
  // A search goes through all of it.
  await p.getByLabel("Find in this session").fill("no_such_tool");
  await p.locator(id("found"), { hasText: /^(5000|10000) rows$/ }).waitFor();
});

test("names of 10,000 characters, reversed and unseen text break no layout", async (t) => {
  const { session_id } = await bench.api("session_message", { message: `${RTL} ${LONG}`, project_id: project, agent: "strange", wait: true });
  for (const width of [360, 1400]) {
    const p = await bench.loggedIn(t, { at: `sessions/${session_id}`, viewport: { width, height: 800 } });
    const fits = async (where) => {
      const wide = await p.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(wide <= 1, `${width} ${where}: the page scrolls sideways by ${wide} px`);
      const off = await p.evaluate(() => ["[data-testid=send]", "nav[aria-label=Pages]"].filter((mark) => {
        const box = document.querySelector(mark)?.getBoundingClientRect();
        return box && (box.right > innerWidth + 1 || box.left < -1);
      }));
      assert.deepEqual(off, [], `${width} ${where}`);
      // Text that turns the direction around does so within its own element, not in what stands beside it.
      const loose = await p.evaluate(() => {
        const found = [];
        const walker = document.createTreeWalker(document.querySelector("#app"), NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
          const parent = walker.currentNode.parentElement;
          const style = getComputedStyle(parent);
          if (walker.currentNode.data.includes("\u202e") && style.display === "inline" && style.unicodeBidi === "normal") found.push(`${parent.tagName} ${parent.className}`);
        }
        return found;
      });
      assert.deepEqual(loose, [], `${width} ${where}`);
    };
    await p.waitForSelector(row("turn_completed"));
    for (const summary of await p.locator(`${id("timeline")} summary`).all()) await summary.click();
    await fits("timeline");
    // Text that is reversed stays in its own row.
    assert.equal(await p.evaluate(() => getComputedStyle(document.querySelector("[data-testid=send]")).direction), "ltr");
    if (width < 1000) await p.getByRole("button", { name: "Tools", exact: true }).click();
    await p.locator(`${id("tool-row")}[data-canonical="@strange/echo"]`).waitFor();
    await fits("tools");
    await p.click(id("debugger-toggle"));
    await p.waitForSelector(`${id("debugger-row")}[data-kind="tool_call"]`);
    await fits("debugger");
    for (const path of ["agents/strange", "catalog/strange", "figures", "admin/tokens", "admin/servers", "admin/audit", "admin/doctor", ""]) {
      await bench.open(p, path);
      await p.locator("main h1").first().waitFor({ state: "attached" });
      await fits(path);
    }
    await nothingRan(p, "strange text");
  }
});

test("an image that would fill the memory is not decoded, a good one is on request", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "show", project_id: project, agent: "pictures", wait: true });
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  await p.waitForSelector(row("turn_completed"));
  for (const summary of await p.locator(`${row("tool_result")} summary`).all()) await summary.click();
  await p.getByText("An image of 60000 × 60000 pixels, too large to be shown.").waitFor();
  assert.equal(await p.locator(`${id("timeline")} img`).count(), 0);
  await p.getByRole("button", { name: "Show image (1 × 1, image/png)" }).click();
  assert.equal(await p.locator(`${id("timeline")} img`).evaluate((image) => image.decode().then(() => image.naturalWidth)), 1);
});

test("a clock that differs by days shows no time that cannot be", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "tick", project_id: project, agent: "pictures", wait: true });
  for (const days of [-3, 3]) {
    const p = await bench.page(t);
    await p.addInitScript((shift) => {
      const [Real, now] = [Date, Date.now.bind(Date)];
      globalThis.Date = class extends Real {
        constructor(...given) {
          super(...(given.length ? given : [now() + shift]));
        }
        static now() {
          return now() + shift;
        }
      };
    }, days * 86_400_000);
    await p.goto(`${server.url}/#/sessions/${session_id}`);
    await bench.login(p);
    await p.waitForSelector(row("turn_completed"));
    // Ages are told by the server's clock: the session was made a moment ago.
    await p.locator(`${id("session-list")} li[data-session="${session_id}"]`, { hasText: /\d (s|min)\s*$/ }).waitFor();
    await p.click(id("debugger-toggle"));
    await p.waitForSelector(`${id("waterfall")} .span`);
    for (const path of [`sessions/${session_id}?debugger=1`, "", "figures", "usage", "approvals", "admin/tokens", "admin/servers", "admin/audit"]) {
      await bench.open(p, path);
      await p.locator("main").first().waitFor();
      await p.evaluate(() => new Promise(requestAnimationFrame));
      const text = await p.locator("#app").innerText();
      assert.doesNotMatch(text, /NaN|Invalid Date|Infinity|(?<![\w.])-\d+ (ms|s|min|h|d)\b/, `${days} days, ${path}`);
    }
  }
});

test("a result of ten megabytes does not freeze the page", async (t) => {
  const { session_id, status, text } = await bench.api("session_message", { message: "read it", project_id: project, agent: "big", wait: true });
  assert.deepEqual([status, text], ["idle", "Reading.\nRead."], "the agent lived through it");
  const { events } = await bench.api("session_events", { session_id, max_events: 1000 });
  const told = events.find((e) => e.type === "tool_result");
  assert.ok(told.ok && /bytes were dropped\]$/.test(told.result.content[0].text), "its report is cut and says so");
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  const result = p.locator(row("tool_result"));
  await result.locator("summary").click();
  await result.getByRole("button", { name: /Show more/ }).click();
  await result.getByRole("button", { name: /Show more/ }).click();
  const shown = await result.locator("pre").evaluate((pre) => pre.textContent.length);
  assert.ok(shown > 100_000 && shown <= 500_000, `${shown} characters are on the page`);
  // It answers: typing, another page and back, the debugger.
  await p.fill(id("composer"), "still here");
  await p.click("nav a[href='#/figures']");
  await p.getByText("Busiest tools").first().waitFor();
  await p.goBack();
  await p.waitForSelector(row("tool_result"));
  assert.equal(await p.inputValue(id("composer")), "still here");
  // Ten at once, straight from the gate.
  const big = p.locator(`${id("tool-row")}[data-tool="odd_big"]`);
  await big.locator("summary").first().click();
  await big.getByText("Try it").click();
  await big.getByLabel("bytes").fill("10000000");
  await big.getByRole("button", { name: /Call/ }).click();
  await big.getByRole("button", { name: /Show more \(9\.5 MiB hidden\)/ }).click();
  await p.click(id("debugger-toggle"));
  await p.locator(`${id("debugger-row")}[data-kind="tool_call"] button`).last().click();
  await p.locator(id("debugger-detail")).getByText("truncated").waitFor();
  assert.equal(await p.inputValue(id("composer")), "still here");
});

test("nothing an agent, a tool, a server or a person writes can run", async (t) => {
  const p = await bench.loggedIn(t);
  await bench.start(p, "evil", `${IMG} ${LINK}`);
  const session_id = await p.getAttribute("main[data-session]", "data-session");
  await p.waitForSelector(row("turn_completed"));
  // Agent text, title, calls and results.
  for (const summary of await p.locator(`${id("timeline")} summary`).all()) await summary.click();
  await nothingRan(p, "timeline");
  assert.equal(await p.locator(`${id("timeline")} a[href^="javascript"]`).count(), 0);
  // A link that was none stays text.
  await p.locator(`${id("session-list")} strong`, { hasText: "onerror" }).first().waitFor();

  // Tools: name, description, schema, and a server's own last words.
  await p.waitForSelector(`${id("server-row")}[data-server="odd"] ${id("status-light")}[data-status="green"]`);
  await p.locator(`${id("server-row")}[data-server="dead"]`, { hasText: "onerror" }).waitFor();
  for (const name of ["fine", "odd_echo"]) {
    const tool = p.locator(`${id("tool-row")}[data-tool="${name}"]`);
    await tool.locator("summary").first().click();
    await tool.getByText("Try it").click();
    await tool.getByRole("button", { name: "Call through the gate" }).waitFor();
  }
  await nothingRan(p, "tools");
  // A try with nested arguments, and its result.
  const echo = p.locator(`${id("tool-row")}[data-tool="odd_echo"]`);
  await echo.getByLabel("nested").fill("{not json");
  await echo.getByRole("button", { name: /Call/ }).click();
  await echo.getByText("nested must be valid JSON").waitFor();
  await echo.getByLabel("nested").fill(JSON.stringify({ deep: [IMG] }));
  await echo.getByLabel("list").fill('["a", "b"]');
  await echo.getByRole("button", { name: /Call/ }).click();
  await echo.getByText('"list":["a","b"]').waitFor();
  await nothingRan(p, "a tried tool");

  await p.click(id("debugger-toggle"));
  await p.locator(`${id("debugger-row")}[data-kind="tool_call"] button`).first().click();
  await p.locator(id("debugger-detail")).waitFor();
  await p.locator(`${id("debugger-row")}[data-kind="tool_server_failed"] button`).first().click();
  await nothingRan(p, "debugger");

  // Files: a name, a text, a change.
  const { workspace_id } = await bench.api("session_get", { session_id });
  for (const name of ["<img src=x onerror=window.ran=1>.md", "page.html"]) {
    const put = await fetch(`${server.url}/api/workspaces/${workspace_id}/files/${encodeURIComponent(name)}`, {
      method: "PUT", headers: { authorization: `Bearer ${bench.admin}` }, body: `${SCRIPT}\n${IMG}\n`,
    });
    assert.ok(put.ok);
  }
  await p.getByRole("button", { name: "Files", exact: true }).first().click();
  for (const name of ["onerror", "page.html"]) {
    await p.locator(`${id("files-panel")} .files button`, { hasText: name }).click();
    await p.locator(id("file-text"), { hasText: "window.ran" }).waitFor();
  }
  await p.getByRole("button", { name: "Changes" }).click();
  await p.locator(id("diff"), { hasText: "onerror" }).waitFor();
  await nothingRan(p, "files");

  // Definitions, a server's error, tokens, the audit log, projects.
  await bench.api("token_create", { name: IMG, scope: "read" });
  for (const [path, text] of [["agents/evil", "onerror"], ["catalog/dead", "dead"], ["projects", "onerror"], ["admin/tokens", "onerror"], ["admin/audit", "project_create"], ["figures", "Busiest"]]) {
    await bench.open(p, path);
    await p.locator(":visible", { hasText: text }).first().waitFor();
    await nothingRan(p, path);
  }
  await bench.open(p, "agents/evil");
  await p.getByRole("button", { name: "As text" }).click();
  await p.getByLabel("agent.json").fill(JSON.stringify({ name: "x", prompt: "y", [IMG]: 1 }));
  await save(p, "save-agent");
  await p.locator(id("definition-error"), { hasText: "onerror" }).waitFor();
  await nothingRan(p, "a refusal");
  await bench.open(p, `sessions/${encodeURIComponent(IMG)}`);
  await p.getByText("There is no such session").waitFor();
  await nothingRan(p, "an address");
});

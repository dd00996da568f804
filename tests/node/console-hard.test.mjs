// What is hard on a console: very long sessions, very large results, and text that would like to be a script.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, NODE, MODULES, id, row } from "./console-browser.mjs";
import { until } from "./harness.mjs";

/** Each of these would run if it were ever taken for markup. */
const IMG = '<img src=x onerror="window.ran=1">';
const SCRIPT = "<script>window.ran=1</script>";
const LINK = "[click](javascript:window.ran=1)";

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
  // Usable while the rest is still being put on the page.
  await p.fill(id("composer"), "typed meanwhile");
  await p.waitForFunction(() => document.querySelector("[data-testid=timeline]").dataset.hidden === "0");
  const rows = await p.locator(`${id("timeline")} > *`).count();
  assert.ok(rows > 10_000, `${rows} rows`);

  // The end is in sight, then the beginning, then the middle.
  await p.locator(row("turn_completed")).waitFor();
  // A new reader starts there.
  await p.waitForFunction(() => {
    const box = document.querySelector("[data-testid=timeline]");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  });
  await p.locator(id("timeline")).evaluate((box) => (box.scrollTop = 0));
  await p.locator(`${row("message")}[data-role="user"]`).first().waitFor();
  const step = p.getByText("Step 50.", { exact: true });
  await step.scrollIntoViewIfNeeded();
  const call = p.locator(row("tool_call")).nth(2600);
  await call.scrollIntoViewIfNeeded();
  await call.locator("summary").click();
  await call.locator("pre").waitFor();
  assert.equal(await p.inputValue(id("composer")), "typed meanwhile");

  // What arrives does not move what is being read.
  const place = () => call.evaluate((element) => element.getBoundingClientRect().top);
  const settled = await until(async () => {
    const first = await place();
    for (let i = 0; i < 5; i++) await p.evaluate(() => new Promise(requestAnimationFrame));
    return first === (await place()) && { top: first };
  }, "the page to rest");
  await bench.api("session_message", { message: "more", session_id, wait: true });
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=timeline] > [data-type=turn_completed]").length === 2);
  assert.ok(Math.abs((await place()) - settled.top) <= 1, "the reader's place stays");
  await p.getByRole("button", { name: "Newest" }).click();
  await p.getByText("One more thing.").waitFor();

  // The debugger holds as many.
  await p.click(id("debugger-toggle"));
  await p.waitForSelector(`${id("debugger-row")}[data-kind="tool_blocked"]`);
  await p.getByLabel("Kind").selectOption("tool_blocked");
  await p.getByLabel("Filter by text").fill("no_such_tool");
  await p.locator(id("debugger-count"), { hasText: "5000 of" }).waitFor();
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
  await p.getByText("Calls a second").first().waitFor();
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
  for (const [path, text] of [["agents/evil", "onerror"], ["catalog/dead", "dead"], ["projects", "onerror"], ["admin", "project_create"], ["figures", "Busiest"]]) {
    await bench.open(p, path);
    await p.locator(":visible", { hasText: text }).first().waitFor();
    await nothingRan(p, path);
  }
  await bench.open(p, "agents/evil");
  await p.getByRole("button", { name: "As text" }).click();
  await p.getByLabel("agent.json").fill(JSON.stringify({ name: "x", prompt: "y", [IMG]: 1 }));
  await p.click(id("save-agent"));
  await p.locator(id("definition-error"), { hasText: "onerror" }).waitFor();
  await nothingRan(p, "a refusal");
  await bench.open(p, `sessions/${encodeURIComponent(IMG)}`);
  await p.getByText("There is no such session").waitFor();
  await nothingRan(p, "an address");
});

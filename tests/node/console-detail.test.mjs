// What a console has for those who look closely: messages that wait, the outline of a long session, the health of catalog
// entries, what rules let through, and figures over time.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, MODULES, NODE, id, row, save, toast } from "./console-browser.mjs";

/** An MCP server with two tools; it ends when asked for the second. */
function small() {
  const answer = (id, result) => process.stdout.write(JSON.stringify({ jsonrpc: "2.0", id, result }) + "\n");
  let rest = "";
  process.stdin.on("data", (data) => {
    const lines = (rest + data).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const { id, method, params } = JSON.parse(line);
      if (method === "initialize") answer(id, { protocolVersion: params.protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "small", version: "1" } });
      else if (method === "tools/list") answer(id, { tools: ["echo", "leave"].map((name) => ({ name, description: name, inputSchema: { type: "object" } })) });
      else if (method === "tools/call" && params.name === "leave") process.exit(3);
      else if (id !== undefined) answer(id, { content: [{ type: "text", text: params?.arguments?.text ?? "echoed" }] });
    }
  });
}

let bench;
before(async () => {
  bench = await Bench.start();
  await bench.api("project_create", { name: "Details" });
  const mcp = (id, code) => ({ id, kind: "mcp", transport: "stdio", command: NODE, args: ["-e", code], read_only: [MODULES], timeouts: { startupMs: 120000 }, restart: { maxAttempts: 0 } });
  await bench.api("catalog_put", { id: "small", definition: mcp("small", `(${small})()`) });
  await bench.api("catalog_put", { id: "broken", definition: mcp("broken", "console.error('no such table'); process.exit(1)") });
  await bench.api("catalog_put", { id: "shell", definition: { id: "shell", kind: "builtin", builtinPolicy: { name: "shell_exec", allowedCommands: ["sleep", "echo"], timeoutMs: 600000 } } });
  const call = (tool, args = {}) => ({ call: { tool, arguments: args } });
  await bench.server.putAgent("worker", bench.admin, [
    [{ say: "First." }, call("@small/echo"), call("no_such_tool"), { say: "Done." }],
    [call("@shell/shell_exec", { argv: ["sleep", "500"] })],
    [{ say: "Third." }], [{ say: "Fourth." }], [{ say: "Fifth." }],
  ], { name: "Worker", tools: { use: ["small", "shell"], allowed: ["@small/*", "@shell/shell_exec"], denied: [{ tool: "@shell/*", when: { properties: { argv: { contains: { const: "rm" } } } } }] } });
});
after(() => bench?.close());

test("JSON is a tree, text of several lines is text, and characters that cannot be seen are written out", async (t) => {
  const nested = { note: "first line\nsecond line", list: [{ deep: "7\u202e8" }], count: 7 };
  const text = JSON.stringify({ rows: Array.from({ length: 60 }, (_, i) => ({ i })), total: 60 });
  await bench.server.putAgent("nester", bench.admin, [[
    { call: { tool: "@small/echo", arguments: nested } }, { call: { tool: "@small/echo", arguments: { text } } }, { say: "Done." },
  ]], { name: "Nester", tools: { use: ["small"] } });
  const { session_id } = await bench.api("session_message", { message: "Nest", agent: "nester", wait: true });
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}?panel=none` });
  await p.waitForSelector(row("turn_completed"));
  // Small: everything in it is open.
  const call = p.locator(row("tool_call")).first();
  await call.locator("summary").click();
  const tree = call.locator(".tree");
  await tree.locator(".leaf", { hasText: 'deep "7⟨202E⟩8"' }).waitFor();
  assert.equal(await tree.locator("pre").innerText(), "first line\nsecond line");
  await tree.getByRole("button", { name: /^list/, expanded: true }).click();
  await tree.locator(".leaf", { hasText: "deep" }).waitFor({ state: "detached" });
  // As JSON and back.
  await call.getByRole("button", { name: "Tree" }).click();
  await call.locator("pre", { hasText: '"count": 7' }).waitFor();
  await call.getByRole("button", { name: "Tree" }).click();
  await tree.waitFor();
  // A result that is JSON, too large to be open at once.
  const result = p.locator(row("tool_result")).last();
  await result.locator("summary").click();
  const large = result.locator(".tree");
  await large.getByRole("button", { name: /^rows \[60\]/, expanded: false }).click();
  await large.getByRole("button", { name: /^59 \{1\}/, expanded: false }).click();
  await large.locator(".leaf", { hasText: "i 59" }).waitFor();
  await result.getByRole("button", { name: "Tree" }).click();
  await result.locator("pre", { hasText: '{"rows":[{"i":0}' }).waitFor();
});

test("messages that wait are shown, and are removed before their turn", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "Begin", agent: "worker", wait: true });
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  await p.waitForSelector(row("turn_completed"));
  const send = async (text) => {
    await p.fill(id("composer"), text);
    await p.click(id("send"));
  };
  await send("Sleep");
  await p.locator(row("tool_call"), { hasText: "sleep" }).waitFor();
  for (const text of ["This waits", "This is not wanted", "This waits, too"]) {
    await send(text);
    await p.locator(id("queued"), { hasText: text }).waitFor();
  }
  await p.locator(id("queued"), { hasText: "not wanted" }).getByRole("button").click();
  await p.locator(row("error"), { hasText: "turn 4 was not begun" }).waitFor();
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=queued]").length === 2);
  // It cannot be removed twice, and its number goes to nobody else.
  await assert.rejects(bench.api("session_queue_remove", { session_id, turn: 4 }), { code: "not_found" });
  assert.equal((await bench.api("session_message", { session_id, message: "Last" })).turn, 6);
  await bench.api("session_queue_remove", { session_id, turn: 6 });
  await p.click(id("cancel"));
  await p.locator(row("message"), { hasText: "This waits, too" }).waitFor();
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=queued]").length === 0);
  const { events } = await bench.api("session_events", { session_id, max_events: 1000 });
  const asked = events.filter((e) => e.type === "message" && e.role === "user").map((e) => e.text);
  assert.deepEqual(asked, ["Begin", "Sleep", "This waits", "This waits, too"]);

  // The outline leads to a turn, and to what failed in it.
  await p.click(id("outline-toggle"));
  const outline = p.locator(id("outline"));
  await outline.locator("li", { hasText: "This waits, too" }).waitFor();
  await outline.getByRole("button", { name: /no_such_tool/ }).click();
  await p.locator(`${row("tool_call")}[data-target="true"]`, { hasText: "no_such_tool" }).waitFor();
  await outline.getByRole("button", { name: /^Sleep/ }).click();
  await p.locator(`${row("message")}[data-target="true"]`, { hasText: "Sleep" }).waitFor();
  // Searched, and back.
  await p.getByLabel("Find in this session").fill("echoed");
  await p.locator(id("found"), { hasText: /^1 row$/ }).waitFor();
  await outline.getByRole("button", { name: /^Begin/ }).click();
  assert.equal(await p.getByLabel("Find in this session").inputValue(), "");
});

test("a catalog entry shows its command, light and last error, is tested and restarted where it is listed", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "Begin", agent: "worker", wait: true });
  const p = await bench.loggedIn(t, { at: "catalog" });
  const entry = (name) => p.locator(`aside.list a[href="#/catalog/${name}"]`);
  await entry("small").locator("[data-status=green]").waitFor();
  await entry("small").getByText("-e").waitFor();
  await entry("broken").locator("[data-status=none]").waitFor();
  await entry("broken").click();
  await p.click(id("test-entry"));
  await p.locator(id("test-result"), { hasText: "no such table" }).waitFor();
  await entry("small").click();
  await p.click(id("test-entry"));
  await p.locator(id("test-result"), { hasText: "2 tools" }).waitFor();
  await bench.api("tool_call", { session_id, tool: "@small/leave" }).catch(() => {});
  await entry("small").locator("[data-status=red]").waitFor();
  const here = p.locator(`${id("server-status")} [data-session="${session_id}"]`);
  await here.locator("[data-status=red]").waitFor();
  await here.getByRole("button", { name: "Restart" }).click();
  await here.locator("[data-status=green]").waitFor();
});

test("what each rule lets through is shown while it is written, and a call is explained", async (t) => {
  await bench.api("session_message", { message: "Begin", agent: "worker", wait: true });
  const p = await bench.loggedIn(t, { at: "agents/worker" });
  const preview = p.locator(id("rule-preview"));
  const rule = (list, text) => preview.locator(`[data-list=${list}]`, { hasText: text });
  await rule("allowed", "@small/*").and(p.locator("[data-matches='2']")).waitFor();
  await rule("denied", "@shell/*").and(p.locator("[data-matches='1']")).waitFor();
  await p.locator(id("ask")).fill("@small/lea*");
  await rule("ask", "@small/lea*").and(p.locator("[data-matches='1']")).waitFor();
  await p.locator(id("ask")).fill("@small/nothing");
  await rule("ask", "@small/nothing").and(p.locator("[data-matches='0']")).waitFor();
  const explain = async (tool, args, expected) => {
    await p.getByLabel("Tool to explain").fill(tool);
    await p.getByLabel("Arguments to explain").fill(args);
    await p.click(id("explain"));
    await p.locator(id("explanation"), { hasText: expected }).waitFor();
  };
  await explain("@shell/shell_exec", '{"argv": ["rm", "x"]}', "may not be called");
  await explain("@shell/shell_exec", '{"argv": ["ls"]}', "With these arguments it may be called");
  await p.getByLabel("Arguments to explain").fill("{");
  await p.click(id("explain"));
  await p.getByText("must be a JSON object").waitFor();
  // Nothing of it was stored.
  const { definition } = await bench.api("agent_get", { slug: "worker" });
  assert.equal(definition.tools.ask, undefined);
  await p.click(id("show-changes"));
  await p.locator(`${id("definition-changes")} [data-sign=added]`, { hasText: "@small/nothing" }).waitFor();
});

test("figures come from durable data, for every range, by tool, agent and project", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "Begin", agent: "worker", wait: true });
  for (let i = 0; i < 5; i++) await bench.api("tool_call", { session_id, tool: "@small/echo" });
  const { total } = await bench.api("figures_report", { minutes: 43200 });
  assert.ok(total.calls >= 6 && total.blocked >= 1 && total.p99_ms >= total.p50_ms, JSON.stringify(total));
  await bench.server.stop();
  await bench.server.run();
  assert.equal((await bench.api("figures_report", { minutes: 43200 })).total.calls, total.calls, "a restart loses nothing");
  const p = await bench.loggedIn(t, { at: "figures" });
  for (const range of ["15", "60", "360", "1440", "10080", "43200"]) {
    await p.selectOption(id("range"), range);
    await p.locator(id("figure-calls"), { hasText: String(total.calls) }).waitFor();
    assert.match(p.url(), new RegExp(`range=${range}`));
  }
  await p.locator("[data-group=tools] [data-key='@small/echo']").waitFor();
  await p.locator("[data-group=agents] [data-key=worker]").waitFor();
  await p.locator("[data-group=projects] tbody tr", { hasText: "Details" }).waitFor();
  const chart = p.getByRole("img", { name: /^Calls over time/ });
  await chart.focus();
  await p.keyboard.press("ArrowLeft");
  await p.getByRole("img", { name: /^Calls over time\. .*answered \d/ }).waitFor();
  for (const minutes of [0, 43_201]) await assert.rejects(bench.api("figures_report", { minutes }), { code: "invalid_argument" });
});

test("a pasted block has the choices of the command line", async (t) => {
  const p = await bench.loggedIn(t, { at: "catalog" });
  await p.getByRole("button", { name: "Paste" }).click();
  const block = JSON.stringify({ mcpServers: { pasted: { command: "some-server", args: ["--stdio"] } } });
  await p.getByLabel("mcpServers block").fill(block);
  await p.getByLabel("Network of what is started").selectOption("proxy");
  const add = p.getByRole("button", { name: "Add to the catalog" });
  await add.click();
  await p.getByRole("heading", { name: "Add 1 entry" }).waitFor();
  // Whoever goes back has added nothing, and lost nothing.
  await p.keyboard.press("Escape");
  assert.equal(await p.getByLabel("mcpServers block").inputValue(), block);
  await assert.rejects(bench.api("catalog_get", { id: "pasted" }));
  await save(p, add);
  await toast(p, "Added pasted");
  assert.equal((await bench.api("catalog_get", { id: "pasted" })).definition.network, "proxy");
  // Once more: it is there already, unless it is to be replaced.
  await bench.open(p, "catalog?paste=1");
  await p.getByLabel("mcpServers block").fill(block);
  await p.getByLabel("Network of what is started").selectOption("none");
  await add.click();
  await p.locator(id("definition-error"), { hasText: "has pasted already" }).waitFor();
  await p.getByLabel("Replace entries").check();
  await add.click();
  // What is replaced is shown as a difference.
  await p.getByRole("heading", { name: "Replace 1 entry" }).waitFor();
  await p.locator(`${id("review")} [data-sign=removed]`, { hasText: "proxy" }).waitFor();
  assert.equal((await bench.api("catalog_get", { id: "pasted" })).definition.network, "proxy");
  await p.click(id("review-save"));
  await toast(p, "Added pasted");
  assert.notEqual((await bench.api("catalog_get", { id: "pasted" })).definition.network, "proxy");
});

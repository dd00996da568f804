// The console in a real browser against the real server. The same run makes the screenshots README shows.
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { Bench, id, kill, MODULES, NODE, row, save, started, toast } from "./console-browser.mjs";
import { ROOT } from "./harness.mjs";

const EVERYTHING = join(MODULES, "@modelcontextprotocol/server-everything/dist/index.js");

let bench, server, admin, project;
before(async () => {
  // Long enough for the countdown to be seen, on a machine that is busy.
  bench = await Bench.start('[switch]\ndrain_timeout = "10s"\n');
  ({ server, admin } = bench);
  project = (await server.api("project_create", admin, { name: "Demo" })).project_id;
  await server.api("catalog_put", admin, {
    id: "everything",
    definition: { id: "everything", kind: "mcp", transport: "stdio", command: NODE, args: [EVERYTHING, "stdio"], read_only: [MODULES], timeouts: { startupMs: 120000 } },
  });
  await server.api("catalog_put", admin, {
    id: "shell",
    definition: { id: "shell", kind: "builtin", builtinPolicy: { name: "shell_exec", allowedCommands: ["echo", "sleep"], timeoutMs: 600000 } },
  });
  const tools = { use: ["everything", "shell"], allowed: ["@everything/echo", "@shell/shell_exec"], aliases: { say: "@everything/echo" } };
  await server.putAgent("writer", admin, [[
    { say: "## Hello\n\nI will **echo** something, then try what I may not.\n\n```rust\nfn main() { println!(\"hi\"); }\n```\n" },
    { call: { tool: "say", arguments: { message: "from the agent" } } },
    { call: { tool: "@everything/get-sum", arguments: { a: 1, b: 2 } } },
    { say: "Done." },
  ]], { name: "Writer", description: "Echoes.", tools });
  await server.putAgent("sleeper", admin, [[
    { say: "Sleeping." },
    { call: { tool: "@shell/shell_exec", arguments: { argv: ["sleep", "500"] } } },
  ]], { name: "Sleeper", tools: { use: ["shell"] } });
  await server.putAgent("asker", admin, [[{ call: { tool: "myapp_ask", arguments: { question: "ready?" } } }, { say: "Thanks." }]], { name: "Asker" });
});
after(() => bench?.close());

const page = (t) => bench.page(t);
const start = (p, agent, message) => bench.start(p, agent, message);
const loggedIn = async (t, token = admin, options = {}) => {
  const p = await bench.loggedIn(t, { token, ...options });
  await p.waitForSelector(id("session-list"));
  return p;
};

test("a wrong token is refused, a right one opens the console, and no script can read it", async (t) => {
  const p = await page(t);
  await p.goto(server.url);
  await p.fill(id("login-token"), "oub_wrong");
  await p.click(id("login-submit"));
  await p.waitForSelector("[role=alert]");
  await p.fill(id("login-token"), admin);
  await p.click(id("login-submit"));
  await p.waitForSelector(id("session-list"));
  const readable = await p.evaluate(() => document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + location.href);
  assert.ok(!readable.includes(admin) && !readable.includes("oub_"));
});

test("a session streams, its tools and a blocked call are shown", async (t) => {
  const p = await loggedIn(t);
  const session = await start(p, "writer");
  await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
  assert.equal(await p.locator(`${id("timeline")} > [data-type="message"][data-role="assistant"] h2`).first().innerText(), "Hello");
  assert.ok(await p.locator(`${id("timeline")} > [data-type="tool_call"]`).count() >= 2);
  assert.ok(await p.locator(`${id("timeline")} > [data-type="tool_result"]`).count() >= 2);
  await p.waitForSelector(`${id("server-row")}[data-server="everything"] ${id("status-light")}[data-status="green"]`);
  await p.waitForSelector(`${id("tool-row")}[data-tool="say"][data-available="true"]`);
  await p.click(id("debugger-toggle"));
  await p.waitForSelector(`${id("debugger")} ${id("debugger-row")}[data-kind="tool_blocked"]`);
  await p.waitForSelector(`${id("debugger-row")}[data-kind="tool_call"]`);
  // Each call has the duration that the gate measured, not the time between the agent's reports of it.
  const measured = await p.locator(`${id("debugger-row")}[data-kind="tool_call"] small.took`).allInnerTexts();
  assert.ok(measured.length > 0 && measured.every((text) => /^[\d.]+ m?s$/.test(text)), `${measured}`);
  await p.waitForFunction((measured) => {
    const shown = [...document.querySelectorAll("[data-testid=timeline] > [data-type=tool_call] .took")].map((took) => took.textContent);
    return measured.every((text) => shown.includes(text));
  }, measured);
  await p.click(`${id("timeline")} > [data-type="tool_call"] summary >> nth=0`);
  assert.ok(await p.locator(`${id("session-list")} [data-session="${session}"]`).count() === 1);
});

test("a tool can be tried through the gate from a form", async (t) => {
  const p = await loggedIn(t);
  await start(p, "writer");
  await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
  const row = p.locator(`${id("tool-row")}[data-tool="say"]`);
  await row.locator("summary").first().click();
  await row.getByText("Try it").click();
  await row.locator("input").first().fill("by hand");
  await row.getByRole("button", { name: /Call/ }).click();
  await row.getByText("by hand", { exact: false }).last().waitFor();
});

test("a killed server turns red and comes back green", async (t) => {
  const p = await loggedIn(t);
  const session = await start(p, "writer");
  await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
  await p.click(id("debugger-toggle"));
  const light = `${id("server-row")}[data-server="everything"] ${id("status-light")}`;
  await p.waitForSelector(`${light}[data-status="green"]`);
  await p.locator(`${id("server-row")}[data-server="everything"] ${id("last-check")}`, { hasText: /^checked \d+ s ago$/ }).waitFor();
  const own = started(server.process.pid, "server-everything/dist/index.js");
  assert.ok(own.length, "the server runs beneath ours");
  for (const pid of own) kill(pid);
  await p.waitForFunction(() => [...document.querySelectorAll("[data-testid=debugger-row][data-kind=health_changed]")].some((r) => r.textContent.includes('"to":"red"')));
  await p.waitForFunction(() => [...document.querySelectorAll("[data-testid=debugger-row][data-kind=health_changed]")].at(-1)?.textContent.includes('"to":"green"'));
  await p.waitForSelector(`${light}[data-status="green"]`);
  assert.ok(session);
});

test("a caller's request is shown and its answer too", async (t) => {
  const p = await loggedIn(t);
  const caller = server.token("write");
  const context = { caller_id: "myapp", caller_tools: [{ name: "ask" }] };
  const { session_id } = await server.api("session_message", caller, { message: "go", project_id: project, agent: "asker", context });
  await p.goto(`${server.url}/#/sessions/${session_id}`);
  const request = `${id("timeline")} > [data-type="caller_tool_request"]`;
  await p.waitForSelector(request);
  const { events } = await server.api("session_events", caller, { session_id, max_events: 1000 });
  const asked = events.find((e) => e.type === "caller_tool_request");
  await server.api("caller_tool_response", caller, { session_id, request_id: asked.request_id, result: "yes" });
  await p.waitForSelector(`${request}[data-outcome="answered"]`);
});

test("agents are switched while a call is in flight, step by step", async (t) => {
  const p = await loggedIn(t);
  const session = await start(p, "sleeper");
  await p.waitForSelector(`${id("timeline")} > [data-type="tool_call"]`);
  // Looked for from the beginning: it is gone again when the drain is over.
  const countdown = p.waitForSelector(id("drain-countdown"));
  await Promise.all([countdown, p.selectOption(id("agent-picker"), "writer")]);
  await p.waitForSelector(`${id("switch-state")} [data-kind="drain_started"]`);
  await p.waitForSelector(`${id("switch-state")} [data-kind="drain_timeout"]`);
  await p.waitForSelector(`${id("switch-state")} [data-kind="build_finished"]`);
  await toast(p, "writer");
  await p.waitForSelector(`${id("tool-row")}[data-tool="say"]`);
  assert.equal((await server.api("session_get", admin, { session_id: session })).agent, "writer");
});

test("a refused switch shows its reason", async (t) => {
  const p = await loggedIn(t);
  await start(p, "writer");
  await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
  await server.api("agent_put", admin, { slug: "absent", definition: { name: "Absent", prompt: "x", runtime: { kind: "acp", command: ["/no/such/agent"] } } });
  await p.reload();
  await p.waitForSelector(`${id("agent-picker")} option[value="absent"]`, { state: "attached" });
  await p.selectOption(id("agent-picker"), "absent");
  await toast(p, "Not switched");
  await p.waitForSelector(`${id("switch-state")}[data-state="refused"]`);
});

test("an edited allow-list takes effect", async (t) => {
  const p = await loggedIn(t);
  const session = await start(p, "writer");
  await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
  const other = await p.context().newPage();
  await other.goto(`${server.url}/#/agents/writer`);
  await other.fill(id("allowed"), "@everything/echo\n@everything/get-sum\n@shell/shell_exec");
  await other.locator(id("allowed")).blur();
  await save(other, "save-agent");
  await toast(other, "Saved");
  await p.waitForSelector(`${id("tool-row")}[data-canonical="@everything/get-sum"][data-allowed="true"]`);
  const called = await server.api("tool_call", admin, { session_id: session, tool: "@everything/get-sum", arguments: { a: 1, b: 2 } });
  assert.equal(called.isError, false);
});

test("a broken definition shows its error beside the form", async (t) => {
  const p = await loggedIn(t);
  await p.goto(`${server.url}/#/agents/writer`);
  await p.getByRole("button", { name: "As text" }).click();
  const text = p.getByLabel("agent.json");
  await text.fill(JSON.stringify({ name: "x", prompt: "y", tools: { use: ["Nope"] } }));
  await save(p, "save-agent");
  await p.locator(id("definition-error"), { hasText: "tools.use[0]" }).waitFor();
});

test("the page survives a restart of the server and loses nothing", async (t) => {
  const p = await loggedIn(t);
  const session = await start(p, "writer");
  await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
  await p.fill(id("composer"), "a draft");
  await server.stop("SIGKILL");
  await p.getByText("Reconnecting").waitFor();
  await server.run();
  await toast(p, "Connected again");
  assert.equal(await p.inputValue(id("composer")), "a draft");
  await p.click(id("send"));
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=timeline] > [data-type=turn_completed]").length === 2);
  assert.ok(session);
});

test("a login that ends leads back and keeps the draft", async (t) => {
  const made = await server.api("token_create", admin, { name: "short", scope: "write" });
  const p = await loggedIn(t, made.token);
  await p.click(id("new-session"));
  await p.fill(id("composer"), "precious words");
  await server.api("token_revoke", admin, { token_id: made.token_id });
  await p.waitForSelector(id("login-token"));
  await p.fill(id("login-token"), admin);
  await p.click(id("login-submit"));
  await p.waitForSelector(id("composer"));
  assert.equal(await p.inputValue(id("composer")), "precious words");
});

test("a login that ends under an edited definition keeps the edit", async (t) => {
  const made = await server.api("token_create", admin, { name: "short admin", scope: "admin" });
  const p = await bench.loggedIn(t, { token: made.token, at: "agents/sleeper" });
  await p.getByLabel("Description").fill("half an idea");
  await server.api("token_revoke", admin, { token_id: made.token_id });
  // The page may have noticed by itself and put the login in front: the click reaches the form behind it either way.
  await p.locator(id("save-agent")).dispatchEvent("click");
  // Either what changes is shown, and the save is refused, or that waits behind the login.
  await p.locator(`${id("review-save")}, ${id("login-token")}`).first().waitFor();
  await p.locator(id("review-save")).evaluateAll((buttons) => buttons.forEach((button) => button.click()));
  await p.waitForSelector(id("login-token"));
  await p.fill(id("login-token"), admin);
  await p.click(id("login-submit"));
  await p.waitForSelector(id("save-agent"));
  assert.equal(await p.getByLabel("Description").inputValue(), "half an idea");
  if (await p.locator(id("review")).count()) await p.click(id("review-save"));
  else await save(p, "save-agent");
  await toast(p, "Saved sleeper");
});

test("a token that may only read is offered nothing else", async (t) => {
  const p = await loggedIn(t, server.token("read"));
  assert.ok(await p.locator(id("composer")).isDisabled());
  await bench.open(p, "admin");
  await p.locator("[data-server]").waitFor();
  await bench.open(p, "admin/tokens");
  await p.getByText("For admins").waitFor();
  await bench.open(p, "agents/writer");
  await p.getByText("needs an admin token").waitFor();
  assert.ok(await p.locator(id("save-agent")).isDisabled());
});

test("admin, catalog, projects and figures open", async (t) => {
  const p = await loggedIn(t);
  for (const [name, text] of [["catalog", "everything"], ["projects", "Demo"], ["admin", "Audit log"], ["figures", "Busiest tools"]]) {
    await p.goto(`${server.url}/#/${name}`);
    await p.getByText(text).first().waitFor();
  }
  await p.goto(`${server.url}/#/admin`);
  await p.getByLabel("Token name").fill("made here");
  await p.getByRole("button", { name: "Create" }).click();
  await p.locator(id("token-made")).getByText(/^oub_/).waitFor();
  const parts = p.getByRole("navigation", { name: "Admin" });
  // A long page squeezes no table.
  const isWhole = async (name) => {
    const [box, table] = await p.getByRole("region", { name }).evaluate((region) => [region.clientHeight, region.firstElementChild.clientHeight]);
    assert.ok(box >= table && table > 40, `${name}: ${box} of ${table}`);
  };
  await isWhole("Tokens");
  await parts.getByRole("link", { name: "Doctor" }).click();
  await p.locator(`${id("doctor")} [data-check="sandbox"]`).waitFor();
  // The back button leads through them.
  await p.goBack();
  await p.getByLabel("Token name").waitFor();
  await parts.getByRole("link", { name: "Audit log" }).click();
  await p.locator(`${id("audit")} [data-action="project_create"]`).first().waitFor();
  await p.waitForFunction(() => document.title.startsWith("Audit log"));
  await isWhole("Audit log");
  await p.getByLabel("Only this action").fill("token_create");
  await p.getByLabel("Only this action").press("Enter");
  const only = (action) => p.waitForFunction((action) => [...document.querySelectorAll("[data-testid=audit] tbody tr")].every((r) => r.dataset.action === action), action);
  await only("token_create");
  // By who and what, with names instead of ids; a link has the filters.
  await p.getByLabel("Only this action").fill("session_message");
  await p.getByLabel("Only this action").press("Enter");
  await only("session_message");
  await p.getByLabel("Only changes by").selectOption({ label: "test-admin" });
  await p.waitForURL(/action=session_message&token=tok_\w+/);
  const target = p.locator(`${id("audit")} a[href^='#/sessions/']`).last();
  await target.waitFor();
  assert.doesNotMatch(await target.innerText(), /gogol_/);
  // A call names its session, which a link leads to, and its tool.
  const { sessions } = await server.api("session_list", admin);
  await server.api("tool_call", admin, { session_id: sessions.find((s) => s.status === "idle").session_id, tool: "project_list", arguments: {} });
  await bench.open(p, "admin/audit?action=tool_call");
  await only("tool_call");
  const called = p.locator(`${id("audit")} [data-action="tool_call"] td`, { hasText: "project_list" }).first();
  assert.doesNotMatch(await called.innerText(), /gogol_/);
  assert.match(await called.locator("a").getAttribute("href"), /^#\/sessions\/gogol_\w+$/);
  await p.goBack();
  await p.reload();
  await only("session_message");
  // Names arrive after the entries.
  await p.waitForFunction(() => document.querySelector("[aria-label='Only changes by']").selectedOptions[0].text === "test-admin");
});

test("it fits a telephone and a wall, in light and dark", async (t) => {
  for (const [width, height, colorScheme] of [[360, 720, "light"], [3840, 2160, "dark"]]) {
    const p = await loggedIn(t, admin, { viewport: { width, height }, colorScheme });
    await start(p, "writer");
    const form = await p.locator("form.composer").boundingBox();
    assert.ok(Math.abs(form.y + form.height - height) <= 2, `${width}: the composer is at the bottom`);
    await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
    const wide = await p.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    assert.ok(wide <= 1, `${width}: the page scrolls sideways by ${wide} px`);
    await p.click(id("debugger-toggle"));
    await p.locator(id("debugger")).waitFor();
    const drawer = await p.locator(id("debugger")).boundingBox();
    assert.ok(drawer.y + drawer.height <= height + 1 && drawer.height > 100, `${width}: the debugger is in sight`);
    for (const path of ["agents/writer", "catalog/everything", "projects", "admin", "figures"]) {
      await bench.open(p, path);
      await p.locator("main.page").waitFor();
      const over = await p.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(over <= 1, `${width} ${path}: the page scrolls sideways by ${over} px`);
    }
  }
});

test("axe finds nothing serious, in light and in dark", async (t) => {
  const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
  for (const colorScheme of ["light", "dark"]) {
    const p = await loggedIn(t, admin, { bypassCSP: true, colorScheme, permissions: ["clipboard-read", "clipboard-write"] });
    const look = async (where) => {
      await p.evaluate(axe);
      const { violations } = await p.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
      const serious = violations.filter((v) => ["moderate", "serious", "critical"].includes(v.impact));
      assert.deepEqual(serious.map((v) => `${colorScheme} ${where}: ${v.id} ${v.nodes[0]?.html}`), []);
    };
    await look("new session");
    const session = await start(p, "writer");
    await p.waitForSelector(`${id("timeline")} > [data-type="turn_completed"]`);
    for (const summary of await p.locator(`${id("timeline")} summary`).all()) await summary.click();
    const tool = p.locator(`${id("tool-row")}[data-tool="say"]`);
    await tool.locator("summary").first().click();
    await tool.getByText("Try it").click();
    await p.click(id("debugger-toggle"));
    await p.locator(`${id("debugger-row")}[data-kind="tool_call"] button`).first().click();
    await look("session, tool and debugger open");
    await p.getByRole("button", { name: "Files", exact: true }).click();
    await p.getByText("Download all").waitFor();
    await look("files");
    await bench.open(p, `${new URL(p.url()).hash.slice(2).split("?")[0]}?panel=outline`);
    await p.locator(id("outline")).waitFor();
    await look("outline");
    await bench.open(p, "catalog?paste=1");
    await p.getByLabel("mcpServers block").waitFor();
    await look("paste");
    for (const [path, text] of [["agents/writer", "Rules by tool"], ["catalog/everything", "Arguments"], ["catalog/shell", "Allowed commands"], ["admin", "Revoke"], ["admin/servers", "active session"], ["admin/audit", "project_create"], ["admin/doctor", "everything needed works"], ["figures", "Busiest"], ["approvals", "Nothing waits for you"], ["usage", "Requests"]]) {
      await bench.open(p, path);
      await p.getByText(text).first().waitFor();
      await look(path);
    }
    await bench.open(p, "projects");
    await p.locator("details summary").first().click();
    await p.getByText("New workspace").waitFor();
    await look("projects");
    await bench.open(p, "agents/writer");
    await p.getByRole("button", { name: "As text" }).click();
    await p.getByLabel("agent.json").waitFor();
    await look("agent as text");
    await bench.open(p, "agents?presets=1");
    await p.getByRole("button", { name: "Use it" }).first().waitFor();
    await look("presets");
    await p.keyboard.press("Control+k");
    await p.locator(id("palette")).waitFor();
    await look("palette");
    await p.keyboard.press("Escape");
    // On a telephone: the menu, lists of one line, panels that are sheets.
    await p.setViewportSize({ width: 360, height: 720 });
    for (const [path, mark] of [["", id("overview")], [`sessions/${session}`, row("turn_completed")], [`sessions/${session}?panel=tools`, id("tools-panel")], [`sessions/${session}?debugger=1&panel=none`, id("debugger-row")], ["agents/writer", id("allow-table")], ["catalog/shell", id("server-status")], ["admin/audit", id("audit")], ["figures", "[data-group=tools]"]]) {
      await bench.open(p, path);
      await p.locator(mark).first().waitFor();
      await look(`${path || "home"} at 360 pixels`);
    }
    await p.locator(".menu-toggle").click();
    await look("menu at 360 pixels");
    await p.setViewportSize({ width: 1400, height: 900 });
    await p.getByRole("button", { name: "Log out" }).click();
    await p.waitForSelector(id("login-token"));
    await look("login");
  }
});

test("the console is at most 220 kB gzipped, its first page 120 kB", async () => {
  const { gzipSync } = await import("node:zlib");
  const { readdirSync } = await import("node:fs");
  const dist = join(ROOT, "ui/dist");
  assert.ok(existsSync(dist));
  const size = (file) => gzipSync(readFileSync(join(dist, file))).length;
  const html = readFileSync(join(dist, "index.html"), "utf8");
  const first = ["index.html", ...[...html.matchAll(/(?:src|href)="\/([^"]+)"/g)].map((m) => m[1])];
  assert.ok(first.some((file) => file.endsWith(".js")) && first.some((file) => file.endsWith(".css")));
  const opened = first.reduce((sum, file) => sum + size(file), 0);
  assert.ok(opened <= 120_000, `the first page has ${opened} bytes`);
  const all = [...new Set([...first, ...readdirSync(join(dist, "assets")).map((file) => `assets/${file}`)])].reduce((sum, file) => sum + size(file), 0);
  assert.ok(all <= 220_000, `${all} bytes`);
});

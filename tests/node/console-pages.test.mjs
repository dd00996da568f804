// Finding one's way in the console: the first page, titles, links, the command palette, small screens.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, id, row, save, toast } from "./console-browser.mjs";

let bench, server;
before(async () => {
  bench = await Bench.start();
  server = bench.server;
});
after(() => bench?.close());

const title = (p, text) => p.waitForFunction((text) => document.title === text, text);

// First: it needs a server that nobody has worked on.
test("the first page leads to a first session, then says what runs and what failed", async (t) => {
  const p = await bench.loggedIn(t);
  const steps = p.locator(id("steps"));
  await steps.locator("li").nth(1).and(p.locator("[data-state=now]")).waitFor();
  await bench.api("project_create", { name: "Home" });
  await bench.api("catalog_put", { id: "shell", definition: { id: "shell", kind: "builtin", builtinPolicy: { name: "shell_exec", allowedCommands: ["sleep", "echo"], timeoutMs: 600000 } } });
  const call = (...argv) => ({ call: { tool: "@shell/shell_exec", arguments: { argv } } });
  await server.putAgent("sleeper", bench.admin, [[call("sleep", "500")]], { name: "Sleeper", tools: { use: ["shell"] } });
  await server.putAgent("caller", bench.admin, [[{ say: "Three calls." }, call("echo", "one"), call("echo", "two"), call("echo", "three"), { say: "Called." }], [{ say: "Again." }]], { name: "Caller", tools: { use: ["shell"] } });
  await bench.api("agent_put", { slug: "broken", definition: { name: "Broken", prompt: "x", runtime: { kind: "acp", command: ["/no/such/agent"] } } });
  await p.reload();
  await steps.locator("li").nth(2).and(p.locator("[data-state=now]")).waitFor();

  await bench.start(p, "sleeper", "Sleep well");
  await p.waitForSelector(row("tool_call"));
  await bench.start(p, "broken", "Break it");
  await p.locator(id("session-status"), { hasText: "failed" }).waitFor();
  await bench.open(p, "");
  const overview = p.locator(id("overview"));
  await overview.locator("[data-tile=running] .big", { hasText: /^1$/ }).waitFor();
  await overview.locator("[data-tile=failed] .big", { hasText: /^1$/ }).waitFor();
  await p.locator(".home .rowlist a", { hasText: "Break it" }).click();
  await p.locator(id("session-status"), { hasText: "failed" }).waitFor();

  // A tile leads to its sessions, the back button from them.
  const listed = p.locator(`${id("session-list")} [data-session]`);
  await bench.open(p, "");
  await overview.locator("[data-tile=failed]").click();
  await p.waitForURL(/#\/sessions\?filter=failed$/);
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=session-list] [data-session]").length === 1);
  assert.equal(await listed.first().getAttribute("data-status"), "failed");
  await p.goBack();
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=session-list] [data-session]").length === 2);
  assert.equal(await p.getByLabel("Filter sessions").inputValue(), "");
  // A filter without a match says so, and is kept by whoever looks into a session and comes back.
  await p.getByLabel("Filter sessions").fill("running");
  await listed.first().locator("a").click();
  await p.waitForSelector("main[data-session]");
  await p.click(id("new-session"));
  assert.equal(await p.getByLabel("Filter sessions").inputValue(), "running");
  await p.getByLabel("Filter sessions").fill("nothing is called this");
  await p.getByRole("button", { name: "Show all" }).click();
  await listed.nth(1).waitFor();
});

test("pages have titles, and a link leads to the very event, row and filter", async (t) => {
  const p = await bench.loggedIn(t);
  await title(p, "Sessions · Oubliette");
  const session_id = await bench.start(p, "caller", "Call three times");
  await p.waitForSelector(row("turn_completed"));
  await title(p, "Call three times · Oubliette");
  await p.click(id("debugger-toggle"));
  await p.getByLabel("Kind").selectOption("tool_call");
  await p.locator(id("debugger-row")).nth(1).locator("button").click();
  await p.locator(id("debugger-detail")).waitFor();
  const link = p.url();
  assert.match(link, /debugger=1.*kind=tool_call.*row=\d+/);
  // Whoever gets the link sees the same.
  const other = await p.context().newPage();
  await other.goto(link);
  await other.locator(id("debugger-detail"), { hasText: "two" }).waitFor();
  assert.equal(await other.getByLabel("Kind").inputValue(), "tool_call");
  await other.close();

  // An event: from the time of a message.
  const first = p.locator(`${row("message")}[data-role="user"]`).first();
  await first.locator("a").click();
  await p.locator(`${row("message")}[data-target="true"]`).waitFor();
  assert.match(p.url(), new RegExp(`#/sessions/${session_id}\\?.*event=\\d+`));

  // A tool: from its name in the panel.
  await bench.open(p, `sessions/${session_id}?panel=tools&tools=${encodeURIComponent("@shell/shell_exec")}`);
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=tool-row]").length === 1);
  await p.locator(`${id("tool-row")} summary`).first().click();
  assert.match(await p.locator(`${id("tool-row")} dd a`).getAttribute("href"), /\?panel=tools&tools=%40shell%2Fshell_exec$/);

  // Back and forward.
  await p.click("nav a[href='#/figures']");
  await title(p, "Figures · Oubliette");
  await p.goBack();
  await p.waitForSelector(`main[data-session="${session_id}"]`);
  await p.goForward();
  await p.getByText("Busiest tools").first().waitFor();

  // Something new by its address, also as the first page of a tab; going back does not ask for it again.
  const fresh = await p.context().newPage();
  await fresh.goto(`${server.url}/#/agents/caller`);
  await title(fresh, "caller · Agents · Oubliette");
  await fresh.goto("about:blank");
  await fresh.goto(`${server.url}/#/agents?new=1`);
  await fresh.getByLabel("Slug").waitFor();
  await title(fresh, "New agent · Oubliette");
  assert.equal(new URL(fresh.url()).hash, "#/agents");
  await fresh.locator("aside.list a", { hasText: "caller" }).waitFor();
  assert.ok(await fresh.getByLabel("Slug").isVisible(), "what arrives later does not replace it");
  await fresh.goBack();
  await fresh.waitForURL("about:blank");
  await fresh.close();
});

test("back and forward open and close panels and the debugger, and a sheet is closed by Back", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "Call", agent: "caller", wait: true });
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  await p.waitForSelector(row("turn_completed"));
  const drawer = p.locator(id("debugger"));
  // A link to another state of the same page is an entry of the history.
  await bench.open(p, `sessions/${session_id}?debugger=1&kind=tool_call&panel=outline`);
  await drawer.waitFor();
  await p.locator(id("outline")).waitFor();
  // A span leads to its call, and an event's link keeps what is open.
  await p.locator(`${id("waterfall")} .span`).first().click();
  await p.locator(`[data-type="tool_call"][data-target="true"]`).waitFor();
  await p.locator(`${row("message")}[data-role="user"] a`).first().click();
  await p.locator(`${row("message")}[data-target="true"]`).waitFor();
  assert.match(p.url(), /debugger=1/);
  assert.match(p.url(), /panel=outline/);
  await p.goBack();
  await p.locator(`[data-type="tool_call"][data-target="true"]`).waitFor();
  await p.goBack();
  await drawer.waitFor({ state: "hidden" });
  await p.locator(id("outline")).waitFor({ state: "detached" });
  await p.goForward();
  await drawer.waitFor();
  assert.equal(await p.getByLabel("Kind").inputValue(), "tool_call");

  const narrow = await bench.loggedIn(t, { at: `sessions/${session_id}`, viewport: { width: 360, height: 720 } });
  await narrow.waitForSelector(row("turn_completed"));
  for (const [button, sheet] of [["Tools", "tools-panel"], ["Debugger", "debugger"]]) {
    await narrow.getByRole("button", { name: button, exact: true }).click();
    await narrow.locator(id(sheet)).waitFor();
    await narrow.goBack();
    await narrow.locator(id(sheet)).waitFor({ state: "hidden" });
    assert.ok(await narrow.locator(id("timeline")).isVisible());
  }
});

test("a session is searched, folded and copied as Markdown", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "Call", agent: "caller", wait: true });
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}`, permissions: ["clipboard-read", "clipboard-write"] });
  await p.waitForSelector(row("turn_completed"));
  await p.getByRole("button", { name: "Fold calls" }).click();
  await p.locator(row("folded"), { hasText: "3 calls" }).getByRole("button").click();
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=timeline] > [data-type=tool_call]").length === 3);
  await p.getByLabel("Find in this session").fill("\"two\"");
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=timeline] > [data-type=tool_call]").length === 1);
  await p.getByLabel("Find in this session").fill("");
  await p.click(id("copy-markdown"));
  await toast(p, "Copied as Markdown");
  const text = await p.evaluate(() => navigator.clipboard.readText());
  assert.match(text, /^# Call[\s\S]*\*\*You\*\*[\s\S]*Call[\s\S]*"three"[\s\S]*Called\./);
});

test("everything is found and done from the command palette, by keyboard", async (t) => {
  const p = await bench.loggedIn(t);
  const palette = p.locator(id("palette"));
  const find = async (text) => {
    await p.keyboard.press("Control+k");
    await palette.waitFor();
    await palette.getByRole("combobox").fill(text);
  };
  await find("catalog shell");
  await palette.getByRole("option", { name: /shell/ }).first().waitFor();
  await p.keyboard.press("Enter");
  await p.getByLabel("Allowed commands").waitFor();
  assert.match(p.url(), /#\/catalog\/shell$/);
  await find("theme dark");
  await p.keyboard.press("Enter");
  await p.waitForFunction(() => document.documentElement.dataset.theme === "dark");
  await find("nothing is called this");
  await palette.getByText("Nothing is called that").waitFor();
  await p.keyboard.press("Escape");
  await palette.waitFor({ state: "detached" });
  await find("sleep well");
  await palette.getByRole("option", { name: /Sleep well/ }).waitFor();
  await p.keyboard.press("Enter");
  await p.waitForSelector("main[data-session]");
  await find("new project");
  await p.keyboard.press("Enter");
  await p.locator("input:focus").and(p.getByLabel("Name of a new project")).waitFor();
  assert.match(p.url(), /#\/projects$/);
  await find("create a token");
  await p.keyboard.press("Enter");
  await p.locator("input:focus").and(p.getByLabel("Token name")).waitFor();
  await find("sleep well");
  await palette.getByRole("option", { name: /Sleep well/ }).waitFor();
  await p.keyboard.press("Enter");
  await p.waitForSelector("main[data-session]");
  await find("debugger");
  await p.keyboard.press("Enter");
  await p.locator(`${id("debugger")}[data-open="true"]`).waitFor();
  await find("show files");
  await p.keyboard.press("Enter");
  await p.locator(id("files-panel")).waitFor();
  await find("switch this session to caller");
  await p.keyboard.press("Enter");
  await toast(p, "Switched to caller");
});

test("an edit that is left without saving is there again", async (t) => {
  const p = await bench.loggedIn(t, { at: "agents/caller" });
  await p.getByLabel("Description").fill("half a thought");
  await p.click(id("show-changes"));
  await p.locator(`${id("definition-changes")} [data-sign=added]`, { hasText: "half a thought" }).waitFor();
  await bench.open(p, "agents/sleeper");
  await p.getByRole("heading", { name: "sleeper" }).waitFor();
  await bench.open(p, "figures");
  await p.getByText("Busiest tools").first().waitFor();
  await bench.open(p, "agents/caller");
  await p.locator(id("restored")).waitFor();
  assert.equal(await p.getByLabel("Description").inputValue(), "half a thought");
  await p.getByRole("button", { name: "Discard it" }).click();
  assert.equal(await p.getByLabel("Description").inputValue(), "");
  await bench.open(p, "agents/sleeper");
  await bench.open(p, "agents/caller");
  await p.getByRole("heading", { name: "caller" }).waitFor();
  assert.equal(await p.getByLabel("Description").inputValue(), "");
});

test("what a save changes is shown before it is written, in every editor, by keyboard", async (t) => {
  const p = await bench.loggedIn(t, { at: "agents/caller" });
  const review = p.locator(id("review"));
  const added = (text) => review.locator("[data-sign=added]", { hasText: text }).waitFor();
  const { project_id } = await bench.api("project_create", { name: "Reviewed" });
  await bench.api("catalog_put", { id: "reviewed", definition: { id: "reviewed", kind: "builtin", description: "old words", builtinPolicy: { name: "fs_read", allowedPaths: ["./"] } } });
  const card = p.locator(`[data-project="${project_id}"]`);
  for (const { path, field, stored } of [
    { path: "agents/caller", field: () => p.getByLabel("Description"), stored: async () => (await bench.api("agent_get", { slug: "caller" })).definition.description },
    { path: "catalog/reviewed", field: () => p.getByLabel("Description"), stored: async () => (await bench.api("catalog_get", { id: "reviewed" })).definition.description },
    { path: `projects/${project_id}`, field: () => card.getByLabel("Description"), stored: async () => (await bench.api("project_get", { project_id })).description },
  ]) {
    await bench.open(p, path);
    const before = await stored();
    await field().fill(`new words for ${path}`);
    await p.keyboard.press("Control+s");
    await added(`new words for ${path}`);
    if (before) await review.locator("[data-sign=removed]", { hasText: before }).waitFor();
    // Back: nothing is written, and what was typed stays.
    await p.keyboard.press("Escape");
    await review.waitFor({ state: "detached" });
    assert.equal(await stored(), before, path);
    assert.equal(await field().inputValue(), `new words for ${path}`);
    await p.keyboard.press("Control+s");
    await added(`new words for ${path}`);
    await p.keyboard.press("Enter");
    await toast(p, "Saved");
    assert.equal(await stored(), `new words for ${path}`);
  }
  // The files beside a definition, too.
  await bench.open(p, "agents/caller");
  const script = p.getByLabel("script.json");
  await script.fill((await script.inputValue()).replace("Called.", "Called again."));
  await p.keyboard.press("Control+s");
  await added("Called again.");
  await p.click(id("review-back"));
});

test("what is typed is there again after leaving: settings, something new, small forms", async (t) => {
  const p = await bench.loggedIn(t, { at: "projects" });
  const { project_id } = await bench.api("project_create", { name: "Left" });
  const elsewhere = async () => {
    await bench.open(p, "figures");
    await p.getByText("Busiest tools").first().waitFor();
  };
  await bench.open(p, `projects/${project_id}`);
  const card = p.locator(`[data-project="${project_id}"]`);
  await card.getByLabel("Memory, MiB").fill("640");
  await card.getByLabel("Name of a new workspace").fill("half a workspace");
  await p.getByLabel("Name of a new project").fill("half a project");
  await elsewhere();
  await bench.open(p, `projects/${project_id}`);
  assert.equal(await card.getByLabel("Memory, MiB").inputValue(), "640");
  assert.equal(await card.getByLabel("Name of a new workspace").inputValue(), "half a workspace");
  assert.equal(await p.getByLabel("Name of a new project").inputValue(), "half a project");
  await card.getByRole("button", { name: "Discard" }).click();
  assert.equal(await card.getByLabel("Memory, MiB").inputValue(), "");

  for (const [page, name, text] of [["agents", "Slug", "Prompt"], ["catalog", "Id", "Description"]]) {
    await bench.open(p, page);
    await p.getByRole("button", { name: "New", exact: true }).click();
    await p.getByLabel(name, { exact: true }).fill("half-done");
    await p.getByLabel(text).fill("begun, not saved");
    await elsewhere();
    await bench.open(p, page);
    await p.getByRole("button", { name: "New", exact: true }).click();
    await p.locator(id("restored")).waitFor();
    assert.deepEqual([await p.getByLabel(name, { exact: true }).inputValue(), await p.getByLabel(text).inputValue()], ["half-done", "begun, not saved"]);
    await p.getByRole("button", { name: "Discard it" }).click();
    assert.equal(await p.getByLabel(name, { exact: true }).inputValue(), "");
  }
  await bench.open(p, "catalog?paste=1");
  await p.getByLabel("mcpServers block").fill("npx -y half");
  await bench.open(p, "admin");
  await p.getByLabel("Token name").fill("half a token");
  // A refusal stands beside the form.
  await p.getByLabel("Expires in").fill("soon");
  await p.getByRole("button", { name: "Create" }).click();
  await p.locator(id("field-error"), { hasText: "expires_in" }).waitFor();
  await bench.open(p, "catalog?paste=1");
  assert.equal(await p.getByLabel("mcpServers block").inputValue(), "npx -y half");
  await bench.open(p, "admin");
  assert.equal(await p.getByLabel("Token name").inputValue(), "half a token");
});

test("the servers are listed, and one that is gone is told apart", async (t) => {
  const p = await bench.loggedIn(t, { at: "admin" });
  await p.getByRole("navigation", { name: "Admin" }).getByRole("link", { name: "Servers" }).click();
  const [known] = (await bench.api("server_list")).servers;
  assert.equal(known.address, bench.server.url);
  const own = p.locator(`[data-server="${known.server_id}"]`);
  await own.getByRole("link", { name: bench.server.url }).waitFor();
  await own.getByRole("img", { name: "runs" }).waitFor();
  // Others come and go while the page is open; what they call themselves is text.
  const at = (seconds) => new Date(Date.now() - seconds * 1000).toISOString();
  const others = [
    { server_id: "srv_b", address: "https://b.example:8443", version: "9.9.9", sessions: 7, since: at(7300), last_seen: at(300) },
    { server_id: "srv_c", address: "javascript:alert(1)//" + "x".repeat(500), version: known.version, sessions: 0, since: at(0), last_seen: at(0) },
  ];
  await p.route("**/api/tools/server_list", (route) => route.fulfill({ json: { servers: [known, ...others] } }));
  const gone = p.locator("[data-server=srv_b]");
  await gone.getByRole("img", { name: "gone" }).waitFor();
  await gone.getByText("5 min ago").waitFor();
  await p.getByText("3 servers").waitFor();
  await p.getByText("2 versions").waitFor();
  assert.equal(await p.locator("[data-server=srv_c] a").count(), 0, "only a web address is a link");
  // A server that cannot answer is said to be; the list stays.
  await p.route("**/api/tools/server_list", (route) => route.fulfill({ status: 503, json: { error: { code: "unavailable", message: "The store is away." } } }));
  await p.getByRole("alert").getByText("The store is away.").waitFor();
  await gone.waitFor();
});

test("an agent is begun from a preset, with the model it is given", async (t) => {
  const p = await bench.loggedIn(t, { at: "agents" });
  await p.getByRole("link", { name: "Presets" }).click();
  const preset = p.locator(`${id("presets")} [data-preset=claude]`);
  await preset.getByRole("textbox").fill("anthropic/claude-some-model");
  await preset.getByRole("button", { name: "Use it" }).click();
  await p.getByRole("textbox", { name: /^Package / }).waitFor();
  assert.equal(await p.getByLabel("Slug").inputValue(), "claude");
  await save(p, "save-agent");
  await toast(p, "Saved claude");
  const { definition } = await bench.api("agent_get", { slug: "claude" });
  assert.equal(definition.model, "anthropic/claude-some-model");
  assert.match(definition.runtime.program.npm, /claude-agent-acp@\d/);
});

test("at 360 pixels everything is in reach: the menu, the debugger, every page", async (t) => {
  const p = await bench.loggedIn(t, { viewport: { width: 360, height: 720 } });
  const { sessions } = await bench.api("session_list", {});
  const fits = async (where) => {
    const over = await p.evaluate(() => [...document.querySelectorAll("#app *")].filter((element) => {
      const box = element.getBoundingClientRect();
      // What scrolls inside its own box may be wider than the screen.
      const scrolls = (node) => node && (["auto", "scroll", "hidden"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
      return box.width > 0 && box.right > innerWidth + 1 && !scrolls(element.parentElement) && !element.closest(".unseen");
    }).map((element) => element.outerHTML.slice(0, 100)));
    assert.deepEqual(over, [], where);
    assert.ok(await p.evaluate(() => document.documentElement.scrollHeight <= innerHeight), `${where}: the frame itself scrolls`);
  };
  await p.waitForSelector(id("session-list"));
  await fits("home");
  await p.getByRole("button", { name: "Sessions" }).click();
  await fits("menu");
  await p.click("nav a[href='#/agents']");
  await p.getByText("Rules by tool").waitFor();
  assert.equal(await p.locator("nav a[href='#/agents']").isVisible(), false, "the menu closes");
  await bench.open(p, "agents/caller");
  await p.locator(`${id("allow-table")} [data-canonical]`).first().waitFor();
  await fits("agents");
  for (const path of ["catalog/shell", "projects", "usage", "admin/tokens", "admin/servers", "admin/audit", "admin/doctor", "figures"]) {
    await bench.open(p, path);
    await p.locator("main.page h1").first().waitFor();
    await fits(path);
  }
  // A table's rows are blocks: nothing of them has to be scrolled to from side to side.
  const tables = {
    "admin/tokens": p.getByRole("button", { name: "Revoke" }).first(),
    "admin/audit": p.locator("[data-outcome] .badge").first(),
    "admin/servers": p.locator("[data-server] td").last(),
    usage: p.locator("[data-group=session] tbody td").last(),
    figures: p.locator("[data-group=tools] tbody td").last(),
    "agents/caller": p.locator(`${id("allow-table")} [data-canonical] td`).first(),
  };
  for (const [path, wanted] of Object.entries(tables)) {
    await bench.open(p, path);
    await wanted.waitFor();
    const place = await wanted.boundingBox();
    assert.ok(place.x >= 0 && place.x + place.width <= 360 && place.width > 10, `${path}: ${JSON.stringify(place)}`);
    const wide = await p.locator(".scroll").evaluateAll((boxes) => boxes.filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.getAttribute("aria-label")));
    assert.deepEqual(wide, [], path);
  }
  // Scripts ask no model: a chart with nothing in it says so.
  await bench.open(p, "usage");
  await p.getByText("No model was asked in this time.").waitFor();
  await bench.open(p, `sessions/${sessions.find((s) => s.agent === "caller").session_id}`);
  await p.waitForSelector(row("turn_completed"));
  await fits("session");
  await p.click(id("debugger-toggle"));
  await p.waitForSelector(`${id("waterfall")} .span`);
  await fits("debugger");
  await p.getByRole("button", { name: "Files", exact: true }).click();
  await p.getByText("Download all").waitFor();
  await fits("files");
});

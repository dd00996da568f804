// The console at work: sessions from start to end, files, trees, definitions made in forms, the debugger's filters.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, id, row, save, toast } from "./console-browser.mjs";

let bench, server, project;
before(async () => {
  bench = await Bench.start();
  server = bench.server;
  const made = await bench.api("project_create", { name: "Work" });
  project = made;
  await bench.api("catalog_put", { id: "out", definition: { id: "out", kind: "builtin", builtinPolicy: { name: "fs_write", allowedPaths: ["./"] } } });
  await bench.api("catalog_put", { id: "shell", definition: { id: "shell", kind: "builtin", builtinPolicy: { name: "shell_exec", allowedCommands: ["sleep", "echo"], timeoutMs: 600000 } } });
  await server.putAgent("scribe", bench.admin, [[
    { call: { tool: "@out/fs_write", arguments: { path: "notes/first.md", content: "# First\n" } } },
    { say: "Written." },
  ]], { name: "Scribe", tools: { use: ["out"] } });
  await server.putAgent("sleeper", bench.admin, [[{ call: { tool: "@shell/shell_exec", arguments: { argv: ["sleep", "500"] } } }], [{ say: "Awake." }]], { name: "Sleeper", tools: { use: ["shell"] } });
  await server.putAgent("quick", bench.admin, [[{ say: "Here." }]], { name: "Quick" });
  await server.putAgent("parent", bench.admin, [[{ call: { tool: "session_message", arguments: { message: "child, go", agent: "quick", wait: true } } }, { say: "Done." }]], { name: "Parent", children: ["quick"] });
  await server.putAgent("rows", bench.admin, [
    [{ call: { tool: "@shell/shell_exec", arguments: { argv: ["echo", "one"] } } }],
    [{ call: { tool: "@shell/shell_exec", arguments: { argv: ["echo", "two"] } } }, { call: { tool: "@shell/shell_exec", arguments: { argv: ["rm", "x"] } } }],
  ], { name: "Rows", tools: { use: ["shell"] } });
});
after(() => bench?.close());

const status = (p, word) => p.locator(id("session-status"), { hasText: word }).waitFor();

test("a session in a new workspace writes files that can be read, compared and downloaded", async (t) => {
  const p = await bench.loggedIn(t);
  await p.getByLabel("Workspace").selectOption("new");
  const session_id = await bench.start(p, "scribe", "Write the first note");
  await p.waitForSelector(row("turn_completed"));
  const session = await bench.api("session_get", { session_id });
  assert.notEqual(session.workspace_id, project.default_workspace_id);
  await p.getByRole("button", { name: "Files", exact: true }).click();
  await p.locator(".files button", { hasText: "notes" }).click();
  await p.locator(".files button", { hasText: "first.md" }).click();
  await p.locator(id("file-text"), { hasText: "# First" }).waitFor();
  await p.getByRole("button", { name: "Changes" }).click();
  await p.locator(id("diff"), { hasText: "+# First" }).waitFor();
  const [download] = await Promise.all([p.waitForEvent("download"), p.getByText("Download all").click()]);
  assert.match(download.suggestedFilename(), /\.tar\.gz$/);
});

test("a turn is cancelled, the session goes on, and ends for good", async (t) => {
  const p = await bench.loggedIn(t);
  await bench.start(p, "sleeper", "Sleep");
  await p.waitForSelector(row("tool_call"));
  await p.click(id("cancel"));
  await p.waitForSelector(row("turn_completed"));
  await status(p, "idle");
  await p.fill(id("composer"), "wake up");
  await p.locator(id("composer")).press("Enter");
  await p.getByText("Awake.").waitFor();
  await status(p, "idle");
  p.on("dialog", (dialog) => dialog.accept());
  await p.click(id("end-session"));
  await status(p, "ended");
  assert.ok(await p.locator(id("composer")).isDisabled());
});

test("a failed session is resumed by a message", async (t) => {
  await bench.api("agent_put", { slug: "mended", definition: { name: "Mended", prompt: "x", runtime: { kind: "acp", command: ["/no/such/agent"] } } });
  const p = await bench.loggedIn(t);
  await bench.start(p, "mended", "Try");
  await status(p, "failed");
  await server.putAgent("mended", bench.admin, [[{ say: "Now it works." }]], { name: "Mended" });
  await p.fill(id("composer"), "again");
  await p.click(id("send"));
  await p.getByText("Now it works.").waitFor();
  await status(p, "idle");
});

test("sessions that a session started stand beneath it", async (t) => {
  const p = await bench.loggedIn(t);
  const session_id = await bench.start(p, "parent", "Delegate");
  await p.waitForSelector(row("turn_completed"));
  const child = p.locator(`${id("session-list")} li[data-parent="${session_id}"]`);
  await child.waitFor();
  assert.equal(await child.getAttribute("data-level"), "1");
  await p.locator(`${id("children")} a`).click();
  await p.getByText("child, go").first().waitFor();
  await p.click(id("parent"));
  await p.waitForSelector(`main[data-session="${session_id}"]`);
});

test("the debugger is filtered, timed by turn, copied, and works by keyboard", async (t) => {
  const p = await bench.loggedIn(t, { permissions: ["clipboard-read", "clipboard-write"] });
  const session_id = await bench.start(p, "rows", "One");
  await p.waitForSelector(row("turn_completed"));
  await bench.api("session_message", { session_id, message: "Two", wait: true });
  await p.locator(id("debugger-toggle")).focus();
  await p.keyboard.press("Enter");
  await p.locator(id("debugger")).waitFor();
  const drawer = await p.locator(id("debugger")).boundingBox();
  assert.ok(drawer.y + drawer.height <= 901 && drawer.height > 200, "the drawer is in sight");
  const rows = p.locator(id("debugger-row"));
  await p.getByLabel("Tool", { exact: true }).selectOption("@shell/shell_exec");
  await p.getByLabel("Kind").selectOption("tool_call");
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=debugger-row]").length === 3);
  await p.getByLabel("Filter by text").fill("two");
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=debugger-row]").length === 1);
  await p.getByRole("button", { name: "Copy as JSON" }).click();
  await toast(p, "copied as JSON");
  const copied = JSON.parse(await p.evaluate(() => navigator.clipboard.readText()));
  assert.deepEqual(copied.map((e) => e.arguments.argv[1]), ["two"]);
  await rows.first().locator("button").focus();
  await p.keyboard.press("Enter");
  await p.locator(id("debugger-detail"), { hasText: /exit_code 0/ }).waitFor();
  // The last turn has two calls, the first one.
  const bars = p.locator(`${id("waterfall")} .span`);
  assert.equal(await bars.count(), 2);
  await p.getByLabel("Turn").selectOption("1");
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=waterfall] .span").length === 1);
  await p.keyboard.press("Escape");
  await p.locator(id("debugger")).waitFor({ state: "hidden" });
  assert.ok(await p.locator(id("debugger-toggle")).evaluate((b) => b === document.activeElement), "the focus returns");
});

test("a catalog entry is made in a form, refused beside its field, and edited as text", async (t) => {
  const p = await bench.loggedIn(t, { at: "catalog" });
  await p.getByRole("button", { name: "New" }).click();
  await p.getByLabel("Id", { exact: true }).fill("reader");
  await p.selectOption(id("kind"), "fs_read");
  await p.getByLabel("Allowed paths").fill("../secrets");
  await save(p, "save-tool");
  const field = p.locator("label.field", { hasText: "Allowed paths" });
  await field.locator(id("field-error"), { hasText: "without .." }).waitFor();
  await p.getByLabel("Allowed paths").fill("notes/\nsrc/");
  await save(p, "save-tool");
  await toast(p, "Saved reader");
  assert.deepEqual((await bench.api("catalog_get", { id: "reader" })).definition.builtinPolicy, { name: "fs_read", allowedPaths: ["notes/", "src/"] });

  // Every kind has its form, and what it makes is accepted.
  for (const [kind, fill] of [
    ["stdio", async () => {
      await p.getByRole("textbox", { name: /^Command / }).fill("my-server");
      await p.getByLabel("Arguments").fill("--port\n0");
      await p.getByRole("button", { name: "Add" }).click();
      await p.getByLabel("Environment: name 1").fill("MODE");
      await p.getByLabel("Environment: value of MODE").fill("quiet");
      await p.getByLabel("Network").selectOption("proxy");
      await p.getByLabel("Ready within, ms").fill("5000");
      await p.getByLabel("Check its health").check();
      await p.getByLabel("Every, ms").fill("1000");
      await p.getByLabel("Restarts").fill("2");
    }],
    ["http", () => p.getByLabel("Endpoint").fill("https://example.com/mcp")],
    ["ws", () => p.getByLabel("Endpoint").fill("wss://example.com")],
    ["tcp", () => p.getByLabel("Endpoint").fill("example.com:99")],
    ["fs_write", () => p.getByLabel("Allowed paths").fill("out/")],
    ["shell_exec", async () => {
      await p.getByLabel("Allowed commands").fill("git status\nls");
      await p.getByLabel("Environment names").fill("LANG");
      await p.getByLabel("Timeout, ms").fill("1234");
      await p.getByLabel("A shell interprets").check();
    }],
  ]) {
    await p.getByRole("button", { name: "New" }).click();
    await p.getByLabel("Id", { exact: true }).fill(`made-${kind.replace("_", "-")}`);
    await p.selectOption(id("kind"), kind);
    await fill();
    await save(p, "save-tool");
    await toast(p, `Saved made-${kind.replace("_", "-")}`);
  }
  const { definition } = await bench.api("catalog_get", { id: "made-stdio" });
  assert.deepEqual([definition.command, definition.args, definition.network, definition.timeouts.startupMs, definition.healthCheck.intervalMs, definition.restart.maxAttempts], ["my-server", ["--port", "0"], "proxy", 5000, 1000, 2]);
  assert.deepEqual(Object.keys(definition.env), ["MODE"]);
  assert.deepEqual((await bench.api("catalog_get", { id: "made-shell-exec" })).definition.builtinPolicy, {
    name: "shell_exec", allowedCommands: ["git status", "ls"], allowedEnv: ["LANG"], timeoutMs: 1234, shell: true,
  });

  await p.getByRole("button", { name: "As text" }).click();
  await p.getByLabel("tool.json").fill('{"id":"made-shell-exec","kind":"builtin","builtinPolicy":{"name":"shell_exec"}}');
  await save(p, "save-tool");
  await p.locator(id("definition-error"), { hasText: "allowedCommands" }).waitFor();

  await p.getByRole("button", { name: "Paste" }).click();
  await p.getByLabel("mcpServers block").fill('{"mcpServers":{"Pasted One":{"command":"some-server","args":["x"]}}}');
  await save(p, p.getByRole("button", { name: "Add to the catalog" }));
  await toast(p, "Added pasted-one");
});

test("an agent is made in a form, with its script, rules and aliases", async (t) => {
  const p = await bench.loggedIn(t, { at: "agents" });
  await p.getByRole("button", { name: "New" }).click();
  await p.getByLabel("Slug").fill("formed");
  await p.getByLabel("Name", { exact: true }).fill("Formed");
  await p.selectOption(id("runtime"), "acp");
  await p.getByRole("textbox", { name: /^Command / }).fill("");
  await save(p, "save-agent");
  await p.locator("label.field", { hasText: "Command" }).locator(id("field-error"), { hasText: "must name a program" }).waitFor();
  await p.selectOption(id("runtime"), "builtin");
  await p.getByLabel("Its permission requests").selectOption("deny");
  await p.getByLabel("Network").selectOption("proxy");
  await p.getByLabel("quick", { exact: true }).check();
  await p.getByRole("checkbox", { name: "shell", exact: true }).check();
  await p.getByRole("checkbox", { name: "out", exact: true }).check();
  await p.getByLabel("Model").fill("script:script.json");
  await p.getByRole("button", { name: "Write it" }).click();
  await p.getByLabel("script.json").fill("{not json");
  await p.locator(".field .problem").first().waitFor();
  await p.getByLabel("script.json").fill('{"turns":[[{"say":"From the form."}]]}');
  await save(p, "save-agent");
  await toast(p, "Saved formed");

  const rules = p.locator(id("allow-table"));
  await rules.getByLabel("Allow @shell/shell_exec").uncheck();
  await rules.getByLabel("Aliases of @out/fs_write").fill("write");
  await rules.getByLabel("Aliases of @out/fs_write").blur();
  await save(p, "save-agent");
  await p.locator(`${id("tool-row")}[data-tool="write"][data-allowed="true"]`).waitFor();
  await p.locator(`${id("tool-row")}[data-canonical="@shell/shell_exec"][data-allowed="false"]`).waitFor();
  const got = await bench.api("agent_get", { slug: "formed" });
  const d = got.definition;
  assert.deepEqual([d.permissions, d.sandbox.network, d.children, d.tools.use, d.tools.aliases], ["deny", "proxy", ["quick"], ["shell", "out"], { write: "@out/fs_write" }]);
  assert.deepEqual(d.tools.allowed, ["@out/*"]);
  assert.equal(got.files["script.json"], '{"turns":[[{"say":"From the form."}]]}');
  await rules.getByLabel("Deny @out/fs_write").check();
  await save(p, "save-agent");
  await p.locator(`${id("tool-row")}[data-canonical="@out/fs_write"][data-allowed="false"]`).waitFor();
  const tool = p.locator(`${id("tool-row")}[data-canonical="@out/fs_write"]`);
  await tool.locator("summary").click();
  await tool.locator(id("tool-rule"), { hasText: "denied" }).waitFor();

  await bench.open(p, "sessions");
  await bench.start(p, "formed");
  await p.getByText("From the form.").waitFor();
});

test("a project is made, changed, and has workspaces", async (t) => {
  const p = await bench.loggedIn(t, { at: "projects" });
  await p.getByLabel("Name of a new project").fill("Second");
  await p.getByRole("button", { name: "Create" }).click();
  const card = p.locator("details", { hasText: "Second" });
  await card.locator("summary").click();
  await card.getByLabel("Description").fill("about it");
  await card.getByRole("button", { name: "Add" }).click();
  await card.getByLabel("Environment of its agents: name 1").fill("KEY");
  await card.getByLabel("Environment of its agents: value of KEY").fill("secret");
  await card.getByLabel("Memory, MiB").fill("512");
  await save(p, card.getByRole("button", { name: "Save" }));
  await toast(p, "Saved Second");
  const { projects } = await bench.api("project_list", { name_contains: "Second" });
  assert.deepEqual([projects[0].description, projects[0].env, projects[0].sandbox.memory_mb], ["about it", { KEY: "***" }, 512]);
  await card.getByLabel("Name of a new workspace").fill("aside");
  await card.getByRole("button", { name: "New workspace" }).click();
  await card.getByText("aside").waitFor();
  p.on("dialog", (dialog) => dialog.accept());
  await card.locator("li", { hasText: "aside" }).getByRole("button", { name: "Delete" }).click();
  await card.getByText("aside").waitFor({ state: "detached" });
});

test("what is streamed grows downwards only", async (t) => {
  const text = Array.from({ length: 60 }, (_, i) => [{ say: `Line ${i} of a long story.\n\n` }, { sleep_ms: 5 }]).flat();
  await server.putAgent("teller", bench.admin, [text], { name: "Teller" });
  const p = await bench.loggedIn(t);
  await bench.start(p, "teller", "Tell");
  const message = p.locator(`${row("message")}, ${row("delta")}`).last();
  await p.getByText("Line 0 of").waitFor();
  // From the first line to the whole message it is one and the same element, at one place.
  await p.evaluate(() => (window.first = document.querySelector("[data-testid=timeline] > article:not([data-role=user])")));
  await p.waitForSelector(row("turn_completed"));
  assert.ok(await p.evaluate(() => window.first.isConnected && window.first.dataset.type === "message"), "the message is not made anew");
  await message.getByText("Line 59 of").waitFor();
});

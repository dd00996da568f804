// Calls that wait for a person, in the console: the inbox, the place in the timeline, the decision.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, id, row, save, toast } from "./console-browser.mjs";
import { until } from "./harness.mjs";

const IMG = '<img src=x onerror="window.ran=1">';

let bench, server, project;
before(async () => {
  bench = await Bench.start();
  server = bench.server;
  project = (await bench.api("project_create", { name: "Careful" })).project_id;
  await bench.api("catalog_put", { id: "out", definition: { id: "out", kind: "builtin", builtinPolicy: { name: "fs_write", allowedPaths: ["./"] } } });
  await bench.api("catalog_put", { id: "shell", definition: { id: "shell", kind: "builtin", builtinPolicy: { name: "shell_exec", allowedCommands: ["echo"], timeoutMs: 600000 } } });
  const write = (path) => ({ call: { tool: "@out/fs_write", arguments: { path, content: `# ${path}\n\u202Egnp.exe ${IMG}\n` } } });
  const echo = (...words) => ({ call: { tool: "@shell/shell_exec", arguments: { argv: ["echo", ...words] } } });
  await server.putAgent("writer", bench.admin, [[write("a.md"), { say: "Written." }]], { name: "Writer", tools: { use: ["out"], ask: ["@out/fs_write"] } });
  const when = { properties: { argv: { contains: { const: "loud" } } } };
  await server.putAgent("speaker", bench.admin, [[echo("quiet"), echo("loud", "one two"), echo("loud", "again"), { say: "Said." }]], { name: "Speaker", tools: { use: ["shell"], ask: [{ tool: "@shell/*", when }] } });
});
after(() => bench?.close());

const start = (agent) => bench.api("session_message", { message: `${agent}, go`, project_id: project, agent });
const title = (p, text) => p.waitForFunction((text) => document.title === text, text);
const card = (p, session_id) => p.locator(`${id("approval")}:has(a[href="#/sessions/${session_id}"])`);

test("a call that waits is in the inbox and the title at once, and is allowed by keyboard", async (t) => {
  const p = await bench.loggedIn(t, { at: "approvals" });
  await p.getByText("Nothing waits for you").waitFor();
  await title(p, "Approvals · Oubliette");
  const { session_id } = await start("writer");
  const asked = card(p, session_id);
  await asked.waitFor();
  await title(p, "(1) Approvals · Oubliette");
  await p.locator(id("approval-count"), { hasText: /^1$/ }).waitFor();
  // The file and its text are laid out, and what would hide in it is written out.
  await asked.locator(".path", { hasText: /^a\.md$/ }).waitFor();
  assert.match(await asked.locator("pre").innerText(), /# a\.md\n⟨202E⟩gnp\.exe <img/);
  assert.equal(await p.evaluate(() => window.ran), undefined);
  assert.equal(await p.locator("#app img").count(), 0);
  // The first page counts it as waiting, not as running, and leads to this very card, where the keys decide.
  await bench.open(p, "");
  await p.locator("[data-tile=waiting] .big", { hasText: /^1$/ }).waitFor();
  await p.locator("[data-tile=running] .big", { hasText: /^0$/ }).waitFor();
  await p.locator(".home .rowlist a", { hasText: "a.md" }).click();
  await p.locator(`${id("approval")}:focus`).waitFor();
  assert.match(p.url(), /approvals\?approval=appr_/);
  await p.keyboard.press("a");
  await toast(p, "Allowed once");
  await p.locator(`${id("decided")} [data-decision="allowed"]`).first().waitFor();
  await title(p, "Approvals · Oubliette");
  await until(async () => (await bench.api("session_get", { session_id })).status === "idle", "the turn to end");
  const { events } = await bench.api("session_events", { session_id, max_events: 1000 });
  assert.equal(events.find((e) => e.type === "tool_result").ok, true);
});

test("a call is denied with a reason beside its place in the timeline", async (t) => {
  const { session_id } = await start("writer");
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  const asked = p.locator(`${row("approval_requested")}[data-decision="pending"]`);
  await asked.waitFor();
  await p.locator(id("session-status"), { hasText: "waiting for you" }).waitFor();
  await p.locator(id("pending")).getByRole("button", { name: "Show" }).click();
  await p.keyboard.press("d");
  await asked.getByLabel("Reason").fill("not today");
  await p.keyboard.press("Enter");
  await toast(p, "Denied");
  await p.locator(`${row("approval_requested")}[data-decision="denied"]`).waitFor();
  await p.locator(`${row("tool_result")}[data-ok="false"]`, { hasText: "not today" }).waitFor();
  await p.locator(id("session-status"), { hasText: "idle" }).waitFor();
});

test("allowed for the session, the same rule asks no more; a command is shown as one", async (t) => {
  const { session_id } = await start("speaker");
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  const asked = p.locator(`${row("approval_requested")}[data-decision="pending"]`);
  await asked.waitFor();
  assert.equal(await asked.locator("pre.command").innerText(), "echo loud 'one two'");
  await asked.locator(id("allow-session")).click();
  await toast(p, "for the rest of this session");
  await p.waitForSelector(row("turn_completed"));
  assert.equal(await p.locator(row("approval_requested")).count(), 1, "the second loud call passes");
  assert.equal(await p.locator(`${row("tool_call")}`).count(), 3);
});

test("a key pressed for one call does not decide the next", async (t) => {
  const first = (await start("writer")).session_id;
  const p = await bench.loggedIn(t, { at: "approvals" });
  await card(p, first).waitFor();
  const second = (await start("writer")).session_id;
  await card(p, second).waitFor();
  // As soon as the second card has the focus, before anybody could have read it.
  await p.evaluate((second) => {
    window.pressed = 0;
    document.addEventListener("focusin", ({ target }) => {
      if (!target.matches?.("[data-testid=approval]") || !target.querySelector(`a[href="#/sessions/${second}"]`) || window.pressed++) return;
      target.dispatchEvent(new KeyboardEvent("keydown", { key: "a", bubbles: true }));
    });
  }, second);
  await card(p, first).focus();
  await p.keyboard.press("a");
  await toast(p, "Allowed once");
  await p.waitForFunction(() => window.pressed === 1);
  assert.equal((await bench.api("approval_list", { session_id: first })).approvals[0].status, "allowed");
  const asked = async () => (await bench.api("approval_list", { session_id: second })).approvals[0].status;
  assert.equal(await asked(), "pending");
  await until(async () => {
    if ((await asked()) === "pending") await p.keyboard.press("d");
    return p.locator(id("deny-confirm")).isVisible();
  }, "a later key to be taken");
  await p.keyboard.type("read it first");
  await p.keyboard.press("Enter");
  // The reason stands in the line of the decision.
  await p.locator(`${id("decided")} [data-decision="denied"] summary`, { hasText: "read it first" }).waitFor();
});

test("a token that may only read sees what waits and cannot decide; a decision elsewhere is shown", async (t) => {
  const { session_id } = await start("writer");
  const p = await bench.loggedIn(t, { token: server.token("read"), at: "approvals" });
  const asked = card(p, session_id);
  await asked.waitFor();
  await asked.getByText("Your token may only read").waitFor();
  assert.equal(await asked.getByRole("button", { name: /Allow|Deny/ }).count(), 0);
  const { approvals } = await bench.api("approval_list", { session_id, status: "pending" });
  await bench.api("approval_decide", { approval_id: approvals[0].approval_id, decision: "deny", reason: "by somebody else" });
  await asked.waitFor({ state: "detached" });
  await p.locator(`${id("decided")} [data-decision="denied"]`).first().waitFor();
});

test("an agent's rules ask: ticked in the table, written with a condition", async (t) => {
  const p = await bench.loggedIn(t, { at: "agents/speaker" });
  const rules = p.locator(id("allow-table"));
  const box = rules.getByLabel("Ask before @shell/shell_exec");
  await box.and(p.locator(":checked")).waitFor();
  assert.ok(await box.isDisabled(), "it comes from an entry with a condition");
  await p.fill(id("ask"), "");
  await box.check();
  await save(p, "save-agent");
  await toast(p, "Saved speaker");
  assert.deepEqual((await bench.api("agent_get", { slug: "speaker" })).definition.tools.ask, ["@shell/shell_exec"]);
});

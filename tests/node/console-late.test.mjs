// Answers that come late: they overwrite nothing a person has typed, and pull nobody back from where they went.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Bench, id, save, toast } from "./console-browser.mjs";

let bench, server, project;
before(async () => {
  bench = await Bench.start();
  server = bench.server;
  project = (await bench.api("project_create", { name: "Late" })).project_id;
  await server.putAgent("first", bench.admin, [[{ say: "First." }]], { name: "First", description: "the first" });
  await server.putAgent("second", bench.admin, [[{ say: "Second." }]], { name: "Second", description: "the second" });
  const builtin = (which) => ({ id: which, kind: "builtin", description: `the ${which}`, builtinPolicy: { name: "fs_read", allowedPaths: ["./"] } });
  for (const which of ["slow", "quick"]) await bench.api("catalog_put", { id: which, definition: builtin(which) });
  const { workspaces } = await bench.api("workspace_list", { project_id: project });
  const files = `${server.url}/api/workspaces/${workspaces[0].workspace_id}/files`;
  for (const path of ["slow/a.txt", "quick/b.txt"]) {
    const put = await fetch(`${files}/${path}`, { method: "PUT", headers: { authorization: `Bearer ${bench.admin}` }, body: path });
    assert.ok(put.ok, await put.text());
  }
});
after(() => bench?.close());

/** Holds the answers to what `which` picks until they are let go; says when the first is asked for. */
async function hold(page, path, which = () => true, first = async () => {}) {
  let release, asked;
  let over = false;
  const held = new Promise((resolve) => (release = resolve));
  const seen = new Promise((resolve) => (asked = resolve));
  await page.route(path, async (route) => {
    if (over || !which(route.request())) return route.fallback();
    await first();
    // The server has done what it was asked; only its answer is late.
    const answer = await route.fetch();
    asked();
    await held;
    await route.fulfill({ response: answer });
  });
  return { seen, release: () => ((over = true), release()) };
}
const asks = (field, value) => (request) => request.postDataJSON()?.[field] === value;

test("a definition is not there to be written into before it has arrived", async (t) => {
  const p = await bench.loggedIn(t, { at: "figures" });
  let asked = 0;
  p.on("request", (request) => request.url().endsWith("agent_get") && asked++);
  const late = await hold(p, "**/api/tools/agent_get", asks("slug", "first"));
  await bench.open(p, "agents/first");
  await late.seen;
  await p.locator("main", { hasText: "Loading…" }).waitFor();
  assert.equal(await p.locator("main input, main textarea").count(), 0, "there is no field yet");
  late.release();
  const about = p.getByLabel("Description");
  await about.fill("typed by hand");
  assert.equal(await about.inputValue(), "typed by hand");
  // A second answer would take away what was typed before it came.
  assert.equal(asked, 1, "it is asked for once");
});

test("an agent or entry left behind does not come over the one that is open", async (t) => {
  const p = await bench.loggedIn(t, { at: "figures" });
  for (const [page, name, ask, slow, quick] of [["agents", "agent_get", "slug", "first", "second"], ["catalog", "catalog_get", "id", "slow", "quick"]]) {
    const late = await hold(p, `**/api/tools/${name}`, asks(ask, slow));
    await bench.open(p, `${page}/${slow}`);
    await late.seen;
    await bench.open(p, `${page}/${quick}`);
    const about = p.getByLabel("Description");
    await about.waitFor();
    assert.equal(await about.inputValue(), `the ${quick}`);
    const answered = p.waitForResponse((r) => r.url().endsWith(name));
    late.release();
    await answered;
    await p.evaluate(() => new Promise(requestAnimationFrame));
    assert.equal(await about.inputValue(), `the ${quick}`, page);
  }
});

test("a save that ends late leaves what was typed on, and whoever has left, alone", async (t) => {
  const p = await bench.loggedIn(t, { at: "agents/first" });
  const about = p.getByLabel("Description");
  await about.fill("saved");
  const put = await hold(p, "**/api/tools/agent_put");
  await save(p, "save-agent");
  await put.seen;
  await about.fill("saved, and typed on");
  put.release();
  await toast(p, "Saved first");
  assert.equal(await about.inputValue(), "saved, and typed on");
  const again = await hold(p, "**/api/tools/agent_put");
  await save(p, "save-agent");
  await again.seen;
  await p.click("nav a[href='#/figures']");
  await p.getByText("Busiest tools").first().waitFor();
  again.release();
  await toast(p, "Saved first");
  assert.match(p.url(), /#\/figures$/);

  // A project's settings, likewise.
  await bench.open(p, "projects");
  const card = p.locator(`[data-project="${project}"]`);
  await card.locator("summary").first().click();
  const purpose = card.getByLabel("Description");
  await purpose.fill("one");
  const update = await hold(p, "**/api/tools/project_update");
  await save(p, card.getByRole("button", { name: "Save" }));
  await update.seen;
  await purpose.fill("one and two");
  update.release();
  await toast(p, "Saved Late");
  assert.equal(await purpose.inputValue(), "one and two");
  await save(p, card.getByRole("button", { name: "Save" }));
  await p.waitForFunction((mark) => document.querySelector(`[data-project="${mark}"] form.editor button[type=submit]`).disabled, project);
  assert.equal((await bench.api("project_get", { project_id: project })).description, "one and two");

  // What is set can be taken away.
  const agent = card.getByLabel("Agent when none is named");
  for (const [to, want] of [["first", "first"], ["", undefined]]) {
    await agent.selectOption(to);
    const saved = p.waitForResponse("**/api/tools/project_update");
    await save(p, card.getByRole("button", { name: "Save" }));
    await (await saved).finished();
    assert.equal((await bench.api("project_get", { project_id: project })).agent ?? undefined, want);
  }
});

test("a session that starts late pulls nobody back", async (t) => {
  const p = await bench.loggedIn(t);
  await p.waitForSelector(`${id("agent-picker")} option[value="first"]`, { state: "attached" });
  const late = await hold(p, "**/api/tools/session_message");
  await p.fill(id("composer"), "start slowly");
  await p.click(id("send"));
  await late.seen;
  await bench.open(p, "projects");
  await p.getByLabel("Name of a new project").fill("being typed");
  // The list is asked for once more when it has started.
  const listed = p.waitForResponse((r) => r.url().endsWith("session_list"));
  late.release();
  await (await listed).finished();
  await p.evaluate(() => new Promise(requestAnimationFrame));
  assert.match(p.url(), /#\/projects$/);
  assert.equal(await p.getByLabel("Name of a new project").inputValue(), "being typed");
});

test("of two folders opened one after the other, the second is shown", async (t) => {
  const p = await bench.loggedIn(t, { at: "projects" });
  await p.locator(`[data-project="${project}"] summary`).first().click();
  await p.getByRole("button", { name: "Files" }).first().click();
  const panel = p.locator(id("files-panel"));
  await panel.getByRole("button", { name: "slow" }).waitFor();
  const late = await hold(p, "**/files/slow");
  await panel.getByRole("button", { name: "slow" }).click();
  await late.seen;
  await panel.getByRole("button", { name: "quick" }).click();
  await panel.getByRole("button", { name: "b.txt" }).waitFor();
  const answered = p.waitForResponse("**/files/slow");
  late.release();
  await answered;
  await p.evaluate(() => new Promise(requestAnimationFrame));
  await panel.getByText("/workspace/quick").waitFor();
  assert.equal(await panel.getByRole("button", { name: "a.txt" }).count(), 0);
});

test("a refusal of the login before does not end the next one", async (t) => {
  const made = await bench.api("token_create", { name: "short", scope: "admin" });
  const p = await bench.loggedIn(t, { token: made.token, at: "admin/doctor" });
  await p.waitForSelector(id("doctor"));
  const revoke = () => bench.api("token_revoke", { token_id: made.token_id });
  const late = await hold(p, "**/api/tools/doctor", undefined, revoke);
  await p.getByRole("button", { name: "Look again" }).click();
  await late.seen;
  // Whatever else the page asks next ends its login; nothing is clicked that this may have covered.
  await p.evaluate(() => (location.hash = "#/sessions"));
  await p.waitForSelector(id("login-token"));
  await bench.login(p);
  await p.waitForSelector(id("session-list"));
  const answered = p.waitForResponse((r) => r.url().endsWith("doctor"));
  late.release();
  assert.equal((await answered).status(), 401);
  await p.evaluate(() => new Promise(requestAnimationFrame));
  assert.equal(await p.locator(id("login-token")).count(), 0, "still logged in");
});

test("a file that is being read stays open while the list of sessions is looked at again", async (t) => {
  const { session_id } = await bench.api("session_message", { message: "go", project_id: project, agent: "first", wait: true });
  const p = await bench.loggedIn(t, { at: `sessions/${session_id}` });
  await p.getByRole("button", { name: "Files", exact: true }).click();
  const panel = p.locator(id("files-panel"));
  await panel.getByRole("button", { name: "quick" }).click();
  await panel.getByRole("button", { name: "b.txt" }).click();
  await p.locator(id("file-text"), { hasText: "quick/b.txt" }).waitFor();
  for (let i = 0; i < 2; i++) await (await p.waitForResponse((r) => r.url().endsWith("session_list"))).finished();
  await p.evaluate(() => new Promise(requestAnimationFrame));
  assert.ok(await p.locator(id("file-text")).isVisible());
});

test("what is chosen for a session before its project is known stays chosen", async (t) => {
  const p = await bench.loggedIn(t, { at: "figures" });
  const late = await hold(p, "**/api/tools/project_list");
  await bench.open(p, "sessions");
  await late.seen;
  await p.getByLabel("Workspace").selectOption("new");
  const listed = p.waitForResponse((r) => r.url().endsWith("workspace_list"));
  late.release();
  await (await listed).finished();
  await p.evaluate(() => new Promise(requestAnimationFrame));
  assert.equal(await p.getByLabel("Workspace").inputValue(), "new");
});

// The TypeScript client against the real server: sessions, files and events; and its package, as it is published.
// Lending is in tests/callers.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { gunzipSync } from "node:zlib";
import { DEADLINE, ROOT, Server } from "./harness.mjs";

const CLIENT = join(ROOT, "clients/typescript");
if (!existsSync(join(CLIENT, "dist/index.js"))) {
  const quiet = { cwd: CLIENT, stdio: "ignore" };
  execFileSync("npm", ["install", "--ignore-scripts", "--no-save", "--no-audit", "--no-fund"], quiet);
  execFileSync("npm", ["run", "build"], quiet);
}
const { Oubliette, isRefused } = await import(join(CLIENT, "dist/index.js"));

let server, admin, client, project;

before(async () => {
  server = await Server.start();
  admin = server.token("admin");
  client = new Oubliette(server.url, server.token("write"));
  project = (await server.api("project_create", admin, { name: "ts" })).project_id;
  await server.putAgent("talker", admin, [[{ say: "first" }], [{ say: "second" }]]);
});

after(() => server?.close());

test("files of a workspace come and go, and its archive holds them", { timeout: DEADLINE }, async () => {
  const { workspaces } = client;
  const { workspace_id } = await workspaces.create({ project_id: project, name: "files" });
  const content = "text of a file, ü\n";
  await workspaces.writeFile(workspace_id, "notes/a b?.txt", content);
  await workspaces.writeFile(workspace_id, "bytes", new Uint8Array([0, 255, 10]));
  assert.equal(await workspaces.readText(workspace_id, "notes/a b?.txt"), content);
  assert.deepEqual(await workspaces.readFile(workspace_id, "bytes"), new Uint8Array([0, 255, 10]));
  const { entries } = await workspaces.listFolder(workspace_id);
  assert.deepEqual(entries.map(({ name }) => name).sort(), ["bytes", "notes"]);
  const packed = await new Response(await workspaces.archive(workspace_id)).arrayBuffer();
  assert.ok(gunzipSync(Buffer.from(packed)).includes(Buffer.from(content)));
  await workspaces.deleteFile(workspace_id, "notes/a b?.txt");
  await assert.rejects(workspaces.readFile(workspace_id, "notes/a b?.txt"), (error) => isRefused(error, "not_found"));
  assert.ok((await workspaces.list({ project_id: project })).workspaces.some((one) => one.workspace_id === workspace_id));
  await workspaces.delete(workspace_id);
  await assert.rejects(workspaces.listFolder(workspace_id), (error) => isRefused(error, "not_found"));
});

test("events are followed across a kill of the server, each once and in order", { timeout: DEADLINE }, async () => {
  const { sessions } = client;
  const { session_id } = await sessions.message("go", { project_id: project, agent: "talker" });
  const heard = [];
  for await (const event of sessions.follow(session_id)) {
    heard.push(event);
    if (event.type === "turn_completed" && event.turn === 1) {
      await server.stop("SIGKILL");
      await server.run();
      await sessions.message("again", { session_id });
    }
    if (event.type === "turn_completed" && event.turn === 2) await sessions.end(session_id);
  }
  assert.deepEqual(heard.map(({ index }) => index), [...heard.keys()]);
  assert.deepEqual(heard.filter(({ type }) => type === "turn_completed").map(({ text }) => text), ["first", "second"]);
  assert.equal(heard.at(-1).status, "ended");
  const log = await sessions.events(session_id, { max_events: 1000 });
  assert.deepEqual(heard, log.events);
  assert.equal((await sessions.get(session_id)).status, "ended");
  assert.ok((await sessions.list({ project_id: project })).sessions.some((one) => one.session_id === session_id));
  await assert.rejects(sessions.message("more", { session_id }), (error) => isRefused(error, "conflict"));
});

test("calls of lent functions wait until the program allows or denies them", { timeout: DEADLINE }, async () => {
  const ask = (text) => ({ call: { tool: "myapp_note", arguments: { text } } });
  await server.putAgent("asker", admin, [[ask("one"), ask("two"), { say: "done" }]], { tools: { ask: ["myapp_note"] } });
  const [noted, results, decisions] = [[], [], []];
  const asked = new Map([["one", (id) => client.approvals.allow(id)], ["two", (id) => client.approvals.deny(id, { reason: "not that one" })]]);
  const session = await client
    .lend("myapp")
    .tool("note", { inputSchema: { type: "object", properties: { text: { type: "string" } } } }, ({ text }) => noted.push(text))
    .onEvent((event) => {
      if (event.type === "approval_requested") decisions.push(asked.get(event.arguments.text)(event.approval_id));
      if (event.type === "tool_result") results.push(event);
    })
    .start("go", { project_id: project, agent: "asker" });
  assert.equal((await session.turn()).text, "done");
  assert.deepEqual(noted, ["one"]);
  assert.deepEqual(results.map(({ ok }) => ok), [true, false]);
  assert.match(JSON.stringify(results[1]), /not that one/);
  const { approvals } = await client.approvals.list({ session_id: session.id });
  assert.deepEqual(approvals.map(({ status }) => status).sort(), ["allowed", "denied"]);
  await assert.rejects(client.approvals.allow(approvals[0].approval_id), (error) => isRefused(error, "conflict"));
  await session.end();
  assert.deepEqual((await Promise.all(decisions)).map(({ status }) => status), ["allowed", "denied"]);
});

test("the package holds what a program needs, and works where it is installed", { timeout: DEADLINE }, (t) => {
  const folder = mkdtempSync(join(tmpdir(), "oub"));
  t.after(() => rmSync(folder, { recursive: true, force: true }));
  const run = (command, args, cwd) => execFileSync(command, args, { cwd, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
  const [packed] = JSON.parse(run("npm", ["pack", "--json", "--ignore-scripts", "--pack-destination", folder], CLIENT));
  const names = packed.files.map(({ path }) => path);
  for (const name of ["LICENSE-APACHE", "LICENSE-MIT", "README.md", "dist/index.js", "dist/index.d.ts", "examples/lend.mjs"]) {
    assert.ok(names.includes(name), `${name} is missing`);
  }
  assert.ok(!names.some((name) => name.startsWith("tests/") || name.startsWith("node_modules/")));
  writeFileSync(join(folder, "package.json"), JSON.stringify({ private: true, type: "module" }));
  run("npm", ["install", "--offline", "--no-audit", "--no-fund", join(folder, packed.filename)], folder);
  const program = 'import { Oubliette } from "oubliette-caller"; console.log(new Oubliette("http://127.0.0.1:1", "t").address)';
  assert.equal(run(process.execPath, ["--input-type=module", "--eval", program], folder).trim(), "http://127.0.0.1:1/");
});

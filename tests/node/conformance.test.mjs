// The MCP conformance suite, pinned, against the real server in both lifecycles. A baseline file a revision names the
// scenarios that need fixtures Oubliette does not have; the suite's exit code covers the scored ones, and what it wrote
// down covers the rest.
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { BIN, HERE, Server } from "./harness.mjs";

/** How long each baseline is. A number may only go down. */
const BASELINES = { "2025-11-25": 14, "2026-07-28": 24 };

const SUITE = join(HERE, "node_modules/@modelcontextprotocol/conformance/dist/index.js");
const FLAG = "--test-fixtures";

let server, token;
before(async () => {
  server = await Server.start({ args: [FLAG], env: { OUBLIETTE_TEST_FIXTURES: "1" } });
  token = server.token("admin");
  // A session, so that there is a resource to list and read.
  await server.putAgent("quiet", token, [[{ say: "hello" }]]);
  const { project_id } = await server.api("project_create", token, { name: "conformance" });
  await server.api("session_message", token, { project_id, agent: "quiet", message: "go" });
});
after(() => server?.close());

/** The scenarios of a run that did not go well, warnings included. */
function failing(folder) {
  const bad = [];
  for (const name of readdirSync(folder)) {
    const scenario = name.match(/^server-(.+)-\d{4}-\d\d-\d\dT/)[1];
    const checks = JSON.parse(readFileSync(join(folder, name, "checks.json"), "utf8"));
    if (checks.some((c) => c.status === "FAILURE" || c.status === "WARNING")) bad.push(scenario);
  }
  return bad.sort();
}

for (const [revision, most] of Object.entries(BASELINES)) {
  test(`conformance ${revision}`, { timeout: 600_000 }, async () => {
    const baseline = join(HERE, `conformance-${revision}.yaml`);
    const expected = [...readFileSync(baseline, "utf8").matchAll(/^ +- (\S+)$/gm)].map((m) => m[1]).sort();
    assert.ok(expected.length <= most, `${baseline} has grown to ${expected.length} names`);
    assert.equal(expected.length, most, `${baseline} is down to ${expected.length} names: write that number down here`);

    const folder = mkdtempSync(join(tmpdir(), "conformance"));
    try {
      const args = ["--import", join(HERE, "bearer-preload.mjs"), SUITE, "server", "--url", `${server.url}/mcp`];
      args.push("--requirements", revision, "--expected-failures", baseline, "--output-dir", folder);
      const run = spawn(process.execPath, args, { env: { ...process.env, OUBLIETTE_TOKEN: token } });
      let output = "";
      run.stdout.on("data", (d) => (output += d));
      run.stderr.on("data", (d) => (output += d));
      const code = await new Promise((done) => run.on("close", done));
      assert.equal(code, 0, output.slice(-6000));
      assert.deepEqual(failing(folder), expected);
    } finally {
      rmSync(folder, { recursive: true, force: true });
    }
  });
}

test("nobody gets the fixtures who did not ask twice", () => {
  const env = { ...process.env, OUBLIETTE_TEST_FIXTURES: "" };
  const run = (...args) => spawnSync(join(BIN, "oubliette"), ["--home", server.home, ...args], { env, encoding: "utf8" });
  const refused = run("serve", FLAG);
  assert.equal(refused.status, 1, refused.stdout);
  assert.match(refused.stderr, /OUBLIETTE_TEST_FIXTURES=1/);
  assert.ok(!run("serve", "--help").stdout.includes(FLAG));
});

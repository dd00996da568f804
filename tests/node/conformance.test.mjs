// The MCP conformance suite, pinned, against the real server in both lifecycles. The baseline files name the
// scenarios that need fixture tools Oubliette does not have; a name may leave them, none may join.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { HERE, Server } from "./harness.mjs";

let server, token;
before(async () => {
  server = await Server.start({ env: { OUBLIETTE_TEST_FIXTURES: "1" } });
  token = server.token("admin");
});
after(() => server?.close());

for (const revision of ["2025-11-25", "2026-07-28"]) {
  test(`conformance ${revision}`, { timeout: 600_000 }, async () => {
    const args = [
      "--import", join(HERE, "bearer-preload.mjs"),
      join(HERE, "node_modules/@modelcontextprotocol/conformance/dist/index.js"),
      "server", "--url", `${server.url}/mcp`, "--requirements", revision,
      "--expected-failures", join(HERE, `conformance-${revision}.yaml`),
    ];
    const run = spawn(process.execPath, args, { env: { ...process.env, OUBLIETTE_TOKEN: token } });
    let output = "";
    run.stdout.on("data", (d) => (output += d));
    run.stderr.on("data", (d) => (output += d));
    const code = await new Promise((done) => run.on("exit", done));
    assert.equal(code, 0, output.slice(-6000));
  });
}

// The TypeScript SDKs as callers: the 1.x client (revisions up to 2025-11-25) and the 2.x client (both lifecycles).
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Client as OldClient } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport as OldTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { ElicitRequestSchema, LoggingMessageNotificationSchema } from "@modelcontextprotocol/sdk/types.js";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { DEADLINE, Server } from "./harness.mjs";

let server, admin, project;
before(async () => {
  server = await Server.start();
  admin = server.token("admin");
  project = (await server.api("project_create", admin, { name: "sdk" })).project_id;
});
after(() => server?.close());

const headers = () => ({ requestInit: { headers: { Authorization: `Bearer ${admin}` } } });

async function oldClient(onEvent) {
  const client = new OldClient({ name: "test", version: "1" });
  if (onEvent) client.setNotificationHandler(LoggingMessageNotificationSchema, (n) => onEvent(n.params));
  await client.connect(new OldTransport(new URL(`${server.url}/mcp`), headers()));
  return client;
}

test("the 1.x client lists, calls and closes", async () => {
  const client = await oldClient();
  const { tools } = await client.listTools();
  assert.ok(tools.some((t) => t.name === "session_message"));
  const made = await client.callTool({ name: "project_create", arguments: { name: "from ts" } });
  assert.match(made.structuredContent.project_id, /^proj_/);
  await client.close();
});

test("the 1.x client lends a tool and hears the request on its GET stream", { timeout: 2 * DEADLINE }, async () => {
  await server.putAgent("lender", admin, [[{ call: { tool: "myapp_add", arguments: { a: 2, b: 3 } } }, { say: "added" }]]);
  const events = [];
  let completed;
  const turn = new Promise((done) => (completed = done));
  const client = await oldClient(async ({ logger, level, data }) => {
    if (logger !== "oubliette.session") return;
    assert.equal(level, "info");
    events.push(data);
    if (data.type === "caller_tool_request") {
      const { session_id, request_id, arguments: args } = data;
      await client.callTool({
        name: "caller_tool_response",
        arguments: { session_id, request_id, result: { sum: args.a + args.b } },
      });
    }
    if (data.type === "turn_completed") completed(data);
  });
  const context = { caller_id: "myapp", caller_tools: [{ name: "add" }] };
  await client.callTool({ name: "session_message", arguments: { message: "go", project_id: project, agent: "lender", context } });
  assert.equal((await turn).text, "added");
  const result = events.find((e) => e.type === "tool_result");
  assert.ok(result.ok && JSON.stringify(result).includes('"sum"'));
  await client.close();
});

for (const mode of ["legacy", "auto"]) {
  test(`the 2.x client calls in mode ${mode}`, async () => {
    const client = new Client({ name: "test", version: "1" }, mode === "auto" ? { versionNegotiation: { mode: "auto" } } : {});
    await client.connect(new StreamableHTTPClientTransport(new URL(`${server.url}/mcp`), headers()));
    const listed = await client.callTool({ name: "project_list", arguments: {} });
    assert.ok(listed.structuredContent.projects.length >= 1);
    await client.close();
  });
}

// Asked about an approval in the client's own form, while session_message with wait is open.
const elicitationClients = {
  "1.x": async (answer) => {
    const client = new OldClient({ name: "test", version: "1" }, { capabilities: { elicitation: {} } });
    client.setRequestHandler(ElicitRequestSchema, answer);
    await client.connect(new OldTransport(new URL(`${server.url}/mcp`), headers()));
    return client;
  },
  "2.x": async (answer) => {
    const options = { capabilities: { elicitation: {} }, versionNegotiation: { mode: "auto" } };
    const client = new Client({ name: "test", version: "1" }, options);
    client.setRequestHandler("elicitation/create", answer);
    await client.connect(new StreamableHTTPClientTransport(new URL(`${server.url}/mcp`), headers()));
    return client;
  },
};
for (const [version, connect] of Object.entries(elicitationClients)) {
  test(`the ${version} client is asked about an approval`, { timeout: 2 * DEADLINE }, async () => {
    const agent = `asking-${version[0]}`;
    await server.putAgent(agent, admin, [[{ call: { tool: "project_list", arguments: {} } }, { say: "listed" }]], { tools: { ask: ["project_list"] } });
    const questions = [];
    const client = await connect((request) => {
      questions.push(request.params.message);
      return { action: "accept", content: { decision: "allow" } };
    });
    const sent = { name: "session_message", arguments: { message: "go", project_id: project, agent, wait: true } };
    const done = await client.callTool(sent);
    assert.match(done.structuredContent.text, /listed$/);
    assert.equal(questions.length, 1);
    assert.match(questions[0], /project_list/);
    const { approvals } = await server.api("approval_list", admin, { session_id: done.structuredContent.session_id });
    assert.deepEqual(approvals.map((a) => a.status), ["allowed"]);
    await client.close();
  });
}

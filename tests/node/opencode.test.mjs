// OpenCode in the sandbox, driven by the 1.x TypeScript SDK over the old lifecycle's GET stream.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { join } from "node:path";
import { test } from "node:test";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { LoggingMessageNotificationSchema } from "@modelcontextprotocol/sdk/types.js";
import { HERE, Server } from "./harness.mjs";

/** A scripted model standing in for a paid one: it asks for one tool, then says what came back. */
function scriptedModel(suffix, args) {
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (d) => (body += d));
    request.on("end", () => {
      const asked = body ? JSON.parse(body) : {};
      const tools = (asked.tools ?? []).map((t) => t.function.name);
      const results = (asked.messages ?? []).filter((m) => m.role === "tool");
      const name = tools.find((t) => t.endsWith(suffix));
      const delta =
        tools.length && !results.length && name
          ? { role: "assistant", tool_calls: [{ index: 0, id: "call_0", type: "function", function: { name, arguments: JSON.stringify(args) } }] }
          : { role: "assistant", content: results.length ? `The tool said: ${results.map((m) => m.content).join(" ")}` : "A title" };
      const chunk = (delta, finish_reason) =>
        `data: ${JSON.stringify({ id: "c", object: "chat.completion.chunk", created: 0, model: "m", choices: [{ index: 0, delta, finish_reason }] })}\n\n`;
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.end(chunk(delta, null) + chunk({}, delta.tool_calls ? "tool_calls" : "stop") + "data: [DONE]\n\n");
    });
  });
  return new Promise((done) => server.listen(0, "127.0.0.1", () => done(server)));
}

test("OpenCode calls a caller's tool and finishes its turn", { timeout: 180_000 }, async () => {
  const model = await scriptedModel("myapp_add", { a: 2, b: 3 });
  const modules = join(HERE, "node_modules");
  const config = `[providers.scripted]\nbase_url = "http://127.0.0.1:${model.address().port}"\n[trust]\nread_only = ["${modules}"]\n`;
  const server = await Server.start({ config });
  try {
    const admin = server.token("admin");
    const project = (await server.api("project_create", admin, { name: "p" })).project_id;
    const provider = {
      npm: "@ai-sdk/openai-compatible",
      name: "Scripted",
      options: { baseURL: "http://127.0.0.1:19999/scripted/v1", apiKey: "never-used" },
      models: { m: { name: "m", tool_call: true } },
    };
    const env = {
      OPENCODE_CONFIG_CONTENT: JSON.stringify({ provider: { scripted: provider }, model: "scripted/m", small_model: "scripted/m", autoupdate: false, share: "disabled" }),
      OPENCODE_DISABLE_MODELS_FETCH: "1",
      OPENCODE_DISABLE_AUTOUPDATE: "1",
      OPENCODE_DISABLE_LSP_DOWNLOAD: "1",
    };
    const command = [join(modules, "opencode-linux-x64/bin/opencode"), "acp"];
    const definition = { name: "OpenCode", prompt: "Do as you are told.", runtime: { kind: "acp", command, env, read_only: [modules] } };
    await server.api("agent_put", admin, { slug: "opencode", definition });

    let completed;
    const turn = new Promise((done) => (completed = done));
    const client = new Client({ name: "test", version: "1" });
    client.setNotificationHandler(LoggingMessageNotificationSchema, async ({ params: { data } }) => {
      if (data.type === "caller_tool_request") {
        const { session_id, request_id, arguments: args } = data;
        await client.callTool({ name: "caller_tool_response", arguments: { session_id, request_id, result: { sum: args.a + args.b } } });
      }
      if (["turn_completed", "error"].includes(data.type)) completed(data);
    });
    const headers = { Authorization: `Bearer ${admin}` };
    await client.connect(new StreamableHTTPClientTransport(new URL(`${server.url}/mcp`), { requestInit: { headers } }));
    const inputSchema = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } };
    const context = { caller_id: "myapp", caller_tools: [{ name: "add", inputSchema }] };
    await client.callTool({ name: "session_message", arguments: { message: "Add.", project_id: project, agent: "opencode", context } });
    const done = await turn;
    assert.equal(done.type, "turn_completed", JSON.stringify(done));
    assert.match(done.text, /"sum":\s*5/);
    await client.close();
  } finally {
    await server.close();
    model.close();
  }
});

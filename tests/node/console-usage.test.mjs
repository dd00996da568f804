// What model requests used, in the console: at each turn, in the session's header and list, on the usage page.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, before, test } from "node:test";
import { Bench, id, row } from "./console-browser.mjs";

/** A scripted model standing in for a paid one; it says one sentence and what that used. */
function scriptedModel() {
  const server = createServer((request, response) => {
    request.resume().on("end", () => {
      const chunk = (more) => `data: ${JSON.stringify({ id: "c", object: "chat.completion.chunk", created: 0, model: "m", ...more })}\n\n`;
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.end(
        chunk({ choices: [{ index: 0, delta: { role: "assistant", content: "Counted." }, finish_reason: null }] }) +
          chunk({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] }) +
          chunk({ choices: [], usage: { prompt_tokens: 1500, completion_tokens: 250, total_tokens: 1750, prompt_tokens_details: { cached_tokens: 500 } } }) +
          "data: [DONE]\n\n",
      );
    });
  });
  return new Promise((done) => server.listen(0, "127.0.0.1", () => done(server)));
}

let bench, model;
before(async () => {
  model = await scriptedModel();
  bench = await Bench.start(`[providers.scripted]\nbase_url = "http://127.0.0.1:${model.address().port}/v1"\n[prices."scripted/*"]\ninput = 1000.0\noutput = 2000.0\ncached = 100.0\n`);
  await bench.api("project_create", { name: "Counted" });
  await bench.api("agent_put", { slug: "counter", definition: { name: "Counter", prompt: "Count.", model: "scripted/m" } });
});
after(async () => {
  await bench?.close();
  model?.close();
});

test("usage stands at the turn, in the header, in the list and on its page", async (t) => {
  const p = await bench.loggedIn(t);
  const session_id = await bench.start(p, "counter", "Count this");
  await p.waitForSelector(row("turn_completed"));
  // 1000 fresh input tokens, 500 cached and 250 of output.
  const used = "$1.55 · 1.5k in · 250 out";
  await p.locator(`${row("turn_completed")} ${id("turn-usage")}`, { hasText: used }).waitFor();
  await p.locator(id("session-usage"), { hasText: used }).waitFor();
  await p.locator(`${id("session-list")} [data-session="${session_id}"]`, { hasText: used }).waitFor();
  await p.click(id("debugger-toggle"));
  await p.locator(`${id("debugger-row")}[data-kind="model_request"]`, { hasText: "1.5k in, 250 out" }).waitFor();
  assert.equal(await p.locator(`${id("waterfall")} .span`).count(), 1, "the model request is in the waterfall");

  await bench.open(p, "");
  await p.locator("[data-tile=usage] .big", { hasText: "$1.55" }).waitFor();
  await p.click("nav a[href='#/usage']");
  await p.locator(id("usage-cost"), { hasText: "$1.55" }).waitFor();
  await p.locator(id("usage-input"), { hasText: "1.5k" }).waitFor();
  await p.locator("[data-group=model] [data-key='scripted/m']").waitFor();
  await p.locator("[data-group=agent] [data-key=counter]").waitFor();
  await p.locator("[data-group=project] tbody tr", { hasText: "Counted" }).waitFor();
  await p.locator("[data-group=session] tbody tr", { hasText: "Count this" }).waitFor();
  await p.getByRole("img", { name: /^Tokens by day: .*1\.75k/ }).waitFor();
  await p.getByRole("button", { name: "Cost" }).click();
  await p.getByRole("img", { name: /^Cost by day: .*\$1\.55/ }).waitFor();
  assert.match(p.url(), /#\/usage\?by=cost$/);
});

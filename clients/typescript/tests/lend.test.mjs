// The package against a stub of the server.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EndedError, Oubliette, OublietteError, RefusedError, UnreachableError, isRefused } from "../dist/index.js";
import { Inbox, SESSION, Stub, TOKEN } from "./stub.mjs";

const NUMBER = {
  type: "object",
  properties: { n: { type: "integer" } },
  required: ["n"],
};

function scenario(name, run) {
  test(name, { timeout: 60_000 }, async (t) => run(await Stub.start(t), t));
}

/** A declaration whose `double` notes each run. */
function lender(stub, ran = [], options = {}) {
  return new Oubliette(stub.address, TOKEN).lend("myapp", options).tool("double", { description: "Doubles.", inputSchema: NUMBER }, ({ n }) => {
    ran.push(n);
    if (n === 13) throw new Error("unlucky");
    return n * 2;
  });
}

/** Starts a session that ends with the test. */
async function begin(stub, t, lend, options) {
  const session = await lend.start("go", options);
  t.after(() => session.stop());
  return session;
}

scenario("a function is declared, called and answered", async (stub, t) => {
  const session = await begin(stub, t, lender(stub));
  const message = await stub.called("session_message");
  assert.equal(message.message, "go");
  assert.deepEqual(message.context, {
    caller_id: "myapp",
    caller_tools: [{ name: "double", description: "Doubles.", inputSchema: NUMBER }],
  });
  assert.equal((await stub.opened.take()).caller_id, "myapp");
  stub.request("r1", { n: 1 });
  assert.deepEqual(await stub.answered(), ["r1", { result: 2 }]);
  stub.emit({ type: "turn_completed", turn: 1, stop_reason: "end_turn", text: "two" });
  assert.deepEqual(await session.turn(), { turn: 1, stop_reason: "end_turn", text: "two" });
});

scenario("what a function throws is the tool's error", async (stub, t) => {
  const cycle = {};
  cycle.cycle = cycle;
  const lend = lender(stub)
    .tool("odd", {}, () => cycle)
    .tool("text", {}, () => Promise.reject("no"))
    .tool("code", {}, () => () => {})
    .tool("nothing", {}, () => {});
  await begin(stub, t, lend);
  await stub.called("session_message");
  stub.request("a", { n: 13 });
  assert.deepEqual(await stub.answered(), ["a", { error: "unlucky" }]);
  stub.request("b", {}, { tool: "odd" });
  assert.match((await stub.answered())[1].error, /circular/);
  stub.request("c", {}, { tool: "text" });
  assert.deepEqual(await stub.answered(), ["c", { error: "no" }]);
  stub.request("d", {}, { tool: "gone" });
  assert.match((await stub.answered())[1].error, /gone/);
  stub.request("e", {}, { tool: "code" });
  assert.match((await stub.answered())[1].error, /not JSON/);
  stub.request("f", {}, { tool: "nothing" });
  assert.deepEqual(await stub.answered(), ["f", { result: null }]);
});

scenario("requests of others are left alone", async (stub, t) => {
  await begin(stub, t, lender(stub));
  await stub.called("session_message");
  stub.request("other", { n: 1 }, { caller_id: "other" });
  stub.request("mine", { n: 1 });
  assert.equal((await stub.answered())[0], "mine");
});

scenario("a lost stream is resumed, nothing runs twice and no event is heard twice", async (stub, t) => {
  const [ran, heard] = [[], []];
  await begin(stub, t, lender(stub, ran).onEvent((event) => heard.push(event.index)));
  await stub.called("session_message");
  await stub.opened.take();
  stub.request("r1", { n: 1 });
  await stub.answered();
  stub.hangUp();
  const { since_index, last } = await stub.opened.take();
  assert.deepEqual([since_index, last], ["0", "0"]);
  stub.send(stub.log[0]);
  stub.request("r2", { n: 2 });
  assert.deepEqual(await stub.answered(), ["r2", { result: 4 }]);
  stub.hangUp();
  stub.request("r3", { n: 3 });
  assert.deepEqual(await stub.answered(), ["r3", { result: 6 }]);
  assert.deepEqual(ran, [1, 2, 3]);
  assert.deepEqual(heard, [0, 1, 2]);
});

scenario("functions run side by side, as many as allowed", async (stub, t) => {
  let open;
  const gate = new Promise((resolve) => (open = resolve));
  const started = new Inbox();
  const lend = new Oubliette(stub.address, TOKEN).lend("myapp", { concurrency: 2 }).tool("double", {}, async ({ n }) => {
    started.put(n);
    if (n === 0) await gate;
    return n * 2;
  });
  await begin(stub, t, lend);
  await stub.called("session_message");
  stub.request("slow", { n: 0 });
  for (let n = 1; n <= 30; n += 1) stub.request(`fast${n}`, { n });
  for (let n = 1; n <= 30; n += 1) assert.match((await stub.answered())[0], /^fast/);
  open();
  assert.equal((await stub.answered())[0], "slow");
});

scenario("an answer is sent again until it is taken", async (stub, t) => {
  stub.refusals = [[503, "unavailable"], [500, "internal"]];
  await begin(stub, t, lender(stub));
  await stub.called("session_message");
  stub.request("r1", { n: 1 });
  assert.deepEqual(await stub.answered(), ["r1", { result: 2 }]);
});

scenario("a result that is refused is told to the agent, a late one is dropped", async (stub, t) => {
  await begin(stub, t, lender(stub));
  await stub.called("session_message");
  stub.refusals = [[400, "invalid_argument"]];
  stub.request("large", { n: 1 });
  assert.match((await stub.answered())[1].error, /^the answer was refused: refused/);
  stub.refusals = [[404, "not_found"]];
  stub.request("late", { n: 1 });
  stub.request("next", { n: 1 });
  // The refusal was taken by whichever came first; only the other one arrives.
  assert.match((await stub.answered())[0], /^(late|next)$/);
});

scenario("a cancelled request stops its function", async (stub, t) => {
  const stopped = new Inbox();
  const started = new Inbox();
  const lend = new Oubliette(stub.address, TOKEN).lend("myapp", { concurrency: 1 }).tool("double", {}, ({ n }, { requestId, signal }) => {
    if (n === 2) return 4;
    signal.addEventListener("abort", () => stopped.put(requestId));
    started.put(requestId);
    return new Promise(() => {});
  });
  await begin(stub, t, lend);
  await stub.called("session_message");
  stub.request("r1", { n: 1 });
  assert.equal(await started.take(), "r1");
  stub.emit({ type: "caller_tool_done", request_id: "r1", outcome: "cancelled" });
  assert.equal(await stopped.take(), "r1");
  // Its place is free again, and it sent no answer.
  stub.request("r2", { n: 2 });
  assert.deepEqual(await stub.answered(), ["r2", { result: 4 }]);
});

scenario("joining a session runs only what is still open", async (stub, t) => {
  stub.request("old", { n: 1 });
  stub.emit({ type: "caller_tool_done", request_id: "old", outcome: "answered" });
  stub.emit({ type: "turn_completed", turn: 1, stop_reason: "end_turn", text: "old" });
  stub.request("open", { n: 2 });
  await begin(stub, t, lender(stub), { session_id: SESSION, agent: "a" });
  for (let page = 0; page < 3; page += 1) await stub.called("session_events");
  const message = await stub.called("session_message");
  assert.deepEqual([message.session_id, message.agent], [SESSION, "a"]);
  assert.deepEqual(await stub.answered(), ["open", { result: 4 }]);
  stub.request("new", { n: 3 });
  assert.deepEqual(await stub.answered(), ["new", { result: 6 }]);
});

scenario("a failed turn and an ended session are errors", async (stub, t) => {
  const kinds = [];
  const session = await begin(stub, t, lender(stub).onEvent((event) => kinds.push(event.type)));
  await stub.called("session_message");
  stub.emit({ type: "status", status: "running" });
  stub.emit({ type: "error", code: "unavailable", message: "no model" });
  stub.emit({ type: "status", status: "idle" });
  await assert.rejects(session.turn(), (error) => isRefused(error, "unavailable") && error.reason === "no model");
  assert.equal(await session.message("go on"), 1);
  assert.equal((await stub.called("session_message")).context.caller_tools.length, 1);
  stub.emit({ type: "status", status: "ended", reason: "done" });
  assert.ok((await session.ended()) instanceof EndedError);
  await assert.rejects(session.turn(1), RefusedError);
  await assert.rejects(session.turn(2), EndedError);
  assert.deepEqual(kinds, ["status", "error", "status", "status"]);
});

scenario("a session that is stopped answers nothing more", async (stub, t) => {
  const ran = [];
  const session = await begin(stub, t, lender(stub, ran));
  await stub.called("session_message");
  await stub.opened.take();
  session.stop();
  await assert.rejects(session.turn(), EndedError);
  stub.request("r1", { n: 1 });
  // Another program in its place gets the request.
  await begin(stub, t, lender(stub, ran));
  await stub.called("session_message");
  assert.deepEqual(await stub.answered(), ["r1", { result: 2 }]);
  assert.deepEqual(ran, [1]);
});

scenario("withdrawn functions are not declared again", async (stub, t) => {
  const session = await begin(stub, t, lender(stub));
  await stub.called("session_message");
  await session.withdraw("without tools");
  assert.deepEqual((await stub.called("session_message")).context, { caller_id: "myapp", caller_tools: [] });
  await session.message("more");
  assert.equal((await stub.called("session_message")).context, undefined);
});

scenario("events are followed once each, until the session ends", async (stub) => {
  stub.emit({ type: "message", role: "user", text: "hello" });
  const indexes = [];
  for await (const event of new Oubliette(stub.address, TOKEN).sessions.follow(SESSION)) {
    indexes.push(event.index);
    if (event.index === 0) {
      stub.hangUp();
      stub.emit({ type: "status", status: "failed" });
    }
    if (event.index === 1) stub.emit({ type: "status", status: "ended" });
  }
  assert.deepEqual(indexes, [0, 1, 2]);
});

scenario("a bad token, an absent server and odd answers say so", async (stub) => {
  await assert.rejects(new Oubliette(stub.address, "oub_bad").lend("a").start("x"), (error) => isRefused(error, "unauthenticated"));
  await assert.rejects(new Oubliette("http://127.0.0.1:9", "t").lend("a").start("x"), UnreachableError);
  const client = new Oubliette(stub.address, TOKEN);
  await assert.rejects(client.call("garbage"), (error) => error instanceof OublietteError && !(error instanceof RefusedError));
  await assert.rejects(client.call("proxy"), UnreachableError);
  await assert.rejects(client.call("never", {}, { timeoutMs: 20 }), /no answer within 20 ms/);
  const given = new AbortController();
  const waiting = client.call("never", {}, { signal: given.signal });
  given.abort(new Error("changed my mind"));
  await assert.rejects(waiting, /changed my mind/);
  assert.throws(() => new Oubliette("localhost", "t"), TypeError);
  assert.throws(() => new Oubliette(stub.address, "oub_bad\n"), (error) => !error.message.includes("oub_bad"));
  assert.ok(!JSON.stringify(client).includes(TOKEN));
  assert.throws(() => lender(stub).tool("double", {}, () => 1), /lent already/);
});

scenario("files of a workspace are written, read and deleted", async (stub) => {
  const { workspaces } = new Oubliette(stub.address, TOKEN);
  await workspaces.writeFile("w1", "a b/ü?.txt", "text");
  assert.deepEqual([...stub.files.keys()], ["/api/workspaces/w1/files/a%20b/%C3%BC%3F.txt"]);
  assert.equal(await workspaces.readText("w1", "/a b/ü?.txt"), "text");
  await workspaces.writeFile("w1", "bytes", new Uint8Array([0, 255]));
  assert.deepEqual(await workspaces.readFile("w1", "bytes"), new Uint8Array([0, 255]));
  await workspaces.deleteFile("w1", "bytes");
  await assert.rejects(workspaces.readFile("w1", "bytes"), (error) => isRefused(error, "not_found"));
  await assert.rejects(async () => workspaces.deleteFile("w1", "a/../../w2/files"), TypeError);
});

scenario("approvals are listed and decided", async (stub) => {
  const { approvals } = new Oubliette(stub.address, TOKEN);
  await approvals.list({ status: "pending" });
  assert.deepEqual(await stub.called("approval_list"), { status: "pending" });
  await approvals.allow("a1", { remember: "session" });
  assert.deepEqual(await stub.called("approval_decide"), { approval_id: "a1", decision: "allow", remember: "session" });
  await approvals.deny("a2", { reason: "no" });
  assert.deepEqual(await stub.called("approval_decide"), { approval_id: "a2", decision: "deny", reason: "no" });
});

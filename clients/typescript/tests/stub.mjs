// A stub of the server's REST and SSE interface, with one session: a test emits its events and sees the calls.
import assert from "node:assert/strict";
import { createServer } from "node:http";

export const SESSION = "gogol_01J00000000000000000000000";
export const TOKEN = "oub_good";

/** Values that a test takes in the order they came, waiting for those to come. */
export class Inbox {
  #values = [];
  #takers = [];

  put(value) {
    const taker = this.#takers.shift();
    if (taker) taker(value);
    else this.#values.push(value);
  }

  take() {
    if (this.#values.length > 0) return Promise.resolve(this.#values.shift());
    return new Promise((resolve) => this.#takers.push(resolve));
  }
}

export class Stub {
  log = [];
  calls = new Inbox();
  opened = new Inbox();
  files = new Map();
  /** The refusals of the next answers, as `[status, code]`. */
  refusals = [];
  #streams = new Set();

  static async start(t) {
    const stub = new Stub();
    stub.server = createServer((request, response) => void stub.#serve(request, response));
    await new Promise((resolve) => stub.server.listen(0, "127.0.0.1", resolve));
    stub.address = `http://127.0.0.1:${stub.server.address().port}`;
    t.after(() => {
      stub.server.close();
      stub.server.closeAllConnections();
    });
    return stub;
  }

  hangUp() {
    for (const stream of this.#streams) stream.destroy();
    this.#streams.clear();
  }

  emit(event) {
    this.log.push({ index: this.log.length, session_id: SESSION, ts: "2026-01-01T00:00:00Z", ...event });
    this.send(this.log.at(-1));
  }

  send(event) {
    for (const stream of this.#streams) stream.write(`id: ${event.index}\ndata: ${JSON.stringify(event)}\n\n`);
  }

  request(request_id, args, { tool = "double", caller_id = "myapp" } = {}) {
    this.emit({ type: "caller_tool_request", request_id, caller_id, tool, arguments: args });
  }

  async called(name) {
    const [called, args] = await this.calls.take();
    assert.equal(called, name);
    return args;
  }

  async answered() {
    const { session_id, request_id, ...answer } = await this.called("caller_tool_response");
    assert.equal(session_id, SESSION);
    return [request_id, answer];
  }

  async #serve(request, response) {
    const pieces = [];
    for await (const piece of request) pieces.push(piece);
    const body = Buffer.concat(pieces);
    const { pathname, searchParams } = new URL(request.url, this.address);
    const json = (status, value) => response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(value));
    const refuse = (status, code) => json(status, { error: { code, message: `refused: ${code}` } });
    if (request.headers.authorization !== `Bearer ${TOKEN}`) return refuse(401, "unauthenticated");
    if (pathname === "/api/tools/garbage") return response.writeHead(200).end("<html>");
    if (pathname === "/api/tools/proxy") return response.writeHead(502).end("<html>");
    if (pathname === "/api/tools/never") return;
    if (pathname.startsWith("/api/tools/")) {
      const name = pathname.slice("/api/tools/".length);
      const args = JSON.parse(body);
      if (name === "caller_tool_response" && this.refusals.length > 0) return refuse(...this.refusals.shift());
      this.calls.put([name, args]);
      if (name === "session_message") return json(200, { session_id: SESSION, turn: 1, status: "running" });
      if (name === "session_events") {
        return json(200, { events: this.log.filter((event) => event.index > args.since_index).slice(0, 2) });
      }
      return json(200, { resolved: true });
    }
    if (pathname.endsWith("/events")) {
      response.writeHead(200, { "content-type": "text/event-stream" }).write(": open\n\n");
      for (const event of this.log) {
        if (event.index > Number(searchParams.get("since_index"))) response.write(`data: ${JSON.stringify(event)}\r\n\r\n`);
      }
      this.#streams.add(response);
      return this.opened.put({ ...Object.fromEntries(searchParams), last: request.headers["last-event-id"] });
    }
    if (request.method === "PUT") this.files.set(request.url, body);
    if (request.method === "DELETE") this.files.delete(request.url);
    if (request.method !== "GET") return json(200, {});
    const file = this.files.get(request.url);
    return file ? response.writeHead(200).end(file) : refuse(404, "not_found");
  }
}

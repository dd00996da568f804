// A real server in a fresh home, for the Node clients: the TypeScript SDKs, the conformance suite, a browser.
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, mkdirSync, openSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

export const HERE = dirname(fileURLToPath(import.meta.url));
export const ROOT = resolve(HERE, "../..");
export const BIN = process.env.OUBLIETTE_BIN_DIR ?? join(ROOT, "target/debug");

/** How long anything is waited for before a test calls it lost. Never a measurement. */
export const DEADLINE = 120_000;

/**
 * A port nobody has: one below those the kernel gives to connections, so that none of these takes it before its server
 * does, or while that restarts.
 */
export function freePort() {
  const port = 20_000 + Math.floor(Math.random() * 12_000);
  return new Promise((done, failed) => {
    const server = createServer();
    server.on("error", (error) => (error.code === "EADDRINUSE" ? done(freePort()) : failed(error)));
    server.listen(port, "127.0.0.1", () => server.close(() => done(port)));
  });
}

/** Polls for a state that no event announces. */
export async function until(check, what, deadline = DEADLINE) {
  const end = Date.now() + deadline;
  for (;;) {
    const value = await check();
    if (value) return value;
    if (Date.now() > end) throw new Error(`waited in vain for ${what}`);
    await new Promise((r) => setTimeout(r, 20));
  }
}

export class ToolFailed extends Error {
  constructor({ code, message }) {
    super(`${code}: ${message}`);
    this.code = code;
  }
}

export class Server {
  static async start({ config = "", env = {}, args = [] } = {}) {
    const server = new Server();
    server.folder = mkdtempSync(join(tmpdir(), "oub"));
    server.home = join(server.folder, "h");
    server.env = env;
    server.args = args;
    mkdirSync(server.home, { mode: 0o700 });
    if (config) writeFileSync(join(server.home, "oubliette.toml"), config);
    server.port = await freePort();
    await server.run();
    return server;
  }

  get url() {
    return `http://127.0.0.1:${this.port}`;
  }

  async run() {
    const log = openSync(join(this.folder, "log"), "a");
    this.process = spawn(
      join(BIN, "oubliette"),
      ["--home", this.home, "serve", "--listen", `127.0.0.1:${this.port}`, ...this.args],
      { stdio: ["ignore", log, log], env: { ...process.env, ...this.env } },
    );
    this.exited = new Promise((done) => this.process.once("exit", done));
    await until(async () => {
      if (this.process.exitCode !== null) throw new Error(`the server exited:\n${this.log()}`);
      return fetch(`${this.url}/ready`).then((r) => r.ok, () => false);
    }, "the server to be ready");
  }

  log() {
    return readFileSync(join(this.folder, "log"), "utf8");
  }

  async stop(signal = "SIGTERM") {
    this.process.kill(signal);
    await this.exited;
  }

  async close() {
    if (this.process.exitCode === null && this.process.signalCode === null) await this.stop();
    // What a killed server left running may still write meanwhile.
    rmSync(this.folder, { recursive: true, force: true, maxRetries: 10 });
  }

  cli(...args) {
    const out = execFileSync(join(BIN, "oubliette"), ["--home", this.home, ...args, "--json"], { encoding: "utf8" });
    return JSON.parse(out);
  }

  token(scope = "admin", ...more) {
    return this.cli("token", "create", "--name", `test-${scope}`, "--scope", scope, ...more).token;
  }

  async api(tool, token, args = {}) {
    const answer = await fetch(`${this.url}/api/tools/${tool}`, {
      method: "POST",
      headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
      body: JSON.stringify(args),
    });
    const body = await answer.json();
    if (!answer.ok) throw new ToolFailed(body.error);
    return body;
  }

  putAgent(slug, token, turns, definition = {}) {
    const files = turns ? { "script.json": JSON.stringify({ turns }) } : {};
    const model = turns ? { model: "script:script.json" } : {};
    return this.api("agent_put", token, {
      slug,
      definition: { name: slug, prompt: "Follow the script.", ...model, ...definition },
      files,
    });
  }
}

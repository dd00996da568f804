// The driver of the TypeScript client for `tests/callers/scenarios.json`, wherever it runs: in Node or in a page.

/** What an error is, in the words of the scenarios. */
function describeError(library, error) {
  const { EndedError, RefusedError, UnreachableError } = library;
  const kinds = [[RefusedError, "refused"], [UnreachableError, "unreachable"], [EndedError, "ended"]];
  const kind = kinds.find(([type]) => error instanceof type)?.[1] ?? "other";
  return { kind, code: error?.code, message: String(error?.message ?? error) };
}

/** Runs commands against the client library and writes replies and notes. */
export class CallerDriver {
  #callers = new Map();

  constructor(library, write) {
    this.library = library;
    this.write = write;
  }

  async run({ id, caller, do: name, ...args }) {
    try {
      this.write({ id, ok: await this.#command(name, caller, args) });
    } catch (error) {
      this.write({ id, error: describeError(this.library, error) });
    }
  }

  async #command(name, caller, args) {
    if (name === "start") return this.#start(caller, args);
    const { session, release } = this.#callers.get(caller);
    switch (name) {
      case "turn":
        return session.turn(args.number);
      case "ask":
        return session.ask(args.message);
      case "message":
        await session.message(args.message);
        break;
      case "withdraw":
        await session.withdraw(args.message);
        break;
      case "release":
        release();
        break;
      case "ended":
        await session.ended();
        break;
      case "end":
        await session.end();
        break;
      case "stop":
        session.stop();
        break;
      default:
        throw new Error(`no command ${name}`);
    }
    return {};
  }

  async #start(caller, { url, token, caller_id, tools, message, options }) {
    let release;
    const released = new Promise((resolve) => (release = resolve));
    const behaviours = {
      echo: (args) => ({ echo: args }),
      fail: () => {
        throw new Error("not today");
      },
      hold: async () => {
        await released;
        return "held";
      },
      hang: (_, stopped) => new Promise(() => stopped()),
    };
    const lend = new this.library.Oubliette(url, token).lend(caller_id);
    lend.onEvent(({ index, type }) => this.write({ caller, note: "event", index, type }));
    for (const [tool, behaviour] of Object.entries(tools)) {
      lend.tool(tool, { description: `Does ${behaviour}.`, inputSchema: { type: "object" } }, (args, { signal }) => {
        this.write({ caller, note: "ran", tool, arguments: args });
        const noteStop = () => signal.addEventListener("abort", () => this.write({ caller, note: "stopped", tool }));
        return behaviours[behaviour](args, noteStop);
      });
    }
    const session = await lend.start(message, options);
    this.#callers.set(caller, { session, release });
    return { session_id: session.id, turn: session.lastTurn };
  }
}

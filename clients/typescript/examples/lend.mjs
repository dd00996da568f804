// Lends one function to an agent for one turn.
//
// OUBLIETTE_TOKEN=oub_… node examples/lend.mjs "Say hello with notify"
import { Oubliette } from "oubliette-caller";

const address = process.env.OUBLIETTE_URL ?? "http://127.0.0.1:8080";
const notify = {
  description: "Show a note to the user.",
  inputSchema: {
    type: "object",
    properties: { message: { type: "string", description: "What to show to the user." } },
    required: ["message"],
  },
};

const session = await new Oubliette(address, process.env.OUBLIETTE_TOKEN ?? "")
  .lend("myapp")
  .tool("notify", notify, ({ message }) => {
    console.log("note:", message);
    return "shown";
  })
  .start(process.argv[2] ?? "Tell the user hello with your notify tool.");
console.log((await session.turn()).text);
await session.end();

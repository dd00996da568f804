// The driver of the TypeScript client, in Node: commands on stdin, replies and notes on stdout.
import { createInterface } from "node:readline";
import * as library from "../../clients/typescript/dist/index.js";
import { CallerDriver } from "./caller-driver.mjs";

const driver = new CallerDriver(library, (line) => console.log(JSON.stringify(line)));
for await (const line of createInterface({ input: process.stdin })) void driver.run(JSON.parse(line));
process.exit(0);

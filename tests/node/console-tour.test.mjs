// A tour of the console, as somebody new would take it. With OUBLIETTE_SCREENSHOTS=<folder> it leaves the pictures
// that README shows.
import assert from "node:assert/strict";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { Bench, MODULES, NODE, id, row, shot } from "./console-browser.mjs";

const EVERYTHING = join(MODULES, "@modelcontextprotocol/server-everything/dist/index.js");

/** Large enough to be read, small enough for a page of text. */
const VIEW = { width: 1280, height: 820 };

let bench, project;
before(async () => {
  bench = await Bench.start();
  const { server, admin } = bench;
  project = (await bench.api("project_create", { name: "Website", description: "The public pages." })).project_id;
  const builtin = (id, builtinPolicy) => bench.api("catalog_put", { id, definition: { id, kind: "builtin", builtinPolicy } });
  await builtin("files", { name: "fs_read", allowedPaths: ["./"] });
  await builtin("drafts", { name: "fs_write", allowedPaths: ["drafts/"] });
  await builtin("shell", { name: "shell_exec", allowedCommands: ["ls", "wc", "sleep"], timeoutMs: 600000 });
  await bench.api("catalog_put", {
    id: "everything",
    definition: { id: "everything", kind: "mcp", transport: "stdio", command: NODE, args: [EVERYTHING, "stdio"], read_only: [MODULES], timeouts: { startupMs: 120000 }, healthCheck: { intervalMs: 5000, timeoutMs: 60000, failures: 3 } },
  });
  const use = ["files", "drafts", "shell", "everything"];
  await server.putAgent("writer", admin, [[
    { say: "I look at what is there, then write a draft.\n" },
    { parallel: [{ tool: "list", arguments: { argv: ["ls", "-l"] } }, { tool: "@everything/echo", arguments: { message: "Is the notes server up?" } }] },
    { call: { tool: "write", arguments: { path: "drafts/welcome.md", content: "# Welcome\n\nAn agent wrote this, in a sandbox.\n" } } },
    { call: { tool: "read", arguments: { path: "drafts/welcome.md" } } },
    { call: { tool: "@everything/get-env", arguments: {} } },
    { say: "The draft is in `drafts/welcome.md`:\n\n```js\nconst page = await render(\"drafts/welcome.md\");\n```\n\nI may **not** read the environment, and did not." },
  ]], {
    name: "Writer", description: "Drafts pages from notes.", prompt: "You draft pages for the website. Keep them short.",
    tools: { use, allowed: ["read", "write", "list", "@everything/echo", "@everything/get-sum"], denied: ["project_list"], aliases: { read: "@files/fs_read", write: "@drafts/fs_write", list: "@shell/shell_exec" } },
  });
  await server.putAgent("editor", admin, [[{ say: "Reading it over." }, { call: { tool: "@shell/shell_exec", arguments: { argv: ["sleep", "500"] } } }]], { name: "Editor", description: "Reads it over.", tools: { use: ["files", "shell"] } });
  await server.putAgent("publisher", admin, [[
    { say: "The page is ready, so I publish it." },
    { call: { tool: "@shell/shell_exec", arguments: { argv: ["wc", "-c", "drafts/welcome.md"] } } },
    { call: { tool: "@drafts/fs_write", arguments: { path: "drafts/published.md", content: "# Welcome\n\nAn agent wrote this, in a sandbox.\n" } } },
    { say: "Published." },
  ]], {
    name: "Publisher", description: "Asks before it publishes.",
    tools: { use: ["drafts", "shell"], ask: ["@drafts/fs_write", { tool: "@shell/*", when: { properties: { argv: { contains: { const: "-c" } } } } }] },
  });
  await server.putAgent("lead", admin, [[{ call: { tool: "session_message", arguments: { message: "Draft the welcome page", agent: "writer", wait: true } } }, { say: "The draft is ready for the editor." }]], { name: "Lead", description: "Hands out the work.", children: ["writer"] });
});
after(() => bench?.close());

test("a tour of the main pages", async (t) => {
  const p = await bench.loggedIn(t, { viewport: VIEW });
  // A lead that hands out work, then a writer of one's own.
  await bench.start(p, "lead", "Get the welcome page drafted");
  await p.waitForSelector(row("turn_completed"));
  await bench.start(p, "writer", "Draft the welcome page from what is in the workspace");
  await p.waitForSelector(row("turn_completed"));
  await p.locator(id("session-status"), { hasText: "idle" }).waitFor();
  await p.waitForSelector(`${id("server-row")}[data-server="everything"] ${id("status-light")}[data-status="green"]`);
  await p.waitForSelector(`${id("tool-row")}[data-canonical="@everything/get-env"][data-allowed="false"]`);
  const tool = p.locator(`${id("tool-row")}[data-tool="read"]`);
  await tool.locator("summary").first().click();
  await tool.getByText("Try it").click();
  await tool.getByLabel("path").fill("drafts/welcome.md");
  await tool.getByRole("button", { name: /Call/ }).click();
  await tool.getByText("An agent wrote this", { exact: false }).last().waitFor();
  await shot(p, "tools");
  await tool.locator("summary").first().click();

  await p.click(id("debugger-toggle"));
  await p.getByLabel("Turn").selectOption("1");
  await p.locator(`${id("debugger-row")}[data-kind="tool_blocked"] button`).click();
  await p.locator(id("debugger-detail")).waitFor();
  await p.locator(id("timeline")).evaluate((box) => (box.scrollTop = 0));
  await p.getByRole("button", { name: "Newest" }).waitFor();
  await shot(p, "session");

  await bench.open(p, "agents/writer");
  await p.locator(`${id("allow-table")} [data-canonical="@everything/echo"]`).waitFor();
  await p.locator(`${id("rule-preview")}[data-judged="true"]`).waitFor();
  await p.getByText("Rules by tool").scrollIntoViewIfNeeded();
  await p.locator("fieldset", { hasText: "Rules by tool" }).evaluate((box) => box.scrollIntoView());
  await shot(p, "agents");
  await bench.open(p, "catalog/everything");
  await p.getByLabel("Check its health").waitFor();

  // Something to see on the charts.
  const { sessions } = await bench.api("session_list", { project_id: project });
  const mine = sessions.find((s) => s.agent === "writer" && !s.parent_id).session_id;
  await bench.open(p, "figures");
  await p.getByText("Busiest tools").waitFor();
  const calls = Array.from({ length: 120 }, (_, i) => () =>
    i % 3 || i % 9 === 0 ? bench.api("tool_call", { session_id: mine, tool: "@everything/get-sum", arguments: { a: i, b: 1 } })
      : bench.api("tool_call", { session_id: mine, tool: "read", arguments: { path: i % 2 ? "drafts/welcome.md" : "none.md" } }).catch((error) => assert.equal(error.code, "not_found")));
  for (const call of calls) await call();
  await p.locator("td", { hasText: "@everything/get-sum" }).waitFor();
  await p.waitForFunction(() => Number(document.querySelector("tbody tr td:nth-child(2)")?.textContent) >= 80);
  await p.getByRole("img", { name: /^Duration of calls over time/ }).waitFor();
  await shot(p, "figures");

  await bench.open(p, "admin/doctor");
  await p.getByText("everything needed works").waitFor();
});

test("what waits for a person, and the first page", async (t) => {
  const p = await bench.loggedIn(t, { viewport: VIEW });
  for (const message of ["Publish the welcome page", "Publish it again"]) await bench.api("session_message", { message, project_id: project, agent: "publisher" });
  await bench.open(p, "approvals");
  const cards = p.locator(id("approval"));
  await p.waitForFunction(() => document.querySelectorAll("[data-testid=approval]").length === 2);
  await cards.first().locator(id("allow-once")).click();
  await p.locator(`${id("decided")} [data-decision="allowed"]`).waitFor();
  await p.locator(`${id("approval")} [data-layout="write"]`).waitFor();
  await p.getByRole("button", { name: "Dismiss" }).click();
  await shot(p, "approvals");
  await bench.open(p, "");
  await p.locator("[data-tile=waiting] .big", { hasText: "2" }).waitFor();
  await shot(p, "home");
});

test("a switch, as it happens, in the dark", async (t) => {
  const p = await bench.loggedIn(t, { viewport: VIEW, colorScheme: "dark" });
  await bench.start(p, "editor", "Read the welcome page over");
  await p.waitForSelector(row("tool_call"));
  await p.waitForSelector(`${id("tool-row")}[data-canonical="@shell/shell_exec"]`);
  await p.locator(`${id("session-list")} [aria-current]`, { hasText: "running" }).waitFor();
  await p.selectOption(id("agent-picker"), "writer");
  await p.waitForSelector(`${id("switch-state")} [data-kind="drain_timeout"]`);
  await p.waitForSelector(`${id("switch-state")} [data-kind="build_finished"]`);
  await p.waitForSelector(`${id("server-row")}[data-server="everything"] ${id("status-light")}[data-status="green"]`);
  await p.locator(`${id("session-list")} [aria-current]`, { hasText: "idle" }).waitFor();
  await shot(p, "switching");
  assert.equal(await p.locator(`${id("switch-state")} li`).count() >= 8, true);
});

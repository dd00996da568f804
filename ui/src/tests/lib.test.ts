// @vitest-environment jsdom
import { describe, expect, test } from "vitest";
import { deniedBy, isAllowed, setAliases, setAllowed, setDenied } from "../lib/allow";
import { brief, resultText, toText } from "../lib/format";
import { render } from "../lib/markdown";
import { fromMcpServers } from "../lib/paste";
import { fieldError, parseRefusal } from "../lib/refusal";
import { addEvent, type TimelineRow } from "../lib/timeline";
import type { SessionEvent } from "../lib/types";

describe("markdown", () => {
  test.each([
    "<script>window.ran = 1</script>",
    "<img src=x onerror=\"window.ran = 1\">",
    "[x](javascript:window.ran=1)",
    "[x](data:text/html,<script>window.ran=1</script>)",
    "![x](https://elsewhere.example/pixel.png)",
    "<a href=\"vbscript:x\" onclick=\"window.ran=1\">x</a>",
    "```html\n<script>window.ran = 1</script>\n```",
    "<svg><animate onbegin=window.ran=1 attributeName=x></svg>",
  ])("nothing in %j can run or reach outside", (text) => {
    const holder = document.createElement("div");
    holder.innerHTML = render(text);
    expect(holder.querySelector("script, img, svg, iframe, object, form, style")).toBeNull();
    for (const element of holder.querySelectorAll("*")) {
      for (const attribute of element.attributes) expect(attribute.name.startsWith("on")).toBe(false);
    }
    for (const link of holder.querySelectorAll("a[href]")) expect(link.getAttribute("href")).toMatch(/^(https?|mailto):/);
    expect((globalThis as Record<string, unknown>)["ran"]).toBeUndefined();
  });

  test("code is coloured and links open elsewhere", () => {
    expect(render("```rust\nfn main() {}\n```")).toContain("hljs-keyword");
    expect(render("[x](https://example.com)")).toContain('rel="noopener noreferrer nofollow"');
  });
});

describe("timeline", () => {
  const event = (index: number, type: string, more: Record<string, unknown> = {}): SessionEvent => ({
    index,
    ts: new Date(1000 * index).toISOString(),
    session_id: "s",
    type,
    ...more,
  });

  test("pieces become one row, and the whole message takes its place", () => {
    const rows: TimelineRow[] = [];
    addEvent(rows, event(0, "message", { role: "user", text: "hi" }));
    addEvent(rows, event(1, "delta", { text: "a" }));
    addEvent(rows, event(2, "delta", { text: "b" }));
    expect(rows.map((r) => [r.type, r.text])).toEqual([["message", "hi"], ["delta", "ab"]]);
    addEvent(rows, event(3, "message", { role: "assistant", text: "ab" }));
    expect(rows.map((r) => [r.type, r.text])).toEqual([["message", "hi"], ["message", "ab"]]);
  });

  test("a result stands beside its call, also when calls overlap", () => {
    const rows: TimelineRow[] = [];
    addEvent(rows, event(0, "tool_call", { tool_call_id: "1", tool: "x", arguments: {} }));
    addEvent(rows, event(1, "tool_call", { tool_call_id: "2", tool: "y", arguments: {} }));
    addEvent(rows, event(2, "tool_result", { tool_call_id: "1", ok: true }));
    expect(rows.map((r) => `${r.type} ${String(r.event["tool_call_id"])}`)).toEqual(["tool_call 1", "tool_result 1", "tool_call 2"]);
    expect(rows[0]?.took).toBe(2000);
  });

  test("a caller's request shows how it ended", () => {
    const rows: TimelineRow[] = [];
    addEvent(rows, event(0, "caller_tool_request", { request_id: "r", tool: "t", arguments: {} }));
    addEvent(rows, event(1, "caller_tool_done", { request_id: "r", outcome: "answered" }));
    expect(rows).toHaveLength(1);
    expect(rows[0]?.outcome).toBe("answered");
  });
});

test("a large value is cut, not rendered", () => {
  const { text, cut } = toText("x".repeat(10_000_000), 4000);
  expect(text).toHaveLength(4000);
  expect(cut).toBe(9_996_000);
  expect(brief("y".repeat(1000))).toHaveLength(121);
});

test("an mcpServers block becomes catalog entries", () => {
  const block = { mcpServers: { "My Files": { command: "npx", args: ["-y", "x"] }, web: { url: "https://h/mcp" } } };
  expect(fromMcpServers(JSON.stringify(block))).toEqual([
    { id: "my-files", kind: "mcp", transport: "stdio", command: "npx", args: ["-y", "x"], env: {} },
    { id: "web", kind: "mcp", transport: "http", endpoint: "https://h/mcp" },
  ]);
  expect(() => fromMcpServers("{}")).toThrow();
  expect(() => fromMcpServers('{"mcpServers":{"x":{}}}')).toThrow(/neither/);
});

describe("refusals", () => {
  test.each([
    ["agents/b/agent.json: runtime.command: must name a program", "runtime.command", "must name a program"],
    ["tools/q/tool.json: missing field `command`", "command", "missing field `command`"],
    ["tools/q/tool.json: invalid type: string", "", "invalid type: string"],
    ["agents/b/agent.json: tools.use[0]: gone is not in the catalog", "tools.use[0]", "gone is not in the catalog"],
    ["permission denied", "", "permission denied"],
  ])("%s", (message, field, reason) => {
    expect(parseRefusal(message)).toEqual({ field, reason });
  });

  test("stand beside their field", () => {
    const at = parseRefusal("agents/b/agent.json: tools.use[0]: gone");
    expect(fieldError(at, "tools.use")).toBe("[0]: gone");
    expect(fieldError(at, "tools.used")).toBe("");
    expect(fieldError(at, "name")).toBe("");
    expect(fieldError(null, "name")).toBe("");
  });
});

describe("the table of rules", () => {
  const known = ["@a/x", "@a/y", "@b/z"];
  const rules = { use: ["a", "b"], allowed: [] as string[], denied: ["@b/*"], aliases: { ex: "@a/x" } };

  test("nothing named allows everything, and unticking one names the rest", () => {
    expect(known.every((name) => isAllowed(rules, name))).toBe(true);
    const after = setAllowed(rules, "@a/x", false, known);
    expect(after).toEqual(["@a/y", "@b/*"]);
    expect(known.map((name) => isAllowed({ ...rules, allowed: after }, name))).toEqual([false, true, true]);
  });

  test("an alias and the plain name stand for the tool", () => {
    expect(isAllowed({ ...rules, allowed: ["ex"] }, "@a/x")).toBe(true);
    expect(isAllowed({ ...rules, allowed: ["a_y"] }, "@a/y")).toBe(true);
    expect(setAllowed({ ...rules, allowed: ["ex", "@b/*"] }, "@a/x", false, known)).toEqual(["@b/*"]);
    expect(setAllowed({ ...rules, allowed: ["@b/*"] }, "@a/x", true, known)).toEqual(["@b/*", "@a/x"]);
  });

  test("unticking the last one does not allow everything", () => {
    const after = setAllowed({ ...rules, allowed: ["@a/x"] }, "@a/x", false, known);
    expect(known.some((name) => isAllowed({ ...rules, allowed: after }, name))).toBe(false);
  });

  test("denials are found by name and by pattern", () => {
    expect(deniedBy(rules, { canonical: "@b/z", name: "b_z" })).toBe("@b/*");
    expect(deniedBy(rules, { canonical: "@a/x", name: "ex" })).toBeUndefined();
    expect(setDenied(rules, { canonical: "@a/x", name: "ex" }, true)).toEqual(["@b/*", "@a/x"]);
    expect(setAliases(rules, "@a/x", ["one", "two"])).toEqual({ one: "@a/x", two: "@a/x" });
  });
});

test("a value is written as JSON writes it, when it fits", () => {
  for (const value of [{ a: [1, "two", null, { b: true }], c: {}, d: [] }, [], null, 3, "text"]) {
    expect(toText(value).text).toBe(typeof value === "string" ? value : JSON.stringify(value, null, 2));
  }
  expect(toText({ a: [1, "x"] }, 100, 0).text).toBe('{"a":[1,"x"]}');
  expect(resultText({ content: [{ type: "text", text: "a" }, { type: "text", text: "b" }] })).toBe("a\nb");
  expect(resultText({ content: [{ type: "image", data: "" }] })).toBeUndefined();
});

// @vitest-environment jsdom
import { describe, expect, test } from "vitest";
import { deniedBy, isAllowed, setAliases, setAllowed, setDenied } from "../lib/allow";
import { axisTimes, roundUp, roundUpMillis } from "../lib/axis";
import { brief, contentText, lineCount, resultText, roundMillis, toText } from "../lib/format";
import { render } from "../lib/markdown";
import { parseAddition } from "../lib/paste";
import { fieldError, parseRefusal } from "../lib/refusal";
import { matchedBy } from "../lib/rules";
import { addEvent, outlineOf, type TimelineRow } from "../lib/timeline";
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

  test.each([["quotes", ">".repeat(50_000)], ["lists", "- ".repeat(50_000)], ["brackets", "[".repeat(5_000)], ["stars", "*a ".repeat(60_000)], ["underscores", "_a_".repeat(60_000)], ["underscores in paragraphs", `${"_a_".repeat(600)}\n\n`.repeat(100)], ["a table", `|${"a|".repeat(5_000)}\n|${"-|".repeat(5_000)}`]])("%s without end stop nothing", (_, text) => {
    const begun = performance.now();
    expect(render(text)).not.toBe("");
    expect(performance.now() - begun).toBeLessThan(5_000);
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

test("a newline at the end of a text ends its last line", () => {
  expect(["", "a", "a\n", "a\nb", "a\nb\n", "\n"].map(lineCount)).toEqual(["0 lines", "1 line", "1 line", "2 lines", "2 lines", "1 line"]);
});

test("a large value is cut, not rendered", () => {
  const { text, cut } = toText("x".repeat(10_000_000), 4000);
  expect(text).toHaveLength(4000);
  expect(cut).toBe(9_996_000);
  expect(brief("y".repeat(1000))).toHaveLength(121);
  // Of a million values, only so many are looked at.
  const many = Array.from({ length: 1_000_000 }, (_, i) => ({ i }));
  const begun = performance.now();
  expect(toText(many, 4000).atLeast).toBe(true);
  expect(brief(many)).toHaveLength(121);
  expect(performance.now() - begun).toBeLessThan(1000);
  expect(toText({ a: [1, undefined], b: undefined, c: {}, d: [] }, 1000, 0).text).toBe('{"a":[1,null],"c":{},"d":[]}');
});

test("a pasted block or command line is what the server is asked to add", () => {
  const block = { mcpServers: { "My Files": { command: "npx", args: ["-y", "x"] } } };
  expect(parseAddition(JSON.stringify(block))).toEqual({ servers: block });
  expect(parseAddition(` npx -y x 'a b' "c" `)).toEqual({ command: ["npx", "-y", "x", "a b", "c"] });
  expect(parseAddition("uvx x\\ y")).toEqual({ command: ["uvx", "x y"] });
  expect(() => parseAddition("{}")).toThrow(/no server/);
  expect(() => parseAddition("  ")).toThrow(/Paste/);
  expect(() => parseAddition("npx 'x")).toThrow(/not closed/);
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

describe("an outline", () => {
  const event = (index: number, type: string, more: Record<string, unknown> = {}): SessionEvent => ({ index, ts: new Date(1_000_000 + index * 1000).toISOString(), session_id: "s", type, ...more });
  test("has a turn for each message, with its calls, failures and end", () => {
    const rows: TimelineRow[] = [];
    for (const e of [
      event(0, "message", { role: "user", text: "Do it" }),
      event(1, "tool_call", { tool: "a", tool_call_id: "1" }),
      event(2, "tool_result", { tool_call_id: "1", ok: false }),
      event(3, "message", { role: "assistant", text: "Tried." }),
      event(4, "turn_completed", { turn: 1, stop_reason: "end_turn" }),
      event(5, "message", { role: "user", text: "Again" }),
      event(6, "error", { code: "unavailable", message: "gone" }),
    ]) addEvent(rows, e);
    const [first, second] = outlineOf(rows);
    expect(first).toMatchObject({ turn: 1, index: 0, text: "Do it", calls: 1, failed: 1, failures: [{ index: 1, text: "a" }], state: "idle", took: 4000 });
    expect(second).toMatchObject({ turn: 0, text: "Again", calls: 0, failures: [{ index: 6, text: "gone" }], state: "running" });
  });
});

describe("rules, seen from an entry", () => {
  test("are matched whatever the order of their fields", () => {
    const tool = (name: string, ...rules: { list: "allowed" | "denied" | "ask"; entry: unknown }[]) => ({ name, canonical: name, source: "catalog", allowed: true, rules });
    const tools = [tool("a", { list: "ask", entry: { when: { type: "object", minProperties: 1 }, tool: "@x/*" } }), tool("b", { list: "allowed", entry: "@x/*" })];
    expect(matchedBy(tools, "ask", { tool: "@x/*", when: { minProperties: 1, type: "object" } }).map((t) => t.name)).toEqual(["a"]);
    expect(matchedBy(tools, "allowed", "@x/*").map((t) => t.name)).toEqual(["b"]);
    expect(matchedBy(tools, "denied", "@x/*")).toEqual([]);
  });
});

describe("axes", () => {
  test("end at a round number and label at most as many points as fit", () => {
    expect([0, 0.4, 1, 7, 101].map((n) => roundUp(n))).toEqual([1, 0.5, 1, 10, 200]);
    expect([0, 1, 3, 9, 101].map((n) => roundUp(n, true))).toEqual([2, 2, 4, 10, 200]);
    expect([0, 3, 4_200, 7_000, 45_000, 61_000, 580_000, 90_000_000].map((n) => roundMillis(roundUpMillis(n)))).toEqual(["1 ms", "5 ms", "5 s", "10 s", "1 min", "2 min", "10 min", "48 h"]);
    expect([0.5, 250, 2_500, 90_000].map(roundMillis)).toEqual(["0.5 ms", "250 ms", "2.5 s", "1 min 30 s"]);
    const times = Array.from({ length: 60 }, (_, i) => i * 60_000);
    const { shown, full } = axisTimes(times, 6);
    expect(shown.length).toBeLessThanOrEqual(6);
    expect(full).toHaveLength(60);
    expect(axisTimes([], 6)).toEqual({ shown: [], full: [] });
  });

  test.each([
    ["15 minutes", 15 * 60_000, 90], ["an hour", 3_600_000, 60], ["a day", 86_400_000, 96], ["30 days", 30 * 86_400_000, 60],
  ])("labels of %s are round times at equal distances, none beyond an end", (_, span, points) => {
    const first = Date.parse("2026-03-02T05:43:20Z");
    const { shown } = axisTimes(Array.from({ length: points }, (_, i) => first + (i * span) / points), 6);
    expect(shown.length).toBeGreaterThanOrEqual(3);
    expect(shown.length).toBeLessThanOrEqual(6);
    const gaps = shown.slice(1).map((label, i) => label.place - shown[i]!.place);
    for (const gap of gaps) expect(gap).toBeCloseTo(gaps[0]!, 5);
    for (const { text, place } of shown) {
      expect(text).toMatch(/^(\d\d-\d\d|\d\d:[0-5][05]|\d\d:\d[02468])$/);
      expect(place).toBeGreaterThan(3);
      expect(place).toBeLessThan(97);
    }
  });
});

test("a result with images says its text and what they are", () => {
  const image = { type: "image", mimeType: "image/png", data: "AAAA" };
  expect(contentText({ content: [{ type: "text", text: "Here:" }, image] })).toBe("Here:\n[image/png]");
  expect(contentText({ content: [{ type: "resource_link", uri: "file:///x" }] })).toBeUndefined();
  for (const value of [null, "text", { content: [] }, { content: [null] }]) expect(contentText(value)).toBeUndefined();
});

test("a reason that was told as an error is not told again", () => {
  const rows: TimelineRow[] = [];
  const event = (index: number, type: string, more: object) => ({ index, type, ts: "2026-01-01T00:00:00Z", session_id: "s", ...more }) as SessionEvent;
  addEvent(rows, event(0, "error", { code: "unavailable", message: "no provider:\nwrite one" }));
  addEvent(rows, event(1, "status", { status: "failed", reason: "no provider: write one" }));
  addEvent(rows, event(2, "status", { status: "failed", reason: "another" }));
  expect(rows.map((row) => row.repeats)).toEqual([undefined, true, undefined]);
});

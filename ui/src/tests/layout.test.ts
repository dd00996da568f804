import { describe, expect, test } from "vitest";
import { askedBy, deniedBy, entryText, isAllowed, parseEntry, setAllowed, setAsked, setDenied } from "../lib/allow";
import { lastDays } from "../lib/days";
import { lineDiff, withContext } from "../lib/diff";
import { brief, dollars, left, tokens, usageLine } from "../lib/format";
import { dimensions, resultImages } from "../lib/image";
import { layOut, reveal, summarise } from "../lib/layout";
import { rank } from "../lib/rank";

describe("arguments laid out", () => {
  test("a command is shown as it would be typed, with the borders of its arguments", () => {
    expect(layOut({ argv: ["git", "commit", "-m", "it's done"], cwd: "site" })).toEqual({
      kind: "command", command: `git commit -m 'it'\\''s done'`, rest: { cwd: "site" },
    });
    expect(layOut({ command: "rm -rf /" })).toMatchObject({ kind: "command", command: "rm -rf /" });
    expect(layOut({ command: ["bash", "-lc", "ls"] })).toMatchObject({ command: "bash -lc ls" });
  });

  test("a file's text and an edit stand beside their path, and nothing is left out", () => {
    expect(layOut({ path: "a.md", content: "x\n", mode: "append" })).toEqual({ kind: "write", path: "a.md", text: "x\n", rest: { mode: "append" } });
    expect(layOut({ file_path: "a.ts", old_string: "1", new_string: "2", replace_all: true })).toEqual({
      kind: "edit", path: "a.ts", before: "1", after: "2", rest: { replace_all: true },
    });
  });

  test.each([[null], [7], ["text"], [[1]], [{ argv: [1] }], [{ path: "a", content: "AAAA", encoding: "base64" }], [{ i: 1 }]])("%j stays JSON", (value) => {
    expect(layOut(value)).toEqual({ kind: "json" });
  });

  test("an agent's own request shows what its tool call would do, and its options", () => {
    const options = [{ optionId: "yes", name: "Allow", kind: "allow_once" }];
    expect(layOut({ toolCall: { toolCallId: "1", title: "Run", kind: "execute", rawInput: { command: "ls" } }, options })).toEqual({
      kind: "command", command: "ls", rest: { title: "Run", kind: "execute", options: ["Allow"] },
    });
    const content = [{ type: "diff", path: "a.ts", oldText: null, newText: "x" }];
    expect(layOut({ toolCall: { toolCallId: "1", content }, options })).toEqual({ kind: "edit", path: "a.ts", before: "", after: "x", rest: { options: ["Allow"] } });
    expect(layOut({ toolCall: { rawInput: { a: 1 } }, options })).toEqual({ kind: "json" });
  });

  test("what could hide or reorder text is written out", () => {
    expect(reveal("a\u202Etxt.exe\u200b\u001b[31m\u0000")).toBe("a⟨202E⟩txt.exe⟨200B⟩⟨001B⟩[31m⟨0000⟩");
    expect(reveal("rm a\u00a0b\u2800c\u3000")).toBe("rm a⟨00A0⟩b⟨2800⟩c⟨3000⟩");
    expect(reveal("line\n\ttab — ünïcode 漢字")).toBe("line\n\ttab — ünïcode 漢字");
  });

  test("a row says the command, the path or the fields", () => {
    expect(summarise({ argv: ["ls"] }, brief)).toBe("ls");
    expect(summarise({ path: "a", content: "long" }, brief)).toBe("a");
    expect(summarise({ lines: 40, path: "src/a.rs" }, brief)).toBe("src/a.rs, lines: 40");
    expect(summarise({ a: 1, b: { c: [2] }, d: "text" }, brief)).toBe('a: 1, b: {"c":[2]}, d: text');
    expect(summarise({}, brief)).toBe("");
    expect(summarise([1], brief)).toBe("[1]");
    const many = Object.fromEntries(Array.from({ length: 1000 }, (_, i) => [`k${i}`, "x".repeat(1000)]));
    expect(summarise(many, brief).length).toBeLessThan(130);
  });
});

test("a difference keeps what is the same", () => {
  const show = (a: string, b: string) => lineDiff(a, b).map((l) => l.sign + l.text);
  expect(show("a\nb\nc", "a\nx\nc")).toEqual([" a", "-b", "+x", " c"]);
  expect(show("", "a")).toEqual(["+a"]);
  expect(show("a", "a")).toEqual([" a"]);
  const many = Array.from({ length: 2000 }, (_, i) => `${i}`).join("\n");
  expect(lineDiff(many, many.replaceAll("1", "x")).length).toBeGreaterThan(2000);
});

describe("images", () => {
  const png = (width: number, height: number) => {
    const head = new Uint8Array(24);
    head.set([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
    new DataView(head.buffer).setUint32(16, width);
    new DataView(head.buffer).setUint32(20, height);
    return head;
  };
  const block = (head: Uint8Array, mimeType = "image/png") => ({ content: [{ type: "image", mimeType, data: btoa(String.fromCharCode(...head)) }] });

  test("size and kind come from the file itself", () => {
    expect(dimensions(png(640, 480))).toEqual({ type: "image/png", width: 640, height: 480 });
    expect(resultImages(block(png(2, 3), "text/html"))[0]).toMatchObject({ type: "image/png", url: expect.stringMatching(/^data:image\/png;base64,/) });
    expect(dimensions(new TextEncoder().encode("GIF89a\u0005\0\u0007\0"))).toEqual({ type: "image/gif", width: 5, height: 7 });
    const jpeg = new Uint8Array([0xff, 0xd8, 0xff, 0xe0, 0, 4, 0, 0, 0xff, 0xc0, 0, 11, 8, 0, 9, 0, 10, 3, 0, 0, 0]);
    expect(dimensions(jpeg)).toEqual({ type: "image/jpeg", width: 10, height: 9 });
  });

  test.each([
    ["a picture of gigapixels", block(png(60_000, 60_000))],
    ["a file that is none", block(new TextEncoder().encode("<svg onload=alert(1)>"), "image/svg+xml")],
    ["text that is no base64", { content: [{ type: "image", data: '"><script>' }] }],
    ["a JPEG whose segment has no length", block(new Uint8Array([0xff, 0xd8, 0xff, 0xe0, 0, 0, 0, 0, 0, 0, 0, 0]))],
  ])("%s is not shown", (_, value) => {
    const [image] = resultImages(value);
    expect(image?.url).toBeUndefined();
    expect(image?.reason).toBeTruthy();
  });
});

test("tokens, money and time are short", () => {
  expect([0, 999, 1000, 12_345, 4_560_000, Number.NaN].map(tokens)).toEqual(["0", "999", "1k", "12.3k", "4.56M", "0"]);
  expect([0, 0.00001, 0.0421, 5.8].map(dollars)).toEqual(["$0", "<$0.0001", "$0.0421", "$5.80"]);
  expect(usageLine({ requests: 2, input_tokens: 1500, output_tokens: 20, cost_usd: 0.5, estimated: true })).toBe("≈ $0.5000 · 1.5k in · 20 out");
  expect(usageLine({ requests: 0 })).toBe("");
  expect(left("1970-01-01T00:09:41Z", 0)).toBe("9 min 41 s");
  expect(left("never", 0)).toBe("");
  expect(lastDays(2, Date.parse("2026-03-01T00:30:00Z"))).toEqual(["2026-02-28", "2026-03-01"]);
});

test("a few letters find it, better places first", () => {
  const names = ["Go to Agents", "New agent", "agent writer", "Sessions"];
  expect(rank(names, "", (n) => n)).toEqual(names);
  expect(rank(names, "agent", (n) => n)).toEqual(["agent writer", "Go to Agents", "New agent"]);
  expect(rank(names, "new ag", (n) => n)).toEqual(["New agent"]);
  expect(rank(names, "sssn", (n) => n)).toEqual(["Sessions"]);
  expect(rank(names, "zz", (n) => n)).toEqual([]);
});

test("entries with a condition survive the form and the table", () => {
  const when = { tool: "@sh/run", when: { required: ["x"] } };
  const rules = { use: ["sh"], allowed: ["@sh/*", when], denied: [when], ask: ["@sh/*", when] };
  expect(rules.ask.map(entryText).map(parseEntry)).toEqual(rules.ask);
  expect(parseEntry("{no json")).toBe("{no json");
  const row = { canonical: "@sh/run", name: "sh_run" };
  expect(isAllowed(rules, "@sh/run")).toBe(true);
  expect(deniedBy(rules, row), "denied for some arguments only").toBeUndefined();
  expect(askedBy(rules, row)).toBe("@sh/*");
  expect(setDenied(rules, row, true)).toEqual([when, "@sh/run"]);
  expect(setAsked({ ...rules, ask: ["@sh/run", when] }, row, false)).toEqual([when]);
  expect(setAllowed({ ...rules, allowed: ["@sh/other", when] }, "@sh/run", false, ["@sh/run", "@sh/other"])).toEqual(["@sh/other"]);
});

test("of a difference, only what surrounds a change is shown", () => {
  const lines = Array.from({ length: 30 }, (_, i) => `line ${i}`);
  const show = (a: string[], b: string[]) => withContext(lineDiff(a.join("\n"), b.join("\n"))).map((p) => ("unchanged" in p ? `(${p.unchanged})` : p.sign + p.text));
  expect(show(lines, lines.with(10, "changed"))).toEqual([
    "(7)", " line 7", " line 8", " line 9", "-line 10", "+changed", " line 11", " line 12", " line 13", "(16)",
  ]);
  // Two changes that are near share what is between them.
  expect(show(lines, lines.with(0, "a").with(7, "b")).slice(0, 11)).toEqual(["-line 0", "+a", " line 1", " line 2", " line 3", " line 4", " line 5", " line 6", "-line 7", "+b", " line 8"]);
  expect(show([], ["new"])).toEqual(["+new"]);
  expect(withContext(lineDiff(lines.join("\n"), lines.join("\n")))).toEqual([{ unchanged: 30 }]);
});

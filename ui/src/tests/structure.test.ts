import { describe, expect, test } from "vitest";
import { millis } from "../lib/format";
import { isSmall, parseStructure, structureOf } from "../lib/structure";

describe("a value that is shown as a tree", () => {
  test.each([
    ['{"a": [1, 2]}', { a: [1, 2] }],
    ["  [true]", [true]],
    ["{}", undefined],
    ["[]", undefined],
    ["7", undefined],
    ["{not JSON}", undefined],
    ["plain text", undefined],
    [`["${"x".repeat(500_000)}"]`, undefined],
  ])("the text %.30j", (text, found) => expect(parseStructure(text)).toEqual(found));

  test("what has nothing in it is none", () => {
    for (const value of [null, undefined, "text", 7, {}, []]) expect(structureOf(value)).toBeUndefined();
    expect(structureOf({ a: 1 })).toEqual({ a: 1 });
  });

  test("only a small one is open from the start", () => {
    expect(isSmall({ path: "notes.md", nested: { deep: [1, 2, 3] } })).toBe(true);
    expect(isSmall(Array.from({ length: 100 }, (_, i) => i))).toBe(false);
    expect(isSmall({ text: "x".repeat(5_000) })).toBe(false);
    expect(isSmall({ ["x".repeat(5_000)]: 1 })).toBe(false);
  });

  test("one that is nested a hundred thousand times is not gone through", () => {
    let deep: unknown = 1;
    for (let i = 0; i < 100_000; i++) deep = [deep];
    expect(isSmall(deep)).toBe(false);
  });
});

test.each([[3.24, "3.2 ms"], [999, "999 ms"], [1250, "1.25 s"], [125_000, "2 min 5 s"], [7_500_000, "2 h 5 min"]])("%d milliseconds are %s", (ms, text) => expect(millis(ms)).toBe(text));

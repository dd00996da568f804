import { expect, test } from "vitest";
import { RowOffsets } from "../lib/offsets";

const rows = (count: number, type = "call") => Array.from({ length: count }, (_, i) => ({ key: `r${i}`, type }));

test("rows that were never on the page count with the mean height of their type", () => {
  const offsets = new RowOffsets();
  const all = rows(10_000);
  offsets.setRows(all);
  expect(offsets.total).toBe(320_000);
  for (let i = 0; i < 10; i++) offsets.measured(9_990 + i, all[9_990 + i]!, 20);
  expect(offsets.total).toBe(320_000 - 10 * 12);
  offsets.measured(0, all[0]!, 40);
  // From the first row on they are counted anew, with what is known now.
  expect(offsets.top(1)).toBe(40);
  expect(offsets.total).toBeCloseTo(40 + 9_989 * (240 / 11) + 200);
});

test("a row is found by its place, also after rows were added, put between and changed", () => {
  const offsets = new RowOffsets();
  const all = rows(2_000);
  offsets.setRows(all);
  all.forEach((row, i) => offsets.measured(i, row, i % 2 ? 10 : 30));
  expect(offsets.top(100)).toBe(2_000);
  expect(offsets.indexAt(1_999)).toBe(99);
  expect(offsets.indexAt(2_000)).toBe(100);
  expect(offsets.indexAt(-5)).toBe(0);
  expect(offsets.indexAt(1e9)).toBe(1_999);
  const between = [...all.slice(0, 50), { key: "new", type: "other" }, ...all.slice(50), { key: "last", type: "other" }];
  offsets.setRows(between);
  offsets.measured(50, between[50]!, 100);
  expect(offsets.top(50)).toBe(1_000);
  expect(offsets.top(51)).toBe(1_100);
  expect(offsets.indexAt(1_099)).toBe(50);
  expect(offsets.total).toBe(40_000 + 200);
  offsets.setRows([]);
  expect([offsets.total, offsets.indexAt(10)]).toEqual([0, 0]);
});

test("fifty thousand rows are placed again in a moment when some are added", () => {
  const offsets = new RowOffsets();
  const all = rows(50_000);
  offsets.setRows(all);
  void offsets.total;
  let read = 0;
  const counted = all.map((row) => ({ get key() { read++; return row.key; }, type: row.type }));
  offsets.setRows(counted);
  void offsets.total;
  read = 0;
  offsets.setRows([...counted, { key: "more", type: "call" }]);
  void offsets.total;
  expect(read).toBe(0);
});

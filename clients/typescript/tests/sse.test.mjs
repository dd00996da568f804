// The parser of server-sent events.
import assert from "node:assert/strict";
import { test } from "node:test";
import { SseParser } from "../dist/sse.js";

test("chunk boundaries do not change the events", () => {
  const stream = new TextEncoder().encode(
    ': hello\n\nid: 1\nevent: message\ndata: {"a":1}\n\ndata:x\r\ndata: y\r\n\r\ndata\n\nretry: 5\n\nid: 2\ndata: \u00e9\r\rdata: unfinished',
  );
  for (let size = 1; size <= stream.length; size += 1) {
    const parser = new SseParser();
    const found = [];
    for (let at = 0; at < stream.length; at += size) found.push(...parser.push(stream.subarray(at, at + size)));
    assert.deepEqual(found, ['{"a":1}', "x\ny", "", "\u00e9"], `in pieces of ${size}`);
  }
});

test("an event over the limit is an error", () => {
  const parser = new SseParser();
  const piece = new Uint8Array(16 * 1024 * 1024 + 1).fill(0x78);
  assert.deepEqual(parser.push(piece), []);
  assert.throws(() => parser.push(piece), RangeError);
});

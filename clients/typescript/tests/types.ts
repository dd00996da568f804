// What the compiler must infer and refuse; it is compiled, never run.
import { Oubliette, isRefused, type FromSchema, type SessionEvent } from "../dist/index.js";

type Same<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false;
const same = <A, B>(_: Same<A, B>): void => {};

const lend = new Oubliette("http://127.0.0.1:8080", "t").lend("myapp");

lend.tool(
  "every",
  {
    description: "Every kind of argument.",
    inputSchema: {
      type: "object",
      properties: {
        text: { type: "string", minLength: 1 },
        count: { type: "integer" },
        flag: { type: ["boolean", "null"] },
        level: { enum: ["low", "high", 3] },
        fixed: { const: "yes" },
        list: { type: "array", items: { type: "object", properties: { x: { type: "number" } }, required: ["x"] } },
        either: { anyOf: [{ type: "string" }, { type: "number" }] },
        both: {
          allOf: [
            { type: "object", properties: { a: { type: "string" } }, required: ["a"] },
            { type: "object", properties: { b: { type: "number" } }, required: ["b"] },
          ],
        },
        map: { type: "object", additionalProperties: { type: "number" } },
        any: {},
      },
      required: ["text", "list"],
    },
  },
  (args, call) => {
    same<typeof args.text, string>(true);
    same<typeof args.count, number | undefined>(true);
    same<typeof args.flag, boolean | null | undefined>(true);
    same<typeof args.level, "low" | "high" | 3 | undefined>(true);
    same<typeof args.fixed, "yes" | undefined>(true);
    same<typeof args.list, { x: number }[]>(true);
    same<typeof args.either, string | number | undefined>(true);
    same<NonNullable<typeof args.both>["a"], string>(true);
    same<NonNullable<typeof args.both>["b"], number>(true);
    same<typeof args.map, Record<string, number> | undefined>(true);
    same<typeof args.any, unknown>(true);
    same<typeof call.signal, AbortSignal>(true);
    // @ts-expect-error: not in the schema
    args.missing;
    return args.text.length;
  },
);

lend.tool("loose", {}, (args) => {
  same<typeof args, Record<string, unknown>>(true);
});

// A schema whose literals the compiler does not see is wider, never wrong.
const read: { type: "object"; properties: Record<string, { type: "string" | "number" }> } = { type: "object", properties: {} };
lend.tool("read", { inputSchema: read }, (args) => args["name"]);

// @ts-expect-error: an input schema is of type object
lend.tool("scalar", { inputSchema: { type: "string" } }, () => 1);

same<FromSchema<{ type: "array" }>, unknown[]>(true);
same<FromSchema<false>, never>(true);
same<FromSchema<true>, unknown>(true);

export function heard(event: SessionEvent): string {
  switch (event.type) {
    case "turn_completed":
      return event.text;
    case "approval_requested":
      return event.approval_id;
    case "error":
      // @ts-expect-error: no such code
      return event.code === "oops" ? "" : event.message;
    default:
      return "";
  }
}

export function explain(error: unknown): string {
  if (isRefused(error, "not_found")) {
    same<typeof error.code, "not_found">(true);
    return error.reason;
  }
  // @ts-expect-error: no such code
  return isRefused(error, "oops") ? "" : String(error);
}

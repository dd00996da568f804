// What the server says of an agent's rules: for each tool the entries that touch it. Seen from an entry: its tools.
import type { RuleEntry } from "./types";

/** A tool as `tool_explain` lists it. */
export interface JudgedTool {
  name: string;
  canonical: string;
  source: string;
  allowed: boolean;
  reason?: string;
  rules?: { list: "denied" | "ask" | "allowed"; entry: unknown }[];
}

/** An entry as text that does not depend on the order of its fields. */
function normalised(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(normalised).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value) ?? "null";
  const fields = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
  return `{${fields.map(([name, inner]) => `${JSON.stringify(name)}:${normalised(inner)}`).join(",")}}`;
}

/** The tools that an entry of a list is about. */
export function matchedBy(tools: JudgedTool[], list: string, entry: RuleEntry): JudgedTool[] {
  const wanted = normalised(entry);
  return tools.filter((tool) => tool.rules?.some((rule) => rule.list === list && normalised(rule.entry) === wanted));
}

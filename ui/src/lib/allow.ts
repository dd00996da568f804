// An agent's rules as a table of its tools: what `allowed`, `denied` and `aliases` mean for each, and how ticking
// a box changes them. The server decides; this only shows and edits what it will decide by.
import type { AgentDefinition, ToolRow } from "./types";

export type Rules = NonNullable<AgentDefinition["tools"]>;

const server = (canonical: string) => /^@([^/]+)\//.exec(canonical)?.[1] ?? "";
const plain = (canonical: string) => canonical.replace(/^@([^/]+)\/(.*)$/, (_, id: string, name: string) => `${id}_${name}`.replace(/[^A-Za-z0-9_-]/g, "_"));

/** Every name a catalog tool goes by. */
export function names(rules: Rules, canonical: string): string[] {
  return [canonical, plain(canonical), ...aliases(rules, canonical)];
}

export function aliases(rules: Rules, canonical: string): string[] {
  return Object.entries(rules.aliases ?? {}).filter(([, target]) => target === canonical).map(([alias]) => alias);
}

export function everything(rules: Rules): boolean {
  return !rules.allowed?.length || rules.allowed.includes("*");
}

export function allowed(rules: Rules, canonical: string): boolean {
  if (everything(rules)) return true;
  const group = `@${server(canonical)}/*`;
  return rules.allowed!.some((rule) => rule === group || names(rules, canonical).includes(rule));
}

/** The rule that denies a tool: its own name, or a pattern over several. */
export function deniedBy(rules: Rules, row: Pick<ToolRow, "canonical" | "name">): string | undefined {
  const known = [...names(rules, row.canonical), row.name];
  return rules.denied?.find((rule) => (rule.endsWith("*") ? known.some((name) => name.startsWith(rule.slice(0, -1))) : known.includes(rule)));
}

/** `allowed` with one tool ticked or not. A rule over several is first written out, as far as its tools are known. */
export function tick(rules: Rules, canonical: string, on: boolean, known: string[]): string[] {
  if (allowed(rules, canonical) === on) return rules.allowed ?? [];
  if (on) return [...(rules.allowed ?? []), canonical];
  const own = server(canonical);
  const before = everything(rules) ? (rules.use ?? []).map((id) => `@${id}/*`) : rules.allowed!;
  const mine = names(rules, canonical);
  const after = before.flatMap((rule) =>
    rule === `@${own}/*` ? known.filter((other) => server(other) === own && other !== canonical) : mine.includes(rule) ? [] : [rule],
  );
  // An empty list would allow everything.
  return after.length ? [...new Set(after)] : [`@${own}/-`];
}

export function deny(rules: Rules, row: Pick<ToolRow, "canonical" | "name">, on: boolean): string[] {
  const rest = (rules.denied ?? []).filter((rule) => ![...names(rules, row.canonical), row.name].includes(rule));
  return on ? [...rest, row.canonical] : rest;
}

/** `aliases` with a tool's own replaced by these. */
export function rename(rules: Rules, canonical: string, to: string[]): Record<string, string> {
  const others = Object.entries(rules.aliases ?? {}).filter(([, target]) => target !== canonical);
  return Object.fromEntries([...others, ...to.map((alias) => [alias, canonical] as const)]);
}

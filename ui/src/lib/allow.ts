// An agent's tool rules, per tool: what `allowed`, `denied` and `aliases` mean for it, and how a changed checkbox
// changes them. The server enforces the rules; this only shows and edits them.
import type { AgentDefinition, ToolRow } from "./types";

export type Rules = NonNullable<AgentDefinition["tools"]>;

const serverOf = (canonical: string) => /^@([^/]+)\//.exec(canonical)?.[1] ?? "";
const plainName = (canonical: string) => canonical.replace(/^@([^/]+)\/(.*)$/, (_, id: string, name: string) => `${id}_${name}`.replace(/[^A-Za-z0-9_-]/g, "_"));

/** All names of a catalog tool: canonical, plain and aliases. */
export function allNames(rules: Rules, canonical: string): string[] {
  return [canonical, plainName(canonical), ...aliasesOf(rules, canonical)];
}

export function aliasesOf(rules: Rules, canonical: string): string[] {
  return Object.entries(rules.aliases ?? {}).filter(([, target]) => target === canonical).map(([alias]) => alias);
}

export function allowsEverything(rules: Rules): boolean {
  return !rules.allowed?.length || rules.allowed.includes("*");
}

export function isAllowed(rules: Rules, canonical: string): boolean {
  if (allowsEverything(rules)) return true;
  const group = `@${serverOf(canonical)}/*`;
  return rules.allowed!.some((rule) => rule === group || allNames(rules, canonical).includes(rule));
}

/** The rule that denies a tool: one of its names, or a pattern that matches one. */
export function deniedBy(rules: Rules, row: Pick<ToolRow, "canonical" | "name">): string | undefined {
  const known = [...allNames(rules, row.canonical), row.name];
  return rules.denied?.find((rule) => (rule.endsWith("*") ? known.some((name) => name.startsWith(rule.slice(0, -1))) : known.includes(rule)));
}

/** `allowed` after one tool's box was ticked or unticked. A rule for a whole server is first replaced by its known tools. */
export function setAllowed(rules: Rules, canonical: string, on: boolean, known: string[]): string[] {
  if (isAllowed(rules, canonical) === on) return rules.allowed ?? [];
  if (on) return [...(rules.allowed ?? []), canonical];
  const own = serverOf(canonical);
  const before = allowsEverything(rules) ? (rules.use ?? []).map((id) => `@${id}/*`) : rules.allowed!;
  const mine = allNames(rules, canonical);
  const after = before.flatMap((rule) =>
    rule === `@${own}/*` ? known.filter((other) => serverOf(other) === own && other !== canonical) : mine.includes(rule) ? [] : [rule],
  );
  // An empty list would allow everything.
  return after.length ? [...new Set(after)] : [`@${own}/-`];
}

export function setDenied(rules: Rules, row: Pick<ToolRow, "canonical" | "name">, on: boolean): string[] {
  const rest = (rules.denied ?? []).filter((rule) => ![...allNames(rules, row.canonical), row.name].includes(rule));
  return on ? [...rest, row.canonical] : rest;
}

/** `aliases` with those of one tool replaced. */
export function setAliases(rules: Rules, canonical: string, to: string[]): Record<string, string> {
  const others = Object.entries(rules.aliases ?? {}).filter(([, target]) => target !== canonical);
  return Object.fromEntries([...others, ...to.map((alias) => [alias, canonical] as const)]);
}

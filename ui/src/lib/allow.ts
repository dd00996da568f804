// An agent's tool rules, per tool: what `allowed`, `denied` and `aliases` mean for it, and how a changed checkbox
// changes them. The server enforces the rules; this only shows and edits them.
import type { AgentDefinition, RuleEntry, ToolRow } from "./types";

export type Rules = NonNullable<AgentDefinition["tools"]>;

/** The pattern of an entry, with or without a condition. */
const patternOf = (entry: RuleEntry): string => (typeof entry === "string" ? entry : entry.tool);
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

/** Whether a tool may be called, with some arguments at least. */
export function isAllowed(rules: Rules, canonical: string): boolean {
  if (allowsEverything(rules)) return true;
  const group = `@${serverOf(canonical)}/*`;
  return rules.allowed!.map(patternOf).some((rule) => rule === group || rule === "*" || allNames(rules, canonical).includes(rule));
}

/** The rule that denies a tool whatever its arguments: one of its names, or a pattern that matches one. */
export function deniedBy(rules: Rules, row: Pick<ToolRow, "canonical" | "name">): string | undefined {
  return rules.denied?.filter((entry) => typeof entry === "string").find((rule) => matches(rules, row, rule));
}

/** The entry that makes a call of a tool wait for a person, whatever the arguments or for some. */
export function askedBy(rules: Rules, row: Pick<ToolRow, "canonical" | "name">): RuleEntry | undefined {
  return rules.ask?.find((entry) => matches(rules, row, patternOf(entry)));
}

function matches(rules: Rules, row: Pick<ToolRow, "canonical" | "name">, rule: string): boolean {
  const known = [...allNames(rules, row.canonical), row.name];
  return rule.endsWith("*") ? known.some((name) => name.startsWith(rule.slice(0, -1))) : known.includes(rule);
}

/** `allowed` after one tool's box was ticked or unticked. A rule for a whole server is first replaced by its known tools. */
export function setAllowed(rules: Rules, canonical: string, on: boolean, known: string[]): RuleEntry[] {
  if (isAllowed(rules, canonical) === on) return rules.allowed ?? [];
  if (on) return [...(rules.allowed ?? []), canonical];
  const own = serverOf(canonical);
  const before: RuleEntry[] = allowsEverything(rules) ? (rules.use ?? []).map((id) => `@${id}/*`) : rules.allowed!;
  const mine = allNames(rules, canonical);
  const others = known.filter((other) => serverOf(other) === own && other !== canonical);
  const after = before.flatMap((rule): RuleEntry[] => {
    if (mine.includes(patternOf(rule))) return [];
    if (patternOf(rule) !== `@${own}/*`) return [rule];
    return typeof rule === "string" ? others : others.map((tool) => ({ ...rule, tool }));
  });
  // An empty list would allow everything.
  return after.length ? [...new Set(after)] : [`@${own}/-`];
}

export function setDenied(rules: Rules, row: Pick<ToolRow, "canonical" | "name">, on: boolean): RuleEntry[] {
  return withName(rules, rules.denied, row, on);
}

export function setAsked(rules: Rules, row: Pick<ToolRow, "canonical" | "name">, on: boolean): RuleEntry[] {
  return withName(rules, rules.ask, row, on);
}

/** A list of entries with, or without, one that names the tool; entries with a condition stay. */
function withName(rules: Rules, list: RuleEntry[] | undefined, row: Pick<ToolRow, "canonical" | "name">, on: boolean): RuleEntry[] {
  const rest = (list ?? []).filter((entry) => typeof entry !== "string" || ![...allNames(rules, row.canonical), row.name].includes(entry));
  return on ? [...rest, row.canonical] : rest;
}

/** An entry as one line of text: a pattern as it is, a condition as JSON. */
export function entryText(entry: RuleEntry): string {
  return typeof entry === "string" ? entry : JSON.stringify(entry);
}

/** The entry that a line of text means. Text that begins like JSON and is none stays text, for the server to refuse. */
export function parseEntry(line: string): RuleEntry {
  if (!line.startsWith("{")) return line;
  try {
    return JSON.parse(line) as RuleEntry;
  } catch {
    return line;
  }
}

/** `aliases` with those of one tool replaced. */
export function setAliases(rules: Rules, canonical: string, to: string[]): Record<string, string> {
  const others = Object.entries(rules.aliases ?? {}).filter(([, target]) => target !== canonical);
  return Object.fromEntries([...others, ...to.map((alias) => [alias, canonical] as const)]);
}

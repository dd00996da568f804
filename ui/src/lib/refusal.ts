// The strict schema's refusal, `agents/x/agent.json: tools.use[0]: reason`, taken apart so that it can stand
// beside its field.

export interface Refusal {
  /** As a dotted path; empty for the whole document. */
  field: string;
  reason: string;
}

export function refusal(message: string): Refusal {
  const text = message.replace(/^\S+\.json: /, "");
  const at = /^([A-Za-z_][^\s:]*): ([\s\S]+)$/.exec(text);
  if (at) {
    const missing = /^missing field `([^`]+)`/.exec(at[2]!);
    return { field: missing ? `${at[1]}.${missing[1]}` : at[1]!, reason: at[2]! };
  }
  const named = /^(?:missing|unknown) field `([^`]+)`/.exec(text);
  return { field: named?.[1] ?? "", reason: text };
}

/** What a refusal says of a field or of something inside it. */
export function said(at: Refusal | null, ...fields: string[]): string {
  if (!at?.field) return "";
  for (const field of fields) {
    const rest = at.field.startsWith(field) ? at.field.slice(field.length) : undefined;
    if (rest === "") return at.reason;
    if (rest?.startsWith(".") || rest?.startsWith("[")) return `${rest.replace(/^\./, "")}: ${at.reason}`;
  }
  return "";
}

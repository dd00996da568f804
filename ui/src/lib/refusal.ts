// Parses the server's validation errors, `agents/x/agent.json: tools.use[0]: reason`, so that a form can show the
// reason beside the field.

export interface Refusal {
  /** The field as a dotted path; empty for the whole document. */
  field: string;
  reason: string;
}

export function parseRefusal(message: string): Refusal {
  const text = message.replace(/^\S+\.json: /, "");
  const at = /^([A-Za-z_][^\s:]*): ([\s\S]+)$/.exec(text);
  if (at) {
    const missing = /^missing field `([^`]+)`/.exec(at[2]!);
    return { field: missing ? `${at[1]}.${missing[1]}` : at[1]!, reason: at[2]! };
  }
  const named = /^(?:missing|unknown) field `([^`]+)`/.exec(text);
  return { field: named?.[1] ?? "", reason: text };
}

/** The reason to show beside a form's field: of an error in one of `fields` or inside it; else empty. */
export function fieldError(at: Refusal | null, ...fields: string[]): string {
  if (!at?.field) return "";
  for (const field of fields) {
    const rest = at.field.startsWith(field) ? at.field.slice(field.length) : undefined;
    if (rest === "") return at.reason;
    if (rest?.startsWith(".") || rest?.startsWith("[")) return `${rest.replace(/^\./, "")}: ${at.reason}`;
  }
  return "";
}

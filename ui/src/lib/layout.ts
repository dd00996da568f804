// Lays out the arguments of a call for a person who has to judge it: a command as a command, a file as its text, an edit
// as a difference. What has no layout stays JSON. Nothing is left out: fields without a place of their own are in `rest`.

export type ArgumentLayout =
  | { kind: "command"; command: string; rest: Record<string, unknown> }
  | { kind: "write"; path: string; text: string; rest: Record<string, unknown> }
  | { kind: "edit"; path: string; before: string; after: string; rest: Record<string, unknown> }
  | { kind: "json" };

const PATHS = ["path", "file_path", "filePath", "filename", "file"];
const TEXTS = ["content", "contents", "file_text", "text"];
const EDITS = [["old_string", "new_string"], ["oldString", "newString"], ["oldText", "newText"], ["old_str", "new_str"]] as const;
const COMMANDS = ["argv", "command", "cmd"];

type Fields = Record<string, unknown>;

function without(fields: Fields, ...names: string[]): Fields {
  return Object.fromEntries(Object.entries(fields).filter(([name]) => !names.includes(name)));
}

const isText = (value: unknown): value is string => typeof value === "string";
const areTexts = (value: unknown): value is string[] => Array.isArray(value) && value.length > 0 && value.every(isText);

export function layOut(value: unknown): ArgumentLayout {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { kind: "json" };
  const fields = value as Fields;
  const permission = layOutPermission(fields);
  if (permission) return permission;
  for (const name of COMMANDS) {
    const given = fields[name];
    if (areTexts(given)) return { kind: "command", command: given.map(quote).join(" "), rest: without(fields, name) };
    if (isText(given) && areTexts(fields["args"])) return { kind: "command", command: [given, ...fields["args"]].map(quote).join(" "), rest: without(fields, name, "args") };
    // A string is what a shell is given, shown as it is.
    if (isText(given)) return { kind: "command", command: given, rest: without(fields, name) };
  }
  const path = PATHS.find((name) => isText(fields[name]));
  if (!path) return { kind: "json" };
  for (const [before, after] of EDITS) {
    const [old, next] = [fields[before], fields[after]];
    if ((isText(old) || old === null) && isText(next)) {
      return { kind: "edit", path: String(fields[path]), before: old ?? "", after: next, rest: without(fields, path, before, after) };
    }
  }
  const text = TEXTS.find((name) => isText(fields[name]));
  // Encoded bytes are no text to read.
  if (!text || (fields["encoding"] !== undefined && !/^utf-?8$/i.test(String(fields["encoding"])))) return { kind: "json" };
  return { kind: "write", path: String(fields[path]), text: String(fields[text]), rest: without(fields, path, text) };
}

/** An agent's own permission request (ACP): what its tool call would do, and the answers that the agent offers. */
function layOutPermission(fields: Fields): ArgumentLayout | undefined {
  const call = fields["toolCall"] as Fields | null | undefined;
  if (!call || typeof call !== "object" || !Array.isArray(fields["options"])) return undefined;
  const options = fields["options"].map((option: Fields | null) => option?.["name"] ?? option?.["optionId"] ?? option);
  const rest = { ...without(call, "rawInput", "toolCallId", "status"), ...without(fields, "toolCall", "options"), options };
  const inner = layOut(call["rawInput"]);
  if (inner.kind !== "json") return { ...inner, rest: { ...inner.rest, ...rest } };
  const content = Array.isArray(call["content"]) ? (call["content"] as (Fields | null)[]) : [];
  const [change] = content;
  if (content.length !== 1 || change?.["type"] !== "diff" || !isText(change["path"]) || !isText(change["newText"])) return undefined;
  const input = call["rawInput"] === undefined ? {} : { rawInput: call["rawInput"] };
  return { kind: "edit", path: change["path"], before: isText(change["oldText"]) ? change["oldText"] : "", after: change["newText"], rest: { ...without(rest, "content"), ...input } };
}

/** One argument as a shell would need it written, so that its borders are seen. */
function quote(argument: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(argument) ? argument : `'${argument.replaceAll("'", `'\\''`)}'`;
}

/** Fields that a summary names; the others are seen when the row is opened. */
const MAX_SUMMARY_FIELDS = 6;

/** A call's arguments on one line, for a row: the command or the path where there is one, else its fields. */
export function summarise(value: unknown, brief: (value: unknown) => string): string {
  const layout = layOut(value);
  if (layout.kind === "command") return brief(layout.command);
  if (layout.kind === "write" || layout.kind === "edit") return brief(layout.path);
  if (value === null || typeof value !== "object" || Array.isArray(value)) return brief(value);
  const fields = value as Fields;
  const path = PATHS.find((name) => isText(fields[name]));
  const names = Object.keys(fields).filter((name) => name !== path);
  const said = names.slice(0, MAX_SUMMARY_FIELDS).map((name) => `${name}: ${brief(fields[name])}`);
  if (names.length > MAX_SUMMARY_FIELDS) said.push("…");
  return brief([...(path ? [String(fields[path])] : []), ...said].join(", "));
}

// Control characters but tab and newline; zero-width characters; marks that reverse the direction of text; what looks like a
// space and is none.
// eslint-disable-next-line no-control-regex
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u00a0\u00ad\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb]|\udb40[\udc00-\udfff]/g;

/** Text with everything made visible that could hide or reorder what a person reads: U+202E becomes ⟨202E⟩. */
export function reveal(text: string): string {
  return text.replace(UNSEEN, (c) => `⟨${c.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// What is pasted to add tool servers: a standard `mcpServers` block, as other MCP clients use it, or a command line.
// The server decides what becomes of it (`tool_add`), so that the command line and the console agree.

export type ToolAddition = { servers: Record<string, unknown> } | { command: string[] };

export interface AddedTools {
  entries: { id: string }[];
  tests: { id: string; ok: boolean; took_ms: number; tools: string[]; error?: string }[];
  notes: string[];
  /** With `dry_run`: what would be written. */
  planned?: { id: string; definition: unknown; replaces: boolean }[];
}

/** Reads pasted text: JSON is a block of servers, anything else a command line. */
export function parseAddition(text: string): ToolAddition {
  const trimmed = text.trim();
  if (!trimmed) throw new Error("Paste an mcpServers block, or a command such as: npx -y some-server");
  if (!trimmed.startsWith("{")) return { command: splitWords(trimmed) };
  const root = JSON.parse(trimmed) as Record<string, unknown>;
  if (Object.keys(root).length === 0) throw new Error("There is no server in this block.");
  return { servers: root };
}

/** Splits a command line into words, as a shell does with quotes and backslashes. */
function splitWords(line: string): string[] {
  const words: string[] = [];
  let word: string | null = null;
  let quote = "";
  for (let i = 0; i < line.length; i++) {
    const c = line[i] ?? "";
    if (quote) {
      if (c === quote) quote = "";
      else word += c;
    } else if (c === '"' || c === "'") {
      quote = c;
      word ??= "";
    } else if (c === "\\") {
      word = (word ?? "") + (line[++i] ?? "");
    } else if (/\s/.test(c)) {
      if (word !== null) words.push(word);
      word = null;
    } else {
      word = (word ?? "") + c;
    }
  }
  if (quote) throw new Error(`A ${quote} is not closed.`);
  if (word !== null) words.push(word);
  return words;
}

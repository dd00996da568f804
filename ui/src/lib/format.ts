// Times, sizes and JSON values as short text.

export function age(from: string | undefined, now: number): string {
  if (!from) return "";
  const seconds = Math.max(0, Math.round((now - Date.parse(from)) / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

/** A duration in the units that a person would say it in: 3.2 ms, 1.25 s, 2 min 5 s. */
export function millis(ms: number): string {
  if (ms < 10) return `${Number(ms.toFixed(1))} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** A round duration, for an axis: without what is nought. */
export function roundMillis(ms: number): string {
  if (ms < 1000) return `${Number(ms.toPrecision(3))} ms`;
  if (ms < 60_000) return `${Number((ms / 1000).toFixed(2))} s`;
  return millis(ms).replace(/ 0 (s|min)$/, "");
}

/** A number of things in words: 1 turn, 2 turns. */
export const plural = (count: number, word: string): string => `${count} ${word}${count === 1 ? "" : "s"}`;

/** The local time of day of a timestamp, HH:MM:SS. */
export function timeOfDay(ts: string): string {
  const at = new Date(ts);
  return Number.isNaN(at.getTime()) ? ts : at.toTimeString().slice(0, 8);
}

export function dateTime(ts: string | undefined): string {
  if (!ts) return "";
  const at = new Date(ts);
  const two = (n: number) => String(n).padStart(2, "0");
  return Number.isNaN(at.getTime()) ? ts : `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${at.toTimeString().slice(0, 8)}`;
}

export function bytes(count: number): string {
  if (count < 1024) return `${count} B`;
  if (count < 1 << 20) return `${(count / 1024).toFixed(1)} KiB`;
  return `${(count / (1 << 20)).toFixed(1)} MiB`;
}

/** How many lines a text has, in words. A newline at its end ends the last line, it does not begin another. */
export function lineCount(text: string): string {
  let count = text === "" || text.endsWith("\n") ? 0 : 1;
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) count++;
  return count === 1 ? "1 line" : `${count} lines`;
}

/** Values that are gone through beyond the shown part, to say how much is hidden. */
const MAX_COUNTED_VALUES = 50_000;

/**
 * A value as text of at most `most` characters, and how many were cut: at least that many if `atLeast`. Only the shown
 * part is built, and only so much of the rest is looked at: serialising a large result completely would freeze the page.
 */
export function toText(value: unknown, most = 20_000, indent = 2, counted = MAX_COUNTED_VALUES): { text: string; cut: number; atLeast: boolean } {
  const parts: string[] = [];
  let made = 0;
  let cut = 0;
  let beyond = 0;
  const put = (piece: string) => {
    const room = Math.max(0, most - made);
    if (room) parts.push(piece.length > room ? piece.slice(0, room) : piece);
    made += piece.length;
    cut += Math.max(0, piece.length - room);
  };
  const quoted = (text: string) => {
    const room = Math.max(0, most - made);
    if (text.length <= room) return put(JSON.stringify(text));
    put(JSON.stringify(text.slice(0, room)).slice(0, -1));
    made += text.length - room;
    cut += text.length - room;
  };
  const line = (depth: number) => (indent ? `\n${" ".repeat(indent * depth)}` : "");
  const write = (item: unknown, depth: number): void => {
    if (typeof item === "string") return quoted(item);
    if (item === null || typeof item !== "object") return put(JSON.stringify(item) ?? "null");
    const keys = Array.isArray(item) ? undefined : Object.keys(item);
    const fields = item as Record<string | number, unknown>;
    const [begin, end] = keys ? "{}" : "[]";
    const length = keys ? keys.length : (item as unknown[]).length;
    let count = 0;
    for (let i = 0; i < length; i++) {
      const key = keys ? keys[i]! : i;
      const inner = fields[key];
      if (keys && inner === undefined) continue;
      if (made > most && ++beyond > counted) break;
      put(`${count++ ? "," : begin}${line(depth + 1)}`);
      if (keys) put(`${JSON.stringify(key)}:${indent ? " " : ""}`);
      write(inner, depth + 1);
    }
    put(count ? `${line(depth)}${end}` : `${begin}${end}`);
  };
  if (typeof value === "string") put(value);
  else if (value !== undefined) write(value, 0);
  return { text: parts.join(""), cut, atLeast: beyond > counted };
}

/** A value on one line of at most `most` characters. */
export function brief(value: unknown, most = 120): string {
  const { text, cut } = toText(typeof value === "string" ? value.slice(0, most * 4) : value, most, 0, 0);
  const line = text.replace(/\s+/g, " ");
  return cut || (typeof value === "string" && value.length > most * 4) ? `${line.slice(0, most)}…` : line;
}

/** The text of a tool's result, if all its content blocks are text. */
export function resultText(value: unknown): string | undefined {
  const blocks = (value as { content?: unknown } | null | undefined)?.content;
  if (!Array.isArray(blocks) || !blocks.length) return undefined;
  const texts = blocks.map((block) => (block as { type?: string; text?: unknown } | null)?.type === "text" && (block as { text?: unknown }).text);
  return texts.every((text) => typeof text === "string") ? texts.join("\n") : undefined;
}

/** What a result with text and images says: its text, and what stands for each image or sound. Undefined for anything else. */
export function contentText(value: unknown): string | undefined {
  const blocks = (value as { content?: unknown } | null | undefined)?.content;
  if (!Array.isArray(blocks) || !blocks.length) return undefined;
  const texts = blocks.map((block: { type?: unknown; text?: unknown; mimeType?: unknown } | null) => {
    if (block?.type === "text" && typeof block.text === "string") return block.text;
    return block?.type === "image" || block?.type === "audio" ? `[${String(block.mimeType ?? block.type).slice(0, 60)}]` : undefined;
  });
  return texts.every((text) => text !== undefined) ? texts.join("\n") : undefined;
}

/** A number of tokens in at most four digits: 950, 12.3k, 4.56M. */
export function tokens(count: number): string {
  if (!(count >= 1000)) return String(Math.max(0, Math.round(count || 0)));
  if (count < 1_000_000) return `${Number((count / 1000).toPrecision(3))}k`;
  return `${Number((count / 1_000_000).toPrecision(3))}M`;
}

/** US dollars; small amounts with as many digits as say something. */
export function dollars(amount: number): string {
  if (amount === 0) return "$0";
  if (amount < 0.0001) return "<$0.0001";
  return amount < 1 ? `$${amount.toFixed(4)}` : `$${amount.toFixed(2)}`;
}

/** What model requests used, in a few words; empty if there were none. */
export function usageLine(usage: { requests?: number; input_tokens?: number; output_tokens?: number; cost_usd?: number; estimated?: boolean } | undefined): string {
  if (!usage?.requests) return "";
  const about = usage.estimated ? "≈ " : "";
  const cost = typeof usage.cost_usd === "number" ? `${dollars(usage.cost_usd)} · ` : "";
  return `${about}${cost}${tokens(usage.input_tokens ?? 0)} in · ${tokens(usage.output_tokens ?? 0)} out`;
}

/** What remains until a time, in its largest units: 9 min 41 s. */
export function left(until: string | undefined, now: number): string {
  if (!until) return "";
  const seconds = Math.max(0, Math.round((Date.parse(until) - now) / 1000));
  if (Number.isNaN(seconds)) return "";
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** An agent in a list to choose from: its name, and its slug where the name does not say it. */
export function agentLabel(agent: { slug: string; definition: { name: string } }): string {
  const { slug, definition: { name } } = agent;
  return name.toLowerCase().replace(/\s+/g, "-") === slug ? name : `${name} (${slug})`;
}

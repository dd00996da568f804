// Times, sizes and JSON values as short text.

export function age(from: string | undefined, now: number): string {
  if (!from) return "";
  const seconds = Math.max(0, Math.round((now - Date.parse(from)) / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

export function millis(ms: number): string {
  if (ms < 10) return `${Number(ms.toFixed(1))} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(2)} s`;
}

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

/**
 * A value as text of at most `most` characters, and how many were cut. Only the shown part is built: serialising a
 * large result completely would freeze the page.
 */
export function toText(value: unknown, most = 20_000, indent = 2): { text: string; cut: number } {
  const parts: string[] = [];
  let made = 0;
  let cut = 0;
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
    const list = Array.isArray(item);
    const entries = list ? item : Object.entries(item).filter(([, inner]) => inner !== undefined);
    if (!entries.length) return put(list ? "[]" : "{}");
    put(list ? "[" : "{");
    entries.forEach((entry: unknown, i: number) => {
      put(`${i ? "," : ""}${line(depth + 1)}`);
      if (list) return write(entry, depth + 1);
      const [key, inner] = entry as [string, unknown];
      put(`${JSON.stringify(key)}:${indent ? " " : ""}`);
      write(inner, depth + 1);
    });
    put(`${line(depth)}${list ? "]" : "}"}`);
  };
  if (typeof value === "string") put(value);
  else if (value !== undefined) write(value, 0);
  return { text: parts.join(""), cut };
}

/** A value on one line of at most `most` characters. */
export function brief(value: unknown, most = 120): string {
  const { text, cut } = toText(typeof value === "string" ? value.slice(0, most * 4) : value, most, 0);
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

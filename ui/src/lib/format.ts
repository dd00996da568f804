// Small words for times, sizes and values.

export function age(from: string | undefined, now: number): string {
  if (!from) return "";
  const seconds = Math.max(0, Math.round((now - Date.parse(from)) / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

export function millis(ms: number): string {
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(2)} s`;
}

export function clock(ts: string): string {
  return ts.slice(11, 19);
}

export function bytes(count: number): string {
  if (count < 1024) return `${count} B`;
  if (count < 1 << 20) return `${(count / 1024).toFixed(1)} KiB`;
  return `${(count / (1 << 20)).toFixed(1)} MiB`;
}

/** A value as text, cut short: a page must not freeze over a large result. */
export function show(value: unknown, most = 20_000): { text: string; cut: number } {
  const text = typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
  return text.length > most ? { text: text.slice(0, most), cut: text.length - most } : { text, cut: 0 };
}

/** One line for a value. */
export function brief(value: unknown, most = 120): string {
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  const line = text.slice(0, most + 1).replace(/\s+/g, " ");
  return line.length > most ? `${line.slice(0, most)}…` : line;
}

/** The last `count` days up to `now`, oldest first, as UTC `YYYY-MM-DD`. */
export function lastDays(count: number, now: number): string[] {
  return Array.from({ length: count }, (_, i) => new Date(now - (count - 1 - i) * 86_400_000).toISOString().slice(0, 10));
}

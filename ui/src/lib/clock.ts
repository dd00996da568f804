// The server's clock. Times of events are its own; a browser's clock may differ by days, and an age or a countdown between the
// two would be wrong by as much.

/** Answers carry whole seconds and take time themselves: a smaller difference says nothing. In milliseconds. */
const MIN_DIFFERENCE_MS = 3_000;
let difference = 0;

/** Takes the server's time from an answer's `Date` header. */
export function noteServerTime(header: string | null): void {
  const found = Date.parse(header ?? "") - Date.now();
  if (Number.isNaN(found)) return;
  difference = Math.abs(found) < MIN_DIFFERENCE_MS ? 0 : found;
}

/** Milliseconds since the epoch, by the server's clock. */
export const serverNow = (): number => Date.now() + difference;

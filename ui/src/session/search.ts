// A search through all rows of a session, in slices, so that the page answers meanwhile; again when rows have changed.
import type { TimelineRow } from "../lib/timeline";

const MAX_SEARCHED_CHARS = 200_000;
const SLICE_MS = 10;
const AGAIN_MS = 250;

/** The text of each row; a changed row is a new object, so it is built once. */
const texts = new WeakMap<TimelineRow, string>();

function searchedText(row: TimelineRow): string {
  let text = texts.get(row);
  if (text === undefined) texts.set(row, (text = `${row.text ?? ""} ${JSON.stringify(row.event)}`.slice(0, MAX_SEARCHED_CHARS).toLowerCase()));
  return text;
}

export class RowSearch {
  #timer: ReturnType<typeof setTimeout>;
  /** Rows that were searched last. */
  #searched: TimelineRow[] | undefined;

  constructor(wanted: string, rows: () => TimelineRow[], report: (found: TimelineRow[]) => void) {
    const text = wanted.toLowerCase();
    const begin = () => {
      const list = rows();
      if (list === this.#searched) this.#timer = setTimeout(begin, AGAIN_MS);
      else step(list, 0, []);
    };
    const step = (list: TimelineRow[], from: number, found: TimelineRow[]) => {
      const until = performance.now() + SLICE_MS;
      let at = from;
      while (at < list.length && performance.now() < until) {
        const row = list[at++]!;
        if (searchedText(row).includes(text)) found.push(row);
      }
      if (at < list.length) {
        this.#timer = setTimeout(() => step(list, at, found));
        return;
      }
      this.#searched = list;
      report(found);
      this.#timer = setTimeout(begin, AGAIN_MS);
    };
    this.#timer = setTimeout(begin);
  }

  stop(): void {
    clearTimeout(this.#timer);
  }
}

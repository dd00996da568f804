// Where each row of a long list stands, although only those near the reader are on the page and only they have been
// measured. The others count with the mean height of their type, so that the scroll bar tells the place in the whole list.

/** What the list needs to know of a row. */
export interface PlacedRow {
  key: string;
  type: string;
}

/** The height of a row before any of its type has been measured, in pixels. */
const USUAL_HEIGHT = 32;

export class RowOffsets {
  #rows: readonly PlacedRow[] = [];
  /** `#tops[i]`: pixels above row `i`; the last one is the height of all. Right up to and including `#valid`. */
  #tops = new Float64Array(1024);
  #valid = 0;
  /** Measured heights by row key. */
  readonly #heights = new Map<string, number>();
  readonly #means = new Map<string, { sum: number; count: number }>();

  /** Takes the rows as they are now. What stands before the first difference keeps its place. */
  setRows(rows: readonly PlacedRow[]): void {
    const before = this.#rows;
    const most = Math.min(before.length, rows.length, this.#valid);
    let same = 0;
    while (same < most && (rows[same] === before[same] || rows[same]!.key === before[same]!.key)) same++;
    this.#rows = rows;
    this.#valid = same;
    if (this.#tops.length <= rows.length) {
      const larger = new Float64Array(rows.length * 2);
      larger.set(this.#tops);
      this.#tops = larger;
    }
  }

  /** Notes the height of a row that is on the page. */
  measured(index: number, row: PlacedRow, height: number): void {
    const known = this.#heights.get(row.key);
    if (known !== undefined && Math.abs(known - height) < 0.5) return;
    this.#heights.set(row.key, height);
    if (known === undefined) {
      const mean = this.#means.get(row.type) ?? { sum: 0, count: 0 };
      mean.sum += height;
      mean.count++;
      this.#means.set(row.type, mean);
    }
    this.#valid = Math.min(this.#valid, index);
  }

  /** Forgets all heights: the width of the list has changed. */
  forget(): void {
    this.#heights.clear();
    this.#means.clear();
    this.#valid = 0;
  }

  /** Pixels above the row at `index`; of the index after the last one, the height of all. */
  top(index: number): number {
    const to = Math.max(0, Math.min(index, this.#rows.length));
    for (let i = this.#valid; i < to; i++) this.#tops[i + 1] = this.#tops[i]! + this.#height(this.#rows[i]!);
    this.#valid = Math.max(this.#valid, to);
    return this.#tops[to]!;
  }

  get total(): number {
    return this.top(this.#rows.length);
  }

  /** The index of the row at this many pixels from the top; the nearest one if there is none. */
  indexAt(y: number): number {
    if (y >= this.total) return Math.max(0, this.#rows.length - 1);
    let low = 0;
    let high = this.#rows.length;
    while (high - low > 1) {
      const half = (low + high) >> 1;
      if (this.#tops[half]! <= y) low = half;
      else high = half;
    }
    return low;
  }

  #height(row: PlacedRow): number {
    const own = this.#heights.get(row.key);
    if (own !== undefined) return own;
    const mean = this.#means.get(row.type);
    return mean ? mean.sum / mean.count : USUAL_HEIGHT;
  }
}

// A difference of two texts by lines.

export interface DiffLine {
  sign: " " | "+" | "-";
  text: string;
}

/** The largest table of line pairs that is compared; beyond it the changed middle is shown as removed, then added. */
const MAX_CELLS = 250_000;

export function lineDiff(before: string, after: string): DiffLine[] {
  const a = before === "" ? [] : before.split("\n");
  const b = after === "" ? [] : after.split("\n");
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const same = (lines: string[]): DiffLine[] => lines.map((text) => ({ sign: " ", text }));
  return [
    ...same(a.slice(0, head)),
    ...middle(a.slice(head, a.length - tail), b.slice(head, b.length - tail)),
    ...same(a.slice(a.length - tail)),
  ];
}

function middle(a: string[], b: string[]): DiffLine[] {
  const removed = (text: string): DiffLine => ({ sign: "-", text });
  const added = (text: string): DiffLine => ({ sign: "+", text });
  if (a.length * b.length > MAX_CELLS) return [...a.map(removed), ...b.map(added)];
  // longest[i][j]: the longest common run of lines after a[i] and b[j].
  const width = b.length + 1;
  const longest = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1]! + 1 : Math.max(longest[(i + 1) * width + j]!, longest[i * width + j + 1]!);
    }
  }
  const out: DiffLine[] = [];
  let i = 0;
  let j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      out.push({ sign: " ", text: a[i]! });
      i++;
      j++;
    } else if (longest[(i + 1) * width + j]! >= longest[i * width + j + 1]!) out.push(removed(a[i++]!));
    else out.push(added(b[j++]!));
  }
  return [...out, ...a.slice(i).map(removed), ...b.slice(j).map(added)];
}

/** Unchanged lines that are shown before and after a change. */
const CONTEXT_LINES = 3;

/** A difference with its long unchanged parts counted instead of shown. */
export function withContext(lines: DiffLine[]): (DiffLine | { unchanged: number })[] {
  const out: (DiffLine | { unchanged: number })[] = [];
  for (let from = 0; from < lines.length; ) {
    let to = from;
    while (to < lines.length && lines[to]!.sign === " ") to++;
    const head = from === 0 ? 0 : CONTEXT_LINES;
    const tail = to === lines.length ? 0 : CONTEXT_LINES;
    const hidden = to - from - head - tail;
    // One line is as short as the note about it.
    const keepTo = hidden > 1 ? from + head : to;
    for (let i = from; i < keepTo; i++) out.push(lines[i]!);
    if (hidden > 1) {
      out.push({ unchanged: hidden });
      for (let i = to - tail; i < to; i++) out.push(lines[i]!);
    }
    for (from = to; from < lines.length && lines[from]!.sign !== " "; from++) out.push(lines[from]!);
  }
  return out;
}

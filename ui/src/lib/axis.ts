// Round ends and readable labels for the axes of charts.

/** The next round number at or above a value; of counts, one whose half is a whole number. */
export function roundUp(value: number, counts = false): number {
  if (!(value > 0)) return counts ? 2 : 1;
  const power = counts ? Math.max(1, 10 ** Math.floor(Math.log10(value))) : 10 ** Math.floor(Math.log10(value));
  const steps = counts && power === 1 ? [2, 4, 6, 10] : [1, 2, 2.5, 5, 10];
  return (steps.find((n) => n * power >= value * 0.999999) ?? 10) * power;
}

const two = (n: number) => String(n).padStart(2, "0");

/** Labels for points in time: at most `most` below the axis, and one in full for each point. Dates where a point is hours long. */
export function axisTimes(times: number[], most: number): { shown: { text: string; place: number }[]; full: string[] } {
  const step = times.length > 1 ? times[1]! - times[0]! : 60_000;
  const span = (times.at(-1) ?? 0) - (times[0] ?? 0);
  const clock = (at: Date) => `${two(at.getHours())}:${two(at.getMinutes())}${step < 60_000 ? `:${two(at.getSeconds())}` : ""}`;
  const day = (at: Date) => `${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const text = (ms: number) => {
    const at = new Date(ms);
    if (span > 2 * 86_400_000) return day(at);
    return `${two(at.getHours())}:${two(at.getMinutes())}`;
  };
  const every = Math.max(1, Math.ceil(times.length / most));
  const width = 100 / Math.max(1, times.length);
  const shown = times
    .map((ms, i) => ({ text: text(ms), place: (i + 0.5) * width, i }))
    .filter(({ i }) => i % every === 0)
    // The same day twice says nothing.
    .filter(({ text: said }, i, list) => i === 0 || list[i - 1]!.text !== said)
    .map(({ text: said, place }) => ({ text: said, place }));
  return { shown, full: times.map((ms) => `${span > 86_400_000 ? `${day(new Date(ms))} ` : ""}${clock(new Date(ms))}`) };
}

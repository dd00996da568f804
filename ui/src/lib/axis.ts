// Round ends and readable labels for the axes of charts.

/** The next round number at or above a value; of counts, one whose half is a whole number. */
export function roundUp(value: number, counts = false): number {
  if (!(value > 0)) return counts ? 2 : 1;
  const power = counts ? Math.max(1, 10 ** Math.floor(Math.log10(value))) : 10 ** Math.floor(Math.log10(value));
  const steps = counts && power === 1 ? [2, 4, 6, 10] : [1, 2, 2.5, 5, 10];
  return (steps.find((n) => n * power >= value * 0.999999) ?? 10) * power;
}

const [MINUTE, HOUR, DAY] = [60_000, 3_600_000, 86_400_000];
/** Round ends of an axis of durations, whose halves are round, too; in milliseconds. */
const ROUND_MILLIS = [10_000, 20_000, 30_000, MINUTE, 2 * MINUTE, 4 * MINUTE, 10 * MINUTE, 20 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 4 * HOUR, 10 * HOUR, DAY];

/** The next round duration at or above one, in milliseconds: round in the unit in which it is read. */
export function roundUpMillis(ms: number): number {
  return ms <= 5_000 ? roundUp(ms) : (ROUND_MILLIS.find((n) => n >= ms) ?? Math.ceil(ms / DAY) * DAY);
}

const two = (n: number) => String(n).padStart(2, "0");

/** Distances between labels of a time axis, in milliseconds. */
const TIME_STEPS = [MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 5 * DAY, 7 * DAY, 14 * DAY];
/** A label nearer to an end of the axis than this would stand beyond it, in percent of its length. */
const MIN_MARGIN = 4;

/** Labels for points in time: at most `most` round times below the axis, and one in full for each point. Dates where it is days long. */
export function axisTimes(times: number[], most: number): { shown: { text: string; place: number }[]; full: string[] } {
  const step = times.length > 1 ? times[1]! - times[0]! : MINUTE;
  const first = times[0] ?? 0;
  const span = times.length * step;
  const clock = (at: Date) => `${two(at.getHours())}:${two(at.getMinutes())}`;
  const day = (at: Date) => `${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const between = TIME_STEPS.find((n) => span / n <= most) ?? span;
  // Round by the clock of whoever reads it.
  const offset = new Date(first).getTimezoneOffset() * MINUTE;
  const shown: { text: string; place: number }[] = [];
  for (let ms = Math.ceil((first - offset) / between) * between + offset; ms <= first + span && shown.length < most; ms += between) {
    const place = ((ms - first) / Math.max(1, span)) * 100;
    const at = new Date(ms);
    if (times.length && place >= MIN_MARGIN && place <= 100 - MIN_MARGIN) shown.push({ text: between >= DAY || (span > DAY && at.getHours() === 0) ? day(at) : clock(at), place });
  }
  const seconds = (at: Date) => (step < MINUTE ? `:${two(at.getSeconds())}` : "");
  return { shown, full: times.map((ms) => `${span > DAY ? `${day(new Date(ms))} ` : ""}${clock(new Date(ms))}${seconds(new Date(ms))}`) };
}

// How long calls took, as the gate measured it. The events of a session tell only when the agent reported a call and its result, which for a
// fast call is once and late; where the debugger knows a call, its duration is the true one.
import type { DebugEvent, SessionEvent } from "./types";
import { beginOf } from "./waterfall";

/** An agent reports a call at most this long after the gate began it, in milliseconds. */
const MAX_REPORT_DELAY_MS = 2_000;
/** Clocks of events that belong together may differ by this much, in milliseconds. */
const SLACK_MS = 5;
/** How many calls of one tool are looked at, the last ones before a result first. */
const MAX_CANDIDATES = 20;
/** How many calls of one tool are kept, the latest ones. */
const MAX_KEPT = 5_000;

interface MeasuredCall {
  began: number;
  took: number;
  arguments: unknown;
}

export class CallTimes {
  /** By the name under which a tool was called; in the order in which the calls began. */
  readonly #calls = new Map<string, MeasuredCall[]>();
  /** What was found, by the call's event. */
  readonly #found = new WeakMap<SessionEvent, number>();

  add(events: DebugEvent[]): void {
    const changed = new Set<MeasuredCall[]>();
    for (const event of events) {
      if (event.kind !== "tool_call" || typeof event["duration_ms"] !== "number") continue;
      const name = String(event["tool"]);
      const list = this.#calls.get(name) ?? [];
      this.#calls.set(name, list);
      const call = { began: beginOf(event), took: event["duration_ms"], arguments: event["arguments"] };
      if (list.length && list[list.length - 1]!.began > call.began) changed.add(list);
      list.push(call);
    }
    for (const list of changed) list.sort((a, b) => a.began - b.began);
    // Now and then, since it moves all that are kept.
    for (const list of this.#calls.values()) if (list.length > 2 * MAX_KEPT) list.splice(0, list.length - MAX_KEPT);
  }

  /** How long a call took; `ended`: when its result was reported. Undefined if the gate has not told. */
  durationOf(call: SessionEvent, ended: number): number | undefined {
    const known = this.#found.get(call);
    if (known !== undefined) return known;
    const found = this.#find(call, ended);
    if (found !== undefined) this.#found.set(call, found);
    return found;
  }

  #find(call: SessionEvent, ended: number): number | undefined {
    const list = this.#list(String(call["tool"]));
    if (!list) return undefined;
    const from = Date.parse(call.ts) - MAX_REPORT_DELAY_MS;
    const wanted = JSON.stringify(call["arguments"] ?? {});
    let best: MeasuredCall | undefined;
    const distance = ({ began, took }: MeasuredCall) => Math.abs(began + took - ended);
    for (let i = lastBefore(list, ended + SLACK_MS), looked = 0; i >= 0 && looked < MAX_CANDIDATES; i--, looked++) {
      const candidate = list[i]!;
      if (candidate.began < from) break;
      if (candidate.began + candidate.took > ended + SLACK_MS || JSON.stringify(candidate.arguments ?? {}) !== wanted) continue;
      if (!best || distance(candidate) < distance(best)) best = candidate;
    }
    return best?.took;
  }

  /** Calls of a tool. Some agents prefix its name with that of the MCP server. */
  #list(name: string): MeasuredCall[] | undefined {
    const own = this.#calls.get(name);
    for (let at = own ? -1 : name.indexOf("_"); at >= 0; at = name.indexOf("_", at + 1)) {
      const rest = this.#calls.get(name.slice(at + 1));
      if (rest) return rest;
    }
    return own;
  }
}

/** The index of the last call that began at this time or before; -1: none. */
function lastBefore(list: MeasuredCall[], time: number): number {
  let [low, high] = [0, list.length];
  while (low < high) {
    const half = (low + high) >> 1;
    if (list[half]!.began <= time) low = half + 1;
    else high = half;
  }
  return low - 1;
}

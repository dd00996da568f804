// The health of a catalog entry's servers, over all sessions that run one.
import type { ServerRow } from "./types";

/** A tool server that runs in a session. */
export interface RunningServer extends ServerRow {
  session_id: string;
  agent: string;
}

const ORDER = ["red", "yellow", "green"];

/** Those first that most need to be looked at. */
export const byNeed = (servers: RunningServer[]): RunningServer[] => [...servers].sort((a, b) => ORDER.indexOf(a.status) - ORDER.indexOf(b.status));

/** The one that most needs to be looked at; undefined without any. */
export function worstOf(servers: RunningServer[] | undefined): RunningServer | undefined {
  return servers?.reduce((worst, one) => (ORDER.indexOf(one.status) < ORDER.indexOf(worst.status) ? one : worst));
}

// Calls of the server's tools over REST, and its event streams. Login uses a cookie that scripts cannot read, so no
// script sees a token.

import { noteServerTime } from "./clock";

export class ApiError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** Called when the server answers 401: the login has ended. Until the next login no request is sent. */
let onLoggedOut: () => void = () => {};
let loggedOut = false;
/** Counts logins, so that a 401 to a request of an earlier login does not end the current one. */
let loginCount = 0;
export function whenLoggedOut(run: () => void): void {
  onLoggedOut = run;
}

function loginEnded(asked: number): void {
  if (asked !== loginCount) return;
  loggedOut = true;
  onLoggedOut();
}

/** GETs a path and returns the response, for answers that are not JSON (a file). */
export async function get(path: string): Promise<Response> {
  const asked = loginCount;
  let answer: Response;
  try {
    answer = await fetch(path, { credentials: "same-origin" });
  } catch {
    throw new ApiError("unreachable", "The server cannot be reached. It may be restarting.", 0);
  }
  noteServerTime(answer.headers.get("date"));
  if (answer.ok) return answer;
  if (answer.status === 401) loginEnded(asked);
  const body = (await answer.json().catch(() => null)) as { error?: { code: string; message: string } } | null;
  throw new ApiError(body?.error?.code ?? "internal", body?.error?.message ?? `The server answered ${answer.status}.`, answer.status);
}

async function request(path: string, init: RequestInit): Promise<unknown> {
  return (await sizedRequest(path, init)).body;
}

/** A JSON request; also says how many characters the answer has. */
async function sizedRequest(path: string, init: RequestInit): Promise<{ body: unknown; chars: number }> {
  if (loggedOut && path !== "/api/login") throw new ApiError("unauthenticated", "Your login has ended.", 401);
  const asked = loginCount;
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, credentials: "same-origin" });
  } catch {
    throw new ApiError("unreachable", "The server cannot be reached. It may be restarting.", 0);
  }
  noteServerTime(answer.headers.get("date"));
  const text = await answer.text();
  let body: unknown = null;
  try {
    body = text ? JSON.parse(text) : null;
  } catch {
    body = text;
  }
  if (!answer.ok) {
    const error = (body as { error?: { code: string; message: string } } | null)?.error;
    if (answer.status === 401 && path !== "/api/login") loginEnded(asked);
    throw new ApiError(error?.code ?? "internal", error?.message ?? `The server answered ${answer.status}.`, answer.status);
  }
  return { body, chars: text.length };
}

const jsonPost = (body: unknown): RequestInit => ({
  method: "POST",
  headers: { "content-type": "application/json", "x-oubliette": "1" },
  body: JSON.stringify(body),
});

function post(path: string, body: unknown): Promise<unknown> {
  return request(path, jsonPost(body));
}

/** Calls one of Oubliette's tools. */
export function tool<T>(name: string, args: Record<string, unknown> = {}): Promise<T> {
  return post(`/api/tools/${name}`, args) as Promise<T>;
}

/** Calls one of Oubliette's tools whose answer may be large; also says how many characters it has. */
export function sizedTool<T>(name: string, args: Record<string, unknown>): Promise<{ body: T; chars: number }> {
  return sizedRequest(`/api/tools/${name}`, jsonPost(args)) as Promise<{ body: T; chars: number }>;
}

/** Calls a list tool until its last page (at most about 20,000 items); `key` is the result's field with the items. */
export async function allPages<T>(name: string, key: string, args: Record<string, unknown> = {}): Promise<T[]> {
  const found: T[] = [];
  let cursor: string | undefined;
  do {
    const page = await tool<Record<string, unknown>>(name, { ...args, ...(cursor ? { cursor } : {}) });
    found.push(...((page[key] as T[] | undefined) ?? []));
    cursor = page["next_cursor"] as string | undefined;
  } while (cursor && found.length < 20_000);
  return found;
}

export async function login(token: string): Promise<void> {
  await post("/api/login", { token });
  loggedOut = false;
  loginCount++;
}

export function logout(): Promise<unknown> {
  return post("/api/logout", {});
}

/** The last index of the debugger's log, among events of these kinds; found by binary search with few small requests. */
export async function lastDebugIndex(kinds?: string[]): Promise<number> {
  const beyond = async (index: number) =>
    (await tool<{ events: unknown[] }>("debugger_events", { since_index: index, max_events: 1, ...(kinds ? { kinds } : {}) })).events.length > 0;
  if (!(await beyond(-1))) return -1;
  let low = 0;
  let high = 1024;
  while (await beyond(high)) [low, high] = [high, high * 4];
  while (high - low > 1) {
    const half = Math.floor((low + high) / 2);
    if (await beyond(half)) low = half;
    else high = half;
  }
  return high;
}

export interface Stream {
  close(): void;
}

/**
 * How long a tab may be hidden before its streams are closed, in milliseconds. A browser has six connections to a server
 * for all its tabs together; a few forgotten tabs would otherwise stop every other.
 */
const HIDDEN_CLOSE_MS = 5_000;

/**
 * Follows an event stream after an index. After a lost connection it asks for the events after the last one it
 * handed over, so none is lost or repeated. `state` reports whether the stream is connected.
 */
export function follow<T extends { index: number }>(
  path: string,
  since: number,
  handlers: { event: (event: T) => void; state: (live: boolean) => void },
): Stream {
  let last = since;
  let source: EventSource | null = null;
  let retry: ReturnType<typeof setTimeout> | undefined;
  let closed = false;

  let hiding: ReturnType<typeof setTimeout> | undefined;

  const open = () => {
    if (closed || source) return;
    if (loggedOut) {
      retry = setTimeout(open, 700);
      return;
    }
    const join = path.includes("?") ? "&" : "?";
    source = new EventSource(`${path}${join}since_index=${last}`, { withCredentials: true });
    source.onopen = () => handlers.state(true);
    source.onmessage = take;
    source.onerror = () => {
      handlers.state(false);
      source?.close();
      source = null;
      retry = setTimeout(open, 700);
    };
  };
  const shown = () => {
    clearTimeout(hiding);
    if (!document.hidden) return open();
    hiding = setTimeout(() => {
      clearTimeout(retry);
      source?.close();
      source = null;
    }, HIDDEN_CLOSE_MS);
  };
  document.addEventListener("visibilitychange", shown);
  const take = (message: MessageEvent<string>) => {
    let event: T;
    try {
      event = JSON.parse(message.data) as T;
    } catch {
      return;
    }
    if (event.index <= last) return;
    last = event.index;
    handlers.event(event);
  };
  open();
  return {
    close() {
      closed = true;
      document.removeEventListener("visibilitychange", shown);
      clearTimeout(hiding);
      clearTimeout(retry);
      source?.close();
    },
  };
}

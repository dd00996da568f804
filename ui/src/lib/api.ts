// Calls of the server's tools over REST, and its event streams. Login uses a cookie that scripts cannot read, so no
// script sees a token.

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
  if (answer.ok) return answer;
  if (answer.status === 401) loginEnded(asked);
  const body = (await answer.json().catch(() => null)) as { error?: { code: string; message: string } } | null;
  throw new ApiError(body?.error?.code ?? "internal", body?.error?.message ?? `The server answered ${answer.status}.`, answer.status);
}

async function request(path: string, init: RequestInit): Promise<unknown> {
  if (loggedOut && path !== "/api/login") throw new ApiError("unauthenticated", "Your login has ended.", 401);
  const asked = loginCount;
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, credentials: "same-origin" });
  } catch {
    throw new ApiError("unreachable", "The server cannot be reached. It may be restarting.", 0);
  }
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
  return body;
}

function post(path: string, body: unknown): Promise<unknown> {
  return request(path, {
    method: "POST",
    headers: { "content-type": "application/json", "x-oubliette": "1" },
    body: JSON.stringify(body),
  });
}

/** Calls one of Oubliette's tools. */
export function tool<T>(name: string, args: Record<string, unknown> = {}): Promise<T> {
  return post(`/api/tools/${name}`, args) as Promise<T>;
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

export interface Stream {
  close(): void;
}

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

  const open = () => {
    if (closed) return;
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
      retry = setTimeout(open, 700);
    };
  };
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
      clearTimeout(retry);
      source?.close();
    },
  };
}

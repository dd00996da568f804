// Tools by plain JSON, and the event streams. The cookie is the browser's to keep: no script sees a token.

export class ApiError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** Called when the server says the login is over. Until the next login nothing is asked of it. */
let onLoggedOut: () => void = () => {};
let out = false;
/** Counts logins: an answer to what was asked under an earlier one says nothing about this one. */
let era = 0;
export function whenLoggedOut(run: () => void): void {
  onLoggedOut = run;
}

function over(asked: number): void {
  if (asked !== era) return;
  out = true;
  onLoggedOut();
}

/** A request whose answer is not JSON: a file, a listing. */
export async function get(path: string): Promise<Response> {
  const asked = era;
  let answer: Response;
  try {
    answer = await fetch(path, { credentials: "same-origin" });
  } catch {
    throw new ApiError("unreachable", "The server cannot be reached. It may be restarting.", 0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) over(asked);
  const body = (await answer.json().catch(() => null)) as { error?: { code: string; message: string } } | null;
  throw new ApiError(body?.error?.code ?? "internal", body?.error?.message ?? `The server answered ${answer.status}.`, answer.status);
}

async function request(path: string, init: RequestInit): Promise<unknown> {
  if (out && path !== "/api/login") throw new ApiError("unauthenticated", "Your login has ended.", 401);
  const asked = era;
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
    if (answer.status === 401 && path !== "/api/login") over(asked);
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

/** Every page of a list. */
export async function all<T>(name: string, key: string, args: Record<string, unknown> = {}): Promise<T[]> {
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
  out = false;
  era++;
}

export function logout(): Promise<unknown> {
  return post("/api/logout", {});
}

export interface Stream {
  close(): void;
}

/**
 * Follows an event stream from an index. The log is the truth: after any break it asks again for what comes
 * after the last event it handed over, so nothing is lost and nothing comes twice.
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
    if (out) {
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

// State shared by the whole page: login, route, title, messages to the user (toasts), drafts, theme and density.
import { ApiError, tool, whenLoggedOut } from "./api";
import { serverNow } from "./clock";
import type { Scope } from "./types";

export interface Toast {
  id: number;
  kind: "info" | "error";
  text: string;
}

let nextToast = 0;

/** A value kept in the browser's storage; reading or writing may be forbidden there. */
function stored(storage: () => Storage, key: string): string | null {
  try {
    return storage().getItem(key);
  } catch {
    return null;
  }
}
function store(storage: () => Storage, key: string, value: string): void {
  try {
    storage().setItem(key, value);
  } catch {
    // It is then kept for as long as the page is open.
  }
}
const DRAFTS = "oubliette.drafts";

function storedDrafts(): Record<string, string> {
  try {
    const found: unknown = JSON.parse(stored(() => sessionStorage, DRAFTS) ?? "{}");
    return found && typeof found === "object" && !Array.isArray(found) ? (found as Record<string, string>) : {};
  } catch {
    return {};
  }
}

class App {
  /** null: not yet known. */
  loggedIn = $state<boolean | null>(null);
  /** The login ended while a page was open: the page stays mounted but hidden until the next login. */
  expired = $state(false);
  info = $state<Record<string, unknown>>({});
  route = $state(location.hash.slice(1) || "/");
  toasts = $state<Toast[]>([]);
  /** The time by the server's clock, to the second. */
  now = $state(serverNow());
  /** What the open page is about; the window's title begins with it. */
  title = $state("");
  /** Unsent messages by key; they survive the end of a login and a reload of this tab. */
  drafts = $state<Record<string, string>>(storedDrafts());
  /** Edited definitions that were left without saving, by page and id. In memory only: they may hold secrets. */
  readonly unsaved = new Map<string, string>();
  /** What was typed into small forms and not sent yet, by page and field. In memory only, for the same reason. */
  typed = $state<Record<string, string>>({});
  /** What stands in forms to try a tool, by the form. */
  readonly tried = new Map<string, string>();
  theme = $state<"auto" | "light" | "dark">((stored(() => localStorage, "oubliette.theme") as "light" | "dark" | null) ?? "auto");
  density = $state<"normal" | "compact">(stored(() => localStorage, "oubliette.density") === "compact" ? "compact" : "normal");

  constructor() {
    const moved = () => (this.route = location.hash.slice(1) || "/");
    addEventListener("hashchange", moved);
    addEventListener("popstate", moved);
    addEventListener("pagehide", () => store(() => sessionStorage, DRAFTS, JSON.stringify(Object.fromEntries(Object.entries(this.drafts).filter(([, text]) => text)))));
    setInterval(() => (this.now = serverNow()), 1000);
    whenLoggedOut(() => {
      if (this.loggedIn) {
        this.tell("Your login has ended. Log in again to go on; your draft is kept.", "error");
        this.expired = true;
      }
      this.loggedIn = false;
    });
  }

  /** Whether closing the tab would lose something. Unsent messages are kept by the browser. */
  get hasUnsaved(): boolean {
    return this.unsaved.size > 0 || Object.values(this.typed).some((text) => text !== "");
  }

  setTheme(theme: "auto" | "light" | "dark"): void {
    this.theme = theme;
    store(() => localStorage, "oubliette.theme", theme);
  }

  setDensity(density: "normal" | "compact"): void {
    this.density = density;
    store(() => localStorage, "oubliette.density", density);
  }

  /** What follows `?` in the address: what is open or filtered on the page, so that a link leads back to it. */
  get query(): URLSearchParams {
    return new URLSearchParams(this.route.split("?")[1] ?? "");
  }

  /** The address of this page with parts of its query changed; an empty value removes its name. */
  #changed(changes: Record<string, string>): string {
    const query = this.query;
    for (const [name, value] of Object.entries(changes)) {
      if (value) query.set(name, value);
      else query.delete(name);
    }
    const text = query.toString();
    return this.route.split("?")[0]! + (text ? `?${text}` : "");
  }

  /** A link to this page with parts of its query changed. */
  linkWith(changes: Record<string, string>): string {
    return `#${this.#changed(changes)}`;
  }

  /** Changes parts of the query in place; with `push`, as a new entry in the history, so that Back takes it back. */
  setQuery(changes: Record<string, string>, push = false): void {
    const route = this.#changed(changes);
    if (route === this.route) return;
    if (push) history.pushState(null, "", `#${route}`);
    else history.replaceState(history.state, "", `#${route}`);
    this.route = route;
  }

  /** Keeps what was typed into a field that has a usual value; that one alone is nothing to lose. */
  keepTyped(key: string, value: string, usual: string): void {
    if (value === usual) delete this.typed[key];
    else this.typed[key] = value;
  }

  /** Whether the address asks for something new to be begun; it does not ask again. */
  takeNew(): boolean {
    const asked = this.query.get("new") !== null;
    if (asked) this.setQuery({ new: "" });
    return asked;
  }

  get parts(): string[] {
    return this.route.split("?")[0]!.split("/").filter(Boolean).map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  }

  /** Whether the login has this scope. The server enforces it; this only hides what it would refuse. */
  can(scope: Scope): boolean {
    const order = ["read", "write", "admin"];
    return order.indexOf(String(this.info["scope"] ?? "admin")) >= order.indexOf(scope);
  }

  go(...parts: string[]): void {
    location.hash = "/" + parts.map(encodeURIComponent).join("/");
    // Set at once: the hashchange event comes later.
    this.route = location.hash.slice(1) || "/";
  }

  tell(text: string, kind: Toast["kind"] = "info"): void {
    const id = nextToast++;
    // A repeated message replaces the earlier one.
    this.toasts = [...this.toasts.filter((t) => t.text !== text).slice(-3), { id, kind, text }];
    setTimeout(() => this.dismiss(id), kind === "error" ? 15_000 : 6_000);
  }

  dismiss(id: number): void {
    this.toasts = this.toasts.filter((t) => t.id !== id);
  }

  /** Runs an action of the user; an error is shown as a toast, and the result is then undefined. */
  async attempt<T>(work: () => Promise<T>): Promise<T | undefined> {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 401)) {
        this.tell(error instanceof Error ? error.message : String(error), "error");
      }
      return undefined;
    }
  }

  async copy(text: string, done = "Copied."): Promise<void> {
    try {
      await navigator.clipboard.writeText(text);
      this.tell(done);
    } catch {
      this.tell("The browser did not let this be copied.", "error");
    }
  }

  async check(): Promise<void> {
    try {
      this.info = await tool<Record<string, unknown>>("server_info");
      this.now = serverNow();
      this.loggedIn = true;
      this.expired = false;
    } catch (error) {
      if (error instanceof ApiError && error.status === 0) {
        setTimeout(() => void this.check(), 1000);
      } else if (!this.expired) {
        this.loggedIn = false;
      }
    }
  }
}

export const app = new App();

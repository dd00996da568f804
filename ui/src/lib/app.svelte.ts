// State shared by the whole page: login, route, messages to the user (toasts), drafts, theme.
import { ApiError, tool, whenLoggedOut } from "./api";
import type { Scope } from "./types";

export interface Toast {
  id: number;
  kind: "info" | "error";
  text: string;
}

let nextToast = 0;

class App {
  /** null: not yet known. */
  loggedIn = $state<boolean | null>(null);
  /** The login ended while a page was open: the page stays mounted but hidden until the next login. */
  expired = $state(false);
  info = $state<Record<string, unknown>>({});
  route = $state(location.hash.slice(1) || "/");
  toasts = $state<Toast[]>([]);
  now = $state(Date.now());
  /** Unsent messages by key; they survive the end of a login. */
  drafts = $state<Record<string, string>>({});
  theme = $state<"auto" | "light" | "dark">("auto");

  constructor() {
    addEventListener("hashchange", () => (this.route = location.hash.slice(1) || "/"));
    setInterval(() => (this.now = Date.now()), 1000);
    whenLoggedOut(() => {
      if (this.loggedIn) {
        this.tell("Your login has ended. Log in again to go on; your draft is kept.", "error");
        this.expired = true;
      }
      this.loggedIn = false;
    });
  }

  get parts(): string[] {
    return this.route.split("/").filter(Boolean).map((part) => {
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

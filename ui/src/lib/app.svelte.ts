// What the whole page shares: who is logged in, where we are, what to tell.
import { ApiError, tool, whenLoggedOut } from "./api";
import type { Scope } from "./types";

export interface Toast {
  id: number;
  kind: "info" | "error";
  text: string;
}

let nextToast = 0;

class App {
  /** null: not known yet. */
  loggedIn = $state<boolean | null>(null);
  /** The login ran out under an open page: what is on it stays, out of sight, until the next login. */
  expired = $state(false);
  info = $state<Record<string, unknown>>({});
  route = $state(location.hash.slice(1) || "/");
  toasts = $state<Toast[]>([]);
  now = $state(Date.now());
  /** Drafts outlive a login that runs out. */
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

  /** Whether the login reaches so far. The server decides; this only keeps the page from offering what it refuses. */
  can(scope: Scope): boolean {
    const order = ["read", "write", "admin"];
    return order.indexOf(String(this.info["scope"] ?? "admin")) >= order.indexOf(scope);
  }

  go(...parts: string[]): void {
    location.hash = "/" + parts.map(encodeURIComponent).join("/");
    // At once: the event that tells of it comes later.
    this.route = location.hash.slice(1) || "/";
  }

  tell(text: string, kind: Toast["kind"] = "info"): void {
    const id = nextToast++;
    // Said once is enough: what repeats takes the place of what was said.
    this.toasts = [...this.toasts.filter((t) => t.text !== text).slice(-3), { id, kind, text }];
    setTimeout(() => this.dismiss(id), kind === "error" ? 15_000 : 6_000);
  }

  dismiss(id: number): void {
    this.toasts = this.toasts.filter((t) => t.id !== id);
  }

  /** Runs something for a person: what goes wrong is told. */
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

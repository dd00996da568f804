// What the whole page shares: who is logged in, where we are, what to tell.
import { ApiError, tool, whenLoggedOut } from "./api";

export interface Toast {
  id: number;
  kind: "info" | "error";
  text: string;
}

let nextToast = 0;

class App {
  /** null: not known yet. */
  loggedIn = $state<boolean | null>(null);
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
      if (this.loggedIn) this.tell("Your login has ended. Log in again to go on; your draft is kept.", "error");
      this.loggedIn = false;
    });
  }

  get parts(): string[] {
    return this.route.split("/").filter(Boolean).map(decodeURIComponent);
  }

  go(...parts: string[]): void {
    location.hash = "/" + parts.map(encodeURIComponent).join("/");
  }

  tell(text: string, kind: Toast["kind"] = "info"): void {
    const id = nextToast++;
    this.toasts.push({ id, kind, text });
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

  async check(): Promise<void> {
    try {
      this.info = await tool<Record<string, unknown>>("server_info");
      this.loggedIn = true;
    } catch (error) {
      if (error instanceof ApiError && error.status === 0) {
        setTimeout(() => void this.check(), 1000);
      } else {
        this.loggedIn = false;
      }
    }
  }
}

export const app = new App();

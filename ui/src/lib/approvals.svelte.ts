// The calls that wait for a person, for the whole page: the inbox, the count in header and title, the marks in lists.
import { ApiError, follow, lastDebugIndex, tool, type Stream } from "./api";
import { app } from "./app.svelte";
import type { Approval, DebugEvent } from "./types";

const KINDS = ["approval_requested", "approval_decided"];
/** Pending approvals kept at hand; more are counted as this many and a plus sign. */
export const MAX_PENDING = 200;
/** Between two looks when no event came: for what a stream that was closed or lost has missed. */
const LOOK_MS = 10_000;

export type Decision = { decision: "allow" | "deny"; reason?: string; remember?: "session" };

class Approvals {
  pending = $state.raw<Approval[]>([]);
  /** Whether there are more pending than `MAX_PENDING`. */
  more = $state(false);
  loaded = $state(false);
  /** Approvals whose decision is on its way to the server. */
  deciding = $state<Record<string, boolean>>({});

  readonly bySession = $derived(Map.groupBy(this.pending, (a) => a.session_id));

  #stream: Stream | undefined;
  #timer: ReturnType<typeof setInterval> | undefined;
  #soon: ReturnType<typeof setTimeout> | undefined;
  #asked = 0;
  #answered = 0;

  get count(): string {
    return this.more ? `${MAX_PENDING}+` : String(this.pending.length);
  }

  /** The pending approval with this id, if it is among those at hand. */
  find(id: string): Approval | undefined {
    return this.pending.find((a) => a.approval_id === id);
  }

  /** Follows approvals until `stop`. */
  start(): void {
    if (this.#timer) return;
    void this.load();
    this.#timer = setInterval(() => app.loggedIn && void this.load(), LOOK_MS);
    void lastDebugIndex(KINDS).then(
      (last) => {
        if (!this.#timer || this.#stream) return;
        this.#stream = follow<DebugEvent>(`/api/debugger?kinds=${KINDS.join(",")}`, last, { event: () => this.#loadSoon(), state: () => {} });
        // For what came between the first look and the stream.
        void this.load();
      },
      () => {},
    );
  }

  stop(): void {
    clearInterval(this.#timer);
    clearTimeout(this.#soon);
    this.#timer = this.#soon = undefined;
    this.#stream?.close();
    this.#stream = undefined;
    this.pending = [];
    this.loaded = this.more = false;
  }

  /** Many events at once cost one request. */
  #loadSoon(): void {
    this.#soon ??= setTimeout(() => {
      this.#soon = undefined;
      void this.load();
    }, 80);
  }

  async load(): Promise<void> {
    const mine = ++this.#asked;
    try {
      const got = await tool<{ approvals: Approval[]; next_cursor?: string }>("approval_list", { status: "pending", limit: MAX_PENDING });
      if (mine < this.#answered) return;
      this.#answered = mine;
      this.pending = got.approvals;
      this.more = got.next_cursor !== undefined && got.next_cursor !== null;
      this.loaded = true;
    } catch {
      // The server is not reachable or the login has ended; both are shown elsewhere.
    }
  }

  /** Sends a decision. Returns whether it counted; if another person was faster, says so. */
  async decide(id: string, how: Decision): Promise<boolean> {
    if (this.deciding[id]) return false;
    this.deciding[id] = true;
    try {
      await tool<Approval>("approval_decide", { approval_id: id, ...how });
      this.pending = this.pending.filter((a) => a.approval_id !== id);
      app.tell(how.decision === "deny" ? "Denied." : how.remember ? "Allowed, and the same rule for the rest of this session." : "Allowed once.");
      return true;
    } catch (error) {
      const late = error instanceof ApiError && (error.code === "conflict" || error.code === "not_found");
      app.tell(late ? `Decided already: ${error.message}` : error instanceof Error ? error.message : String(error), "error");
      return false;
    } finally {
      delete this.deciding[id];
      void this.load();
    }
  }
}

export const approvals = new Approvals();

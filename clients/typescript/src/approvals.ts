/** Calls that wait for a person's decision. Objects have the server's field names. */

import type { CallOptions, Oubliette } from "./client.js";

/** The state of an approval. */
export type ApprovalStatus = "pending" | "allowed" | "denied" | "expired" | "cancelled";

/** A tool call that waits, or waited, for a person. */
export interface Approval {
  approval_id: string;
  session_id: string;
  project_id: string;
  agent: string;
  tool: string;
  canonical: string;
  source: string;
  /** The arguments of the call: an approval is for exactly these. */
  arguments: unknown;
  /** The entry of agent.json that makes the call wait. */
  rule: unknown;
  status: ApprovalStatus;
  requested_at: string;
  expires_at: string;
  decided_at?: string;
  decided_by?: string;
  reason?: string;
}

/** How a call is denied. */
export interface DenyOptions {
  /** Why, at most 2000 characters; the agent is told. */
  reason?: string;
}

/** How a call is allowed. */
export interface AllowOptions {
  /** Why, at most 2000 characters; it is kept with the approval. */
  reason?: string;
  /** `session`: later calls that meet the same rule in the same session pass as well; default: this call alone. */
  remember?: "session";
}

/** Calls about approvals. */
export class ApprovalCalls {
  readonly #client: Oubliette;

  constructor(client: Oubliette) {
    this.#client = client;
  }

  /** One page of approvals; `next_cursor` is there when there are more. */
  list(
    filter: { session_id?: string; project_id?: string; status?: ApprovalStatus; limit?: number; cursor?: string } = {},
    options?: CallOptions,
  ): Promise<{ approvals: Approval[]; next_cursor?: string }> {
    return this.#client.call("approval_list", filter, options);
  }

  /** Lets the call pass. Refused with `conflict` if it was decided already. */
  allow(approvalId: string, decision: AllowOptions = {}, options?: CallOptions): Promise<Approval> {
    return this.#decide(approvalId, "allow", decision, options);
  }

  /** Refuses the call: the agent gets the error `not_allowed` with the reason. */
  deny(approvalId: string, decision: DenyOptions = {}, options?: CallOptions): Promise<Approval> {
    return this.#decide(approvalId, "deny", decision, options);
  }

  #decide(
    approvalId: string,
    decision: "allow" | "deny",
    more: AllowOptions,
    options?: CallOptions,
  ): Promise<Approval> {
    return this.#client.call("approval_decide", { ...more, approval_id: approvalId, decision }, options);
  }
}

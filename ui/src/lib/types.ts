// Types of the public REST and SSE interface that the console uses.

export type Scope = "read" | "write" | "admin";
export type Status = "starting" | "running" | "idle" | "switching" | "ended" | "failed";
export type Light = "green" | "yellow" | "red";

export interface Project {
  project_id: string;
  name: string;
  description?: string;
  agent?: string;
  env?: Record<string, string>;
  api_key?: { scope: Scope };
  sandbox?: Record<string, string | number>;
  limits?: Record<string, number>;
  workspaces?: string;
  default_workspace_id?: string;
  created_at?: string;
}

export interface Workspace {
  workspace_id: string;
  project_id: string;
  name?: string;
  default?: boolean;
  source?: { git?: string; ref?: string };
  created_at?: string;
}

export interface Session {
  session_id: string;
  project_id: string;
  workspace_id?: string;
  agent: string;
  status: Status;
  reason?: string;
  parent_id?: string;
  depth: number;
  turn?: number;
  title?: string;
  created_at?: string;
  updated_at?: string;
  isolation?: string;
  pending_approvals?: string[];
  usage?: Usage;
  created_by?: { token_id?: string; name?: string };
}

export interface SessionEvent {
  index: number;
  ts: string;
  session_id: string;
  type: string;
  [field: string]: unknown;
}

export interface DebugEvent {
  index: number;
  ts: string;
  session_id?: string;
  agent?: string;
  kind: string;
  [field: string]: unknown;
}

export interface Schema {
  type?: string | string[];
  properties?: Record<string, Schema>;
  required?: string[];
  description?: string;
  enum?: unknown[];
  items?: Schema;
  default?: unknown;
  [more: string]: unknown;
}

export interface ToolRow {
  name: string;
  canonical: string;
  aliases: string[];
  source: "caller" | "oubliette" | "catalog" | "base";
  server?: string;
  allowed: boolean;
  reason?: string;
  available: boolean;
  description: string;
  inputSchema: Schema;
  /** The entries of the agent's rules that touch it, in the order they are applied. */
  rules?: { list: "denied" | "ask" | "allowed"; entry: unknown }[];
}

export interface ServerRow {
  id: string;
  transport: string;
  status: Light;
  since: string;
  error?: string;
  last_check?: string;
  next_retry?: string;
  tools: number;
}

export interface ToolList {
  tools: ToolRow[];
  servers: ServerRow[];
}

/** A pattern of tool names, or one with a condition on a call's arguments. */
export type RuleEntry = string | { tool: string; when: unknown };

/** A pinned package that Oubliette installs and runs. */
export interface ProgramSpec {
  npm?: string;
  pypi?: string;
  bin?: string;
  scripts?: boolean;
}

export interface AgentDefinition {
  name: string;
  description?: string;
  prompt: string;
  model?: string;
  runtime?: { kind: string; command?: string[]; program?: ProgramSpec; args?: string[]; env?: Record<string, string>; read_only?: string[]; mcp_transport?: "stdio" | "http" };
  permissions?: string;
  children?: string[];
  env?: Record<string, string>;
  sandbox?: { network?: string; egress?: string[]; [more: string]: unknown };
  tools?: { use?: string[]; allowed?: RuleEntry[]; denied?: RuleEntry[]; ask?: RuleEntry[]; aliases?: Record<string, string> };
  [more: string]: unknown;
}

export interface Agent {
  slug: string;
  definition: AgentDefinition;
  /** The script's file. Only in the answer for a single agent, not in lists. */
  files?: Record<string, string>;
  error?: string;
  /** False if no valid version of its file was ever read; `error` says why. */
  usable?: boolean;
}

export interface CatalogEntry {
  id: string;
  definition: Record<string, unknown>;
  error?: string;
  /** False if no valid version of its file was ever read; `error` says why. */
  usable?: boolean;
}

export interface Token {
  token_id: string;
  name: string;
  scope: Scope;
  project_id?: string;
  session_id?: string;
  expires_at?: string;
  created_at?: string;
}

/** One of the servers that make up this Oubliette. */
export interface KnownServer {
  server_id: string;
  address: string;
  version: string;
  /** Active sessions that run on it. */
  sessions: number;
  since: string;
  last_seen: string;
}

export interface AuditEntry {
  index?: number;
  ts: string;
  /** A token's id, `owner` or `anonymous`. */
  principal: string;
  token_id?: string;
  session_id?: string;
  action: string;
  target?: string;
  outcome: string;
  [more: string]: unknown;
}

export interface CallResult {
  content: { type: string; text?: string; [more: string]: unknown }[];
  structuredContent?: unknown;
  isError?: boolean;
}

export type ApprovalStatus = "pending" | "allowed" | "denied" | "expired" | "cancelled";

/** A call that waits, or waited, for a person. */
export interface Approval {
  approval_id: string;
  session_id: string;
  project_id: string;
  agent: string;
  tool: string;
  canonical?: string;
  /** `agent`: the agent asks for its own permission (ACP), not a rule of the gate. */
  source: string;
  arguments: unknown;
  /** The entry of `tools.ask` as written in agent.json. */
  rule?: unknown;
  status: ApprovalStatus;
  requested_at: string;
  expires_at?: string;
  decided_at?: string;
  decided_by?: unknown;
  reason?: string;
}

/** What model requests used. `input_tokens` is all input; `cached_tokens` the part of it read from a cache. */
export interface Usage {
  requests: number;
  input_tokens: number;
  output_tokens: number;
  cached_tokens: number;
  cost_usd?: number;
  estimated?: boolean;
}

export interface UsageRow extends Usage {
  key: string;
  tool_calls: number;
  turns: number;
}

export interface UsageReport {
  rows: UsageRow[];
  total: Omit<UsageRow, "key">;
}

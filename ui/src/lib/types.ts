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

export interface AgentDefinition {
  name: string;
  description?: string;
  prompt: string;
  model?: string;
  runtime?: { kind: string; command?: string[]; env?: Record<string, string>; read_only?: string[] };
  permissions?: string;
  children?: string[];
  env?: Record<string, string>;
  sandbox?: { network?: string };
  tools?: { use?: string[]; allowed?: string[]; denied?: string[]; aliases?: Record<string, string> };
  [more: string]: unknown;
}

export interface Agent {
  slug: string;
  definition: AgentDefinition;
  /** The script's file. Only in the answer for a single agent, not in lists. */
  files?: Record<string, string>;
  error?: string;
}

export interface CatalogEntry {
  id: string;
  definition: Record<string, unknown>;
  error?: string;
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

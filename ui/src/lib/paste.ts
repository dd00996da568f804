// Converts a standard `mcpServers` block, as other MCP clients use it, into catalog entries.

interface McpServerBlock {
  command?: string;
  args?: string[];
  env?: Record<string, string>;
  url?: string;
  serverUrl?: string;
  headers?: Record<string, string>;
}

export type ImportedEntry = { id: string } & Record<string, unknown>;

export function fromMcpServers(text: string): ImportedEntry[] {
  const root = JSON.parse(text) as Record<string, unknown>;
  const block = (root["mcpServers"] ?? root["servers"] ?? root) as Record<string, McpServerBlock>;
  const entries = Object.entries(block).map(([name, server]) => toCatalogEntry(name, server));
  if (entries.length === 0) throw new Error("There is no server in this block.");
  return entries;
}

function toCatalogEntry(name: string, server: McpServerBlock): ImportedEntry {
  const id = name.toLowerCase().replace(/[^a-z0-9-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 32);
  if (!id) throw new Error(`${JSON.stringify(name)} cannot be made into a catalog id.`);
  const endpoint = server.url ?? server.serverUrl;
  if (endpoint?.startsWith("ws")) return { id, kind: "mcp", transport: "ws", endpoint };
  if (endpoint) return { id, kind: "mcp", transport: "http", endpoint, ...(server.headers ? { headers: server.headers } : {}) };
  if (!server.command) throw new Error(`${name}: neither "command" nor "url" is given.`);
  return { id, kind: "mcp", transport: "stdio", command: server.command, args: server.args ?? [], env: server.env ?? {} };
}

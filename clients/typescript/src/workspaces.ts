/** Workspaces and their files. Objects have the server's field names. */

import type { CallOptions, Oubliette } from "./client.js";

/** A workspace. */
export interface WorkspaceInfo {
  workspace_id: string;
  project_id: string;
  name?: string | null;
  /** Whether it is the project's default one. */
  default: boolean;
  [field: string]: unknown;
}

/** Calls about workspaces. */
export class WorkspaceCalls {
  readonly #client: Oubliette;

  constructor(client: Oubliette) {
    this.#client = client;
  }

  create(
    workspace: {
      project_id: string;
      name?: string;
      env?: Record<string, string>;
      source?: { git: string; ref?: string };
    },
    options?: CallOptions,
  ): Promise<WorkspaceInfo> {
    return this.#client.call("workspace_create", workspace, options);
  }

  /** One page of workspaces; `next_cursor` is there when there are more. */
  list(
    filter: { project_id?: string; limit?: number; cursor?: string } = {},
    options?: CallOptions,
  ): Promise<{ workspaces: WorkspaceInfo[]; next_cursor?: string }> {
    return this.#client.call("workspace_list", filter, options);
  }

  async delete(workspaceId: string, options?: CallOptions): Promise<void> {
    await this.#client.call("workspace_delete", { workspace_id: workspaceId }, options);
  }

  /** What changed in the workspace, as the result of `workspace_diff`. */
  diff(workspaceId: string, options?: CallOptions): Promise<any> {
    return this.#client.call("workspace_diff", { workspace_id: workspaceId }, options);
  }

  /** The bytes of a file. */
  readFile(workspaceId: string, path: string, options: CallOptions = {}): Promise<Uint8Array> {
    return this.#client.request(filePath(workspaceId, path), {}, options, async (response) => {
      return new Uint8Array(await response.arrayBuffer());
    });
  }

  /** A file's text, as UTF-8. */
  async readText(workspaceId: string, path: string, options: CallOptions = {}): Promise<string> {
    return new TextDecoder().decode(await this.readFile(workspaceId, path, options));
  }

  /** What a folder holds; the workspace's root by default. */
  listFolder(
    workspaceId: string,
    path = "",
    options: CallOptions = {},
  ): Promise<{ path: string; entries: { name: string; [field: string]: unknown }[] }> {
    return this.#client.requestJson(filePath(workspaceId, path), {}, options) as Promise<any>;
  }

  /** Writes a file whole, and its parents; at most 4 MiB. */
  async writeFile(
    workspaceId: string,
    path: string,
    content: string | Uint8Array<ArrayBuffer> | Blob,
    options: CallOptions = {},
  ): Promise<void> {
    const init = { method: "PUT", headers: { "Content-Type": "application/octet-stream" }, body: content };
    await this.#client.requestJson(filePath(workspaceId, path), init, options);
  }

  /** Deletes a file, or an empty folder; refused with `conflict` when the folder is not empty. */
  async deleteFile(workspaceId: string, path: string, options: CallOptions = {}): Promise<void> {
    await this.#client.requestJson(filePath(workspaceId, path), { method: "DELETE" }, options);
  }

  /** The whole workspace as a tar.gz, as it arrives. `options` are for the wait until it begins; cancel the stream to end it. */
  archive(workspaceId: string, options: CallOptions = {}): Promise<ReadableStream<Uint8Array>> {
    const path = `api/workspaces/${encodeURIComponent(workspaceId)}/archive`;
    return this.#client.request(path, {}, options, (response) => response.body ?? new ReadableStream());
  }
}

function filePath(workspaceId: string, path: string): string {
  const parts = path.split("/").filter((part) => part !== "");
  // A URL drops these, however they are written, and would name another file.
  if (parts.some((part) => part === "." || part === "..")) {
    throw new TypeError(`${JSON.stringify(path)}: a path in a workspace has no . or .. in it`);
  }
  return `api/workspaces/${[workspaceId, "files", ...parts].map(encodeURIComponent).join("/")}`;
}

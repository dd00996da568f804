// What tokens are called. Only an admin may list them; for others an id stays an id.
import { allPages } from "./api";
import { app } from "./app.svelte";
import type { Token } from "./types";

class TokenNames {
  #names = $state.raw<ReadonlyMap<string, string>>(new Map());
  #asked = false;

  /** Reads the names once, when the first is needed. */
  load(): void {
    if (this.#asked || !app.can("admin")) return;
    this.#asked = true;
    void allPages<Token>("token_list", "tokens").then((found) => (this.#names = new Map(found.map((t) => [t.token_id, t.name]))), () => (this.#asked = false));
  }

  /** The name of a token, or its id. */
  of(id: string): string {
    return this.#names.get(id) ?? id;
  }
}

export const tokenNames = new TokenNames();

// The editing state of one definition, an agent's or a catalog entry's: loading it, parsing its JSON text, saving, deleting.
// The pages differ in their forms and in what else they show; what may overtake what is decided here, once.
import { tool } from "../lib/api";
import { app } from "../lib/app.svelte";
import { onlyLatest } from "../lib/latest";
import { parseRefusal, type Refusal } from "../lib/refusal";

interface StoredDefinition {
  definition: unknown;
  error?: string;
}

/** What differs between agents and catalog entries. */
interface DefinitionPage<Stored> {
  /** The first part of the page's address. */
  page: string;
  /** The argument that names the definition: `slug` or `id`. */
  key: string;
  tools: { get: string; put: string; remove: string };
  /** What a person is asked before a deletion. */
  confirmDelete: (id: string) => string;
  /** Loads the page's list again. */
  reload: () => Promise<void>;
  /** Called with what the server has, once it is shown. */
  onLoaded?: (stored: Stored) => void;
  /** Further arguments of a save; taken before it is sent. */
  extraArguments?: () => Record<string, unknown>;
  /** Called when a save has succeeded and the same definition is still open. */
  onSaved?: (sent: Record<string, unknown>) => void;
  /** Whether something beside the text has unsaved changes. */
  hasOtherChanges?: () => boolean;
}

export class DefinitionEditor<Definition extends object, Stored extends StoredDefinition> {
  id = $state("");
  text = $state("");
  /** The text as the server has it. */
  saved = $state("");
  asText = $state(false);
  /** "none": nothing is open; "new": the definition does not exist yet. */
  mode = $state<"none" | "edit" | "new">("none");
  problem = $state<Refusal | null>(null);
  /** Whether the definition has arrived: before, there is nothing to write into. */
  shown = $state(false);
  /** Whether loading it failed. */
  missed = $state(false);

  readonly parsed = $derived.by((): { value?: Definition; error?: string } => {
    try {
      const value: unknown = JSON.parse(this.text || "{}");
      return value && typeof value === "object" && !Array.isArray(value) ? { value: value as Definition } : { error: "must be a JSON object" };
    } catch (error) {
      return { error: error instanceof Error ? error.message : String(error) };
    }
  });

  readonly #page: DefinitionPage<Stored>;
  readonly #startLoad = onlyLatest();

  constructor(page: DefinitionPage<Stored>) {
    this.#page = page;
  }

  get isNew(): boolean {
    return this.mode === "new";
  }

  /** Whether the address still shows this page with this definition. */
  #isOpen(id: string): boolean {
    return this.id === id && this.mode !== "none" && app.parts[0] === this.#page.page;
  }

  /** Loads and shows a definition; with `unlessChangedFrom`, only if the text has stayed this. */
  async open(id: string, unlessChangedFrom?: string): Promise<void> {
    const isLatest = this.#startLoad();
    const first = unlessChangedFrom === undefined;
    if (first) this.shown = this.missed = false;
    this.id = id;
    this.mode = "edit";
    const got = await app.attempt(() => tool<Stored>(this.#page.tools.get, { [this.#page.key]: id }));
    if (!isLatest()) return;
    if (this.id === id && !got && first) this.missed = true;
    if (!got || this.id !== id || this.mode !== "edit") return;
    if (!first && (this.text !== unlessChangedFrom || this.#page.hasOtherChanges?.())) return;
    this.problem = got.error ? parseRefusal(got.error) : null;
    this.text = this.saved = JSON.stringify(got.definition, null, 2);
    this.shown = true;
    this.#page.onLoaded?.(got);
  }

  /** Begins a definition that does not exist yet. */
  create(definition: unknown): void {
    app.go(this.#page.page);
    this.id = "";
    this.mode = "new";
    this.problem = null;
    this.text = this.saved = JSON.stringify(definition, null, 2);
  }

  /** Edits the parsed definition; the text follows. */
  readonly change = (edit: (definition: Definition) => void): void => {
    if (!this.parsed.value) return;
    const next = structuredClone($state.snapshot(this.parsed.value)) as Definition;
    edit(next);
    this.text = JSON.stringify(next, null, 2);
  };

  async save(): Promise<void> {
    this.problem = null;
    if (!this.parsed.value) return;
    const sent = { id: this.id, text: this.text };
    const extra = this.#page.extraArguments?.() ?? {};
    try {
      await tool(this.#page.tools.put, { [this.#page.key]: sent.id, definition: this.parsed.value, ...extra });
    } catch (error) {
      if (this.id === sent.id) this.problem = parseRefusal(error instanceof Error ? error.message : String(error));
      return;
    }
    app.tell(`Saved ${sent.id}.`);
    // A person who has opened something else meanwhile, or typed on, is not pulled back.
    const stillOpen = this.#isOpen(sent.id);
    if (stillOpen) {
      this.mode = "edit";
      this.shown = true;
      this.saved = sent.text;
      this.#page.onSaved?.(extra);
      app.go(this.#page.page, sent.id);
    }
    await this.#page.reload();
    const unchanged = this.id === sent.id && this.mode === "edit" && this.text === sent.text && !this.#page.hasOtherChanges?.();
    if (stillOpen && unchanged) await this.open(sent.id, sent.text);
  }

  async remove(): Promise<void> {
    const id = this.id;
    if (!confirm(this.#page.confirmDelete(id))) return;
    if ((await app.attempt(() => tool(this.#page.tools.remove, { [this.#page.key]: id }))) === undefined) return;
    if (this.#isOpen(id)) {
      this.mode = "none";
      this.id = this.text = "";
      app.go(this.#page.page);
    }
    await this.#page.reload();
  }
}

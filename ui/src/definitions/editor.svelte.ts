// The editing state of one definition, an agent's or a catalog entry's: loading it, parsing its JSON text, saving, deleting.
// The pages differ in their forms and in what else they show; what may overtake what is decided here, once.
import { untrack } from "svelte";
import { tool } from "../lib/api";
import { app } from "../lib/app.svelte";
import { onlyLatest } from "../lib/latest";
import { parseRefusal, type Refusal } from "../lib/refusal";
import { review, type ReviewedText } from "../lib/review.svelte";

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
  /** The definition's file, as a person knows it. */
  fileName: string;
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
  /** What a save writes beside the definition. */
  otherTexts?: () => ReviewedText[];
  /** Unsaved changes beside the text, to be kept with it. */
  keepOther?: () => unknown;
  /** Brings what `keepOther` returned back; without it, what the server has. */
  restoreOther?: (kept?: unknown) => void;
}

/** What was left without saving. */
interface KeptEdit {
  id: string;
  text: string;
  other?: unknown;
}

const prettyJson = (value: unknown): string => JSON.stringify(value, null, 2);

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
  /** Whether the text is one that was left without saving and brought back. */
  restored = $state(false);

  readonly parsed = $derived.by((): { value?: Definition; error?: string } => {
    try {
      const value: unknown = JSON.parse(this.text || "{}");
      return value && typeof value === "object" && !Array.isArray(value) ? { value: value as Definition } : { error: "must be a JSON object" };
    } catch (error) {
      return { error: error instanceof Error ? error.message : String(error) };
    }
  });

  /** The id that a new definition begins with. */
  #firstId = "";
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

  /** Where an edit is kept; a definition that does not exist yet has no id of its own. */
  #key(id: string): string {
    return `${this.#page.page}/${id}`;
  }

  /** Whether there is something that leaving would lose. */
  get isDirty(): boolean {
    if (this.mode === "none" || !(this.shown || this.isNew)) return false;
    return this.text !== this.saved || (this.isNew && this.id !== this.#firstId) || (this.#page.hasOtherChanges?.() ?? false);
  }

  /** Keeps an edit that is not saved, for when the definition is opened again. */
  keep(): void {
    if (!this.isDirty) return;
    const kept: KeptEdit = { id: this.id, text: this.text, other: this.#page.keepOther?.() };
    app.unsaved.set(this.#key(this.isNew ? "" : this.id), JSON.stringify(kept));
  }

  /** Brings an edit back that was left without saving. */
  #restore(key: string): void {
    const found = app.unsaved.get(key);
    if (found === undefined) return;
    const kept = JSON.parse(found) as KeptEdit;
    app.unsaved.delete(key);
    if (this.isNew) this.id = kept.id;
    this.text = kept.text;
    if (kept.other !== undefined) this.#page.restoreOther?.(kept.other);
    this.restored = this.isDirty;
  }

  /** Goes back to what the server has, or to where a new definition began. */
  discard(): void {
    app.unsaved.delete(this.#key(this.isNew ? "" : this.id));
    this.text = this.saved;
    this.restored = false;
    this.problem = null;
    if (this.isNew) this.id = this.#firstId;
    this.#page.restoreOther?.();
  }

  /** Loads and shows a definition; with `unlessChangedFrom`, only if the text has stayed this. */
  async open(id: string, unlessChangedFrom?: string): Promise<void> {
    const isLatest = this.#startLoad();
    const first = unlessChangedFrom === undefined;
    if (first) {
      // Pages open definitions in effects, which must not run again when the text changes.
      untrack(() => this.keep());
      this.shown = this.missed = this.restored = false;
    }
    this.id = id;
    this.mode = "edit";
    const got = await app.attempt(() => tool<Stored>(this.#page.tools.get, { [this.#page.key]: id }));
    if (!isLatest()) return;
    if (this.id === id && !got && first) this.missed = true;
    if (!got || this.id !== id || this.mode !== "edit") return;
    if (!first && (this.text !== unlessChangedFrom || this.#page.hasOtherChanges?.())) return;
    this.problem = got.error ? parseRefusal(got.error) : null;
    this.text = this.saved = prettyJson(got.definition);
    this.shown = true;
    this.#page.onLoaded?.(got);
    if (first) this.#restore(this.#key(id));
  }

  /** Begins a definition that does not exist yet; without an `id`, one that was begun and left comes back. */
  create(definition: unknown, id?: string): void {
    // Asked for by the address, it takes the place of that: the back button would only ask for it again.
    if (app.query.get("new") !== null) app.setQuery({ new: "" });
    else app.go(this.#page.page);
    this.id = this.#firstId = id ?? "";
    this.restored = false;
    this.mode = "new";
    this.problem = null;
    this.text = this.saved = prettyJson(definition);
    if (id === undefined) this.#restore(this.#key(""));
  }

  /** Edits the parsed definition; the text follows. */
  readonly change = (edit: (definition: Definition) => void): void => {
    if (!this.parsed.value) return;
    const next = structuredClone($state.snapshot(this.parsed.value)) as Definition;
    edit(next);
    this.text = prettyJson(next);
  };

  /** Shows what changes, and writes it if the person agrees. */
  async save(): Promise<void> {
    this.problem = null;
    const definition = this.parsed.value;
    if (!definition) return;
    const wasNew = this.isNew;
    const sent = { id: this.id, text: this.text };
    const texts = [{ name: this.#page.fileName, before: wasNew ? "" : this.saved, after: prettyJson(definition) }, ...(this.#page.otherTexts?.() ?? [])];
    const extra = this.#page.extraArguments?.() ?? {};
    if (!(await review.ask(wasNew ? `Create ${sent.id}` : `Save ${sent.id}`, texts))) return;
    try {
      await tool(this.#page.tools.put, { [this.#page.key]: sent.id, definition, ...extra });
    } catch (error) {
      if (this.id === sent.id) this.problem = parseRefusal(error instanceof Error ? error.message : String(error));
      return;
    }
    app.tell(`Saved ${sent.id}.`);
    const key = this.#key(wasNew ? "" : sent.id);
    const left = app.unsaved.get(key);
    // An edit that was left while it was being saved is as it was sent, or was typed on.
    if (left !== undefined && (JSON.parse(left) as KeptEdit).text === sent.text) app.unsaved.delete(key);
    if (this.id === sent.id) this.restored = false;
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
    app.unsaved.delete(this.#key(id));
    if (this.#isOpen(id)) {
      this.mode = "none";
      this.id = this.text = "";
      app.go(this.#page.page);
    }
    await this.#page.reload();
  }
}

// A component that is fetched when it is first needed. An `{#await}` in its place would be drawn anew, and lose what is on the
// page, when the component changes the address while it appears.

export class LazyComponent<C> {
  /** The component, once it has arrived. */
  found = $state.raw<C | undefined>();
  /** Whether it could not be fetched; the next `load` tries again. */
  failed = $state(false);
  #isLoading = false;
  readonly #fetch: () => Promise<{ default: C }>;

  constructor(fetch: () => Promise<{ default: C }>) {
    this.#fetch = fetch;
  }

  load(): void {
    if (this.#isLoading) return;
    this.#isLoading = true;
    this.failed = false;
    this.#fetch().then(
      (module) => (this.found = module.default),
      () => {
        this.failed = true;
        this.#isLoading = false;
      },
    );
  }
}

// Shows what a save changes and asks before it is written: one way for every editor. The dialog is parts/ReviewDialog.svelte.

/** One text that a save writes, as it is and as it will be. */
export interface ReviewedText {
  name: string;
  before: string;
  after: string;
}

export interface OpenReview {
  /** What is saved, for the dialog's title. */
  title: string;
  texts: ReviewedText[];
  answer: (write: boolean) => void;
}

class Review {
  open = $state.raw<OpenReview | undefined>();

  /** Whether to write these texts. Without a difference nobody is asked. */
  ask(title: string, texts: ReviewedText[]): Promise<boolean> {
    this.open?.answer(false);
    const changed = texts.filter(({ before, after }) => before !== after);
    if (!changed.length) return Promise.resolve(true);
    return new Promise((done) => {
      const answer = (write: boolean) => {
        this.open = undefined;
        done(write);
      };
      this.open = { title, texts: changed, answer };
    });
  }
}

export const review = new Review();

/** A keyboard event that asks to save, on any system. */
export const isSaveKey = (event: KeyboardEvent): boolean => (event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "s";

// Finds what a few typed letters mean: every word must occur, better places count more.

/** The items whose text has every typed word, best first; all of them, in order, for an empty query. */
export function rank<T>(items: T[], query: string, textOf: (item: T) => string): T[] {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return items;
  const scored: { item: T; score: number; at: number }[] = [];
  items.forEach((item, at) => {
    const text = textOf(item).slice(0, 500).toLowerCase();
    let score = 0;
    for (const word of words) {
      const place = scoreOf(text, word);
      if (place === 0) return;
      score += place;
    }
    scored.push({ item, score, at });
  });
  return scored.sort((a, b) => b.score - a.score || a.at - b.at).map(({ item }) => item);
}

/** 4: the text begins with the word; 3: one of its words does; 2: it is inside; 1: its letters occur in order; 0: no. */
function scoreOf(text: string, word: string): number {
  if (text.startsWith(word)) return 4;
  const at = text.indexOf(word);
  if (at > 0) return /[^\p{L}\p{N}]/u.test(text[at - 1]!) ? 3 : 2;
  let from = 0;
  for (const letter of word) {
    from = text.indexOf(letter, from) + 1;
    if (from === 0) return 0;
  }
  return word.length > 1 ? 1 : 0;
}

// JSON as a tree: what of a value is shown so, and whether all of it can be open at once.

/** Texts up to this length are read as JSON, in characters. */
const MAX_PARSED = 400_000;
/** A tree of at most this many values, and texts of at most this many characters in all, is shown open. */
const MAX_OPEN_VALUES = 60;
const MAX_OPEN_CHARS = 2_000;

/** The value itself, if it is an object or a list with something in it. */
export function structureOf(value: unknown): object | undefined {
  return value !== null && typeof value === "object" && Object.keys(value).length > 0 ? value : undefined;
}

/** The object or list that a text is the JSON of; undefined if it is none. */
export function parseStructure(text: string): object | undefined {
  if (text.length > MAX_PARSED || !/^\s*[[{]/.test(text)) return undefined;
  try {
    return structureOf(JSON.parse(text));
  } catch {
    return undefined;
  }
}

/** Whether a value is small enough to be read at a glance with everything in it open. */
export function isSmall(value: unknown): boolean {
  let values = 0;
  let chars = 0;
  const fits = (item: unknown): boolean => {
    if (typeof item === "string") chars += item.length;
    if (++values > MAX_OPEN_VALUES || chars > MAX_OPEN_CHARS) return false;
    if (item === null || typeof item !== "object") return true;
    for (const name in item) {
      chars += name.length;
      if (!fits((item as Record<string, unknown>)[name])) return false;
    }
    return true;
  };
  return fits(value);
}

// Images in a tool's result. Only formats a browser decodes safely, with known and bounded size: a few kilobytes can
// decode to gigabytes of pixels.

export interface ResultImage {
  type: string;
  width: number;
  height: number;
  /** A data URL; missing if it is not shown. */
  url?: string;
  /** Why it is not shown. */
  reason?: string;
}

const MAX_IMAGES = 8;
const MAX_BASE64_CHARS = 6_000_000;
const MAX_PIXELS = 16_000_000;
/** Enough of the file to find the dimensions in; of a JPEG they follow its metadata. */
const HEAD_CHARS = 400_000;

export function resultImages(value: unknown): ResultImage[] {
  const blocks = (value as { content?: unknown } | null | undefined)?.content;
  if (!Array.isArray(blocks)) return [];
  return blocks
    .filter((block): block is { data: string; mimeType?: unknown } => block?.type === "image" && typeof block.data === "string")
    .slice(0, MAX_IMAGES)
    .map(({ data, mimeType }) => describe(data, String(mimeType ?? "")));
}

function describe(data: string, claimed: string): ResultImage {
  const none = (reason: string): ResultImage => ({ type: claimed.slice(0, 40), width: 0, height: 0, reason });
  if (data.length > MAX_BASE64_CHARS) return none("An image that is too large to be shown.");
  if (!/^[A-Za-z0-9+/]*={0,2}$/.test(data)) return none("An image that is not valid base64.");
  let head: Uint8Array;
  try {
    const part = data.slice(0, HEAD_CHARS);
    head = Uint8Array.from(atob(part.slice(0, part.length - (part.length % 4))), (c) => c.charCodeAt(0));
  } catch {
    return none("An image that is not valid base64.");
  }
  const found = dimensions(head);
  if (!found) return none("An image of a kind that is not shown here.");
  const { type, width, height } = found;
  if (!width || !height || width * height > MAX_PIXELS) return { type, width, height, reason: `An image of ${width} × ${height} pixels, too large to be shown.` };
  return { type, width, height, url: `data:${type};base64,${data}` };
}

/** Type and size from the file's own header, whatever the tool calls it. */
export function dimensions(b: Uint8Array): { type: string; width: number; height: number } | undefined {
  const view = new DataView(b.buffer, b.byteOffset, b.byteLength);
  const ascii = (at: number, text: string) => [...text].every((c, i) => b[at + i] === c.charCodeAt(0));
  if (b.length >= 24 && b[0] === 0x89 && ascii(1, "PNG\r\n")) return { type: "image/png", width: view.getUint32(16), height: view.getUint32(20) };
  if (b.length >= 10 && (ascii(0, "GIF87a") || ascii(0, "GIF89a"))) return { type: "image/gif", width: view.getUint16(6, true), height: view.getUint16(8, true) };
  if (b.length >= 30 && ascii(0, "RIFF") && ascii(8, "WEBP")) {
    const type = "image/webp";
    if (ascii(12, "VP8X")) return { type, width: 1 + (view.getUint32(24, true) & 0xffffff), height: 1 + ((view.getUint16(27, true) | (b[29]! << 16)) & 0xffffff) };
    if (ascii(12, "VP8L")) return { type, width: 1 + (view.getUint16(21, true) & 0x3fff), height: 1 + ((view.getUint32(21, true) >> 14) & 0x3fff) };
    if (ascii(12, "VP8 ")) return { type, width: view.getUint16(26, true) & 0x3fff, height: view.getUint16(28, true) & 0x3fff };
    return undefined;
  }
  if (b.length < 4 || b[0] !== 0xff || b[1] !== 0xd8) return undefined;
  // A JPEG is a row of segments; the frame header among them has the size.
  for (let at = 2; at + 9 < b.length && b[at] === 0xff; at += 2 + view.getUint16(at + 2)) {
    const marker = b[at + 1]!;
    if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) return { type: "image/jpeg", width: view.getUint16(at + 7), height: view.getUint16(at + 5) };
    if (view.getUint16(at + 2) < 2) return undefined;
  }
  return undefined;
}

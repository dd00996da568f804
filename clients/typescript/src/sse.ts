/** A parser for server-sent events. */

/** The maximum size of one event, in UTF-16 units; the server sends no larger ones. */
const MAX_EVENT_LENGTH = 32 * 1024 * 1024;

/**
 * Collects bytes and returns the data of each complete event. Comments, ids and event names are skipped: the data
 * contains the event's index and type.
 */
export class SseParser {
  readonly #decoder = new TextDecoder();
  #line = "";
  #data: string[] = [];
  #dataLength = 0;
  #afterCarriageReturn = false;

  /** Returns the data of each event that these bytes complete. Throws when an event is too long. */
  push(bytes: Uint8Array): string[] {
    let text = this.#decoder.decode(bytes, { stream: true });
    if (text === "") return [];
    if (this.#afterCarriageReturn && text.startsWith("\n")) text = text.slice(1);
    this.#afterCarriageReturn = text.endsWith("\r");
    const events: string[] = [];
    const lines = text.split(/\r\n|\r|\n/);
    const rest = lines.pop() ?? "";
    for (const line of lines) {
      this.#endLine(this.#line + line, events);
      this.#line = "";
    }
    this.#line += rest;
    if (this.#line.length + this.#dataLength > MAX_EVENT_LENGTH) {
      throw new RangeError(`an event is longer than ${MAX_EVENT_LENGTH} characters`);
    }
    return events;
  }

  #endLine(line: string, events: string[]): void {
    if (line === "") {
      if (this.#data.length > 0) events.push(this.#data.join("\n"));
      this.#data = [];
      this.#dataLength = 0;
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    if (field !== "data") return;
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    this.#data.push(value);
    this.#dataLength += value.length + 1;
  }
}

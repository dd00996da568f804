/** The library's errors, and the error codes of the server. */

/** An error code of the server, for programs. */
export type ErrorCode =
  | "invalid_argument"
  | "unauthenticated"
  | "permission_denied"
  | "not_found"
  | "conflict"
  | "limit_exceeded"
  | "timeout"
  | "caller_disconnected"
  | "not_allowed"
  | "unavailable"
  | "tool_error"
  | "internal";

/** Base class of all errors of this library. One that is of no subclass is an answer that has not the expected form. */
export class OublietteError extends Error {
  override name = "OublietteError";
}

/** The server cannot be reached, or the connection broke. */
export class UnreachableError extends OublietteError {
  override name = "UnreachableError";

  constructor(why: string, options?: ErrorOptions) {
    super(`the server cannot be reached: ${why}`, options);
  }
}

/** The server refused a request, or a turn failed. */
export class RefusedError<Code extends ErrorCode = ErrorCode> extends OublietteError {
  override name = "RefusedError";
  /** The error code, for programs. A newer server may send others. */
  readonly code: Code;
  /** The server's text, for people, without the code. */
  readonly reason: string;

  constructor(code: Code, reason: string) {
    super(`${reason} (${code})`);
    this.code = code;
    this.reason = reason;
  }
}

/** The session ended before the awaited turn completed, or it is no longer followed. */
export class EndedError extends OublietteError {
  override name = "EndedError";

  constructor(why: string) {
    super(`the session has ended: ${why}`);
  }
}

/** Whether this is the server's refusal with this code. */
export function isRefused<Code extends ErrorCode>(error: unknown, code: Code): error is RefusedError<Code> {
  return error instanceof RefusedError && error.code === code;
}

const TRANSIENT_CODES: readonly ErrorCode[] = ["unavailable", "internal", "limit_exceeded"];

/** Whether the same request may succeed later. */
export function isTransient(error: unknown): boolean {
  if (error instanceof RefusedError) return TRANSIENT_CODES.includes(error.code);
  return error instanceof UnreachableError;
}

/** What an error says, for people. */
export function errorText(error: unknown): string {
  if (error instanceof Error) return error.message || error.name;
  return String(error);
}

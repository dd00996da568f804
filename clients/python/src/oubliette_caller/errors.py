"""The library's exceptions."""

from __future__ import annotations


class OublietteError(Exception):
    """Base class of all exceptions of this library."""


class Unreachable(OublietteError):
    """The server cannot be reached, or the connection broke."""


class Refused(OublietteError):
    """The server refused a request, or a turn failed; ``code`` is ``permission_denied``, ``not_found``, …"""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class Ended(OublietteError):
    """The session ended before the awaited turn completed."""


def is_transient(error: OublietteError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, Refused):
        return error.code in ("unavailable", "internal", "limit_exceeded")
    return isinstance(error, Unreachable)

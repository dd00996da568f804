"""What can go wrong."""

from __future__ import annotations


class OublietteError(Exception):
    """Anything this library raises."""


class Unreachable(OublietteError):
    """The server cannot be reached, or the connection broke."""


class Refused(OublietteError):
    """The server refused, with its code (``permission_denied``, ``not_found``, …)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class Ended(OublietteError):
    """The session ended before what was waited for."""


def is_passing(error: OublietteError) -> bool:
    """Whether trying again later may help."""
    if isinstance(error, Refused):
        return error.code in ("unavailable", "internal", "limit_exceeded")
    return isinstance(error, Unreachable)

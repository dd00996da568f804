"""Lend functions of your program to an agent, in ten lines.

In the order data flows:

- ``client``: the server's address and the token; plain calls.
- ``lend``: which functions are lent; ``schema``: what their arguments look like.
- ``sse``: bytes into server-sent events.
- ``session``: the stream from where it was left, each request answered once, and what the program waits for.
"""

from .client import Oubliette
from .errors import Ended, OublietteError, Refused, Unreachable
from .lend import Lend
from .session import Event, Session, Turn

__all__ = [
    "Ended",
    "Event",
    "Lend",
    "Oubliette",
    "OublietteError",
    "Refused",
    "Session",
    "Turn",
    "Unreachable",
]

"""Lend functions of your program to an agent, in ten lines.

In the order data flows:

- ``client``: the server's address and the token; single calls.
- ``lend``: which functions are lent; ``schema``: the JSON schema of their arguments.
- ``sse``: a parser for server-sent events.
- ``session``: reading the event stream with reconnects, answering each request once, waiting for turns.
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

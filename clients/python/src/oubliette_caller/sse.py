"""A parser for server-sent events."""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT = 32 * 1024 * 1024


class SseParser:
    """Collects bytes and returns the data of each complete event.

    Comments, ids and event names are skipped: the data contains the event's index and type.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[bytes] = []
        self._after_cr = False

    def push(self, piece: bytes) -> Iterator[str]:
        """Returns the data of each event that these bytes complete."""
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r") if piece else self._after_cr
        self._buffer += piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            if not line:
                if self._data:
                    yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data = []
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
        if len(self._buffer) + sum(map(len, self._data)) > MAX_EVENT:
            raise ValueError(f"an event is longer than {MAX_EVENT} bytes")

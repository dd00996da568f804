"""Schemas and server-sent events."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest

from oubliette_caller import schema
from oubliette_caller.sse import SseParser


class Colour(enum.Enum):
    RED = "red"


class Place(TypedDict):
    x: int


@dataclasses.dataclass
class Note:
    text: str
    urgent: bool = False


def everything(
    text: Annotated[str, "What to show"],
    colour: Colour,
    place: Place,
    note: Note,
    names: list[str],
    sizes: dict[str, float],
    either: int | None,
    old: Optional[str] = None,
    mode: Literal["a", "b"] = "a",
    free: Any = 1,
    untyped=None,  # type: ignore[no-untyped-def]
) -> None: ...


def test_annotations_become_a_schema() -> None:
    made = schema.of_function(everything)
    assert made["required"] == ["text", "colour", "place", "note", "names", "sizes", "either"]
    assert made["additionalProperties"] is False
    assert made["properties"] == {
        "text": {"type": "string", "description": "What to show"},
        "colour": {"enum": ["red"]},
        "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "note": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "urgent": {"type": "boolean"}},
            "required": ["text"],
        },
        "names": {"type": "array", "items": {"type": "string"}},
        "sizes": {"type": "object", "additionalProperties": {"type": "number"}},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "old": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "mode": {"enum": ["a", "b"], "default": "a"},
        "free": {"default": 1},
        "untyped": {"default": None},
    }


def test_any_keyword_may_be_taken_and_positions_may_not() -> None:
    def free(**rest: int) -> None: ...

    def positional(x: int, /) -> None: ...

    assert schema.of_function(free) == {"type": "object", "properties": {}}
    with pytest.raises(TypeError):
        schema.of_function(positional)


def test_events_are_the_same_however_they_arrive() -> None:
    stream = (
        b': hello\n\nid: 1\nevent: x\ndata: {"a":1}\n\ndata:x\r\ndata: y\r\n\r\n'
        b"data\n\nretry: 5\n\nid: 2\ndata: \xc3\xa9\n\ndata: unfinished"
    )
    for size in range(1, len(stream)):
        parser = SseParser()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        found = [event for piece in pieces for event in parser.push(piece)]
        assert found == ['{"a":1}', "x\ny", "", "\u00e9"], size

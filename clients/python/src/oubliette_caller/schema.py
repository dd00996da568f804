"""A function's arguments as a JSON schema, from its annotations."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

_BASIC_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
    dict: {"type": "object"},
    list: {"type": "array"},
}


def of_function(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a call of ``function`` by keywords."""
    hints = typing.get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    more = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            more = True
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(f"{name!r} cannot be given by keyword, so a tool cannot have it")
        schema = of_type(hints.get(name, Any))
        if parameter.default is parameter.empty:
            required.append(name)
        elif _is_json(parameter.default):
            schema = {**schema, "default": parameter.default}
        properties[name] = schema
    result: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        result["required"] = required
    if not more:
        result["additionalProperties"] = False
    return result


def of_type(hint: Any) -> dict[str, Any]:
    """The schema of one annotation; an unsupported one becomes ``{}``, which allows anything."""
    if hint in _BASIC_TYPES:
        return dict(_BASIC_TYPES[hint])
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        schema = of_type(args[0])
        texts = [extra for extra in args[1:] if isinstance(extra, str)]
        return {**schema, "description": texts[0]} if texts else schema
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(arg) for arg in args]}
    if origin in (list, set, frozenset, Sequence):
        return {"type": "array", "items": of_type(args[0])} if args else {"type": "array"}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": of_type(args[1])} if args else {"type": "object"}
    if isinstance(hint, type):
        if issubclass(hint, enum.Enum):
            return {"enum": [member.value for member in hint]}
        if typing.is_typeddict(hint):
            fields = typing.get_type_hints(hint)
            required = sorted(getattr(hint, "__required_keys__", fields))
            return _object_schema({name: of_type(field) for name, field in fields.items()}, required)
        if dataclasses.is_dataclass(hint):
            fields = typing.get_type_hints(hint)
            missing = dataclasses.MISSING
            needed = [
                field.name
                for field in dataclasses.fields(hint)
                if field.default is missing and field.default_factory is missing
            ]
            return _object_schema({name: of_type(field) for name, field in fields.items()}, needed)
    return {}


def _object_schema(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return schema


def _is_json(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))

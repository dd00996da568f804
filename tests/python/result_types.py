"""Checks answers against the types that `/api/openapi.json` gives to the results of actions."""

from __future__ import annotations

import functools
import json
from typing import Any, Iterator

import jsonschema

checked: set[str] = set()
"""Actions of which an answer was checked."""


def check(document: str, tool: str, answer: Any) -> None:
    """Fails unless an answer of an action is what the document says, with no field besides."""
    validators = _validators(document)
    assert tool in validators, f"{tool} is not in the OpenAPI document"
    checked.add(tool)
    wrong = [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:500]}" for error in validators[tool].iter_errors(answer)]
    assert not wrong, f"{tool} answered what its type does not have: {wrong[:5]}"


@functools.lru_cache(maxsize=4)
def _validators(document: str) -> dict[str, Any]:
    api = json.loads(document)
    schemas, parts = api["components"]["schemas"], set(_parts(api))
    components = {"schemas": {name: schema if name in parts else _closed(schema) for name, schema in schemas.items()}}
    found = {}
    for path, operations in api["paths"].items():
        if path.startswith("/api/tools/"):
            schema = operations["post"]["responses"]["200"]["content"]["application/json"]["schema"]
            found[path.removeprefix("/api/tools/")] = jsonschema.Draft202012Validator({**schema, "components": components})
    return found


def _parts(schema: Any) -> Iterator[str]:
    """Names of types that are a part of another: their fields stand beside those of the whole."""
    if isinstance(schema, dict):
        if "$ref" in schema and "properties" in schema:
            yield schema["$ref"].rsplit("/", 1)[-1]
        for inner in schema.values():
            yield from _parts(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _parts(inner)


def _closed(schema: Any) -> Any:
    """A schema whose objects have no fields but those it names. Parts of a composed schema stay open: the whole is closed."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: _closed(value) for name, value in inner.items()} if key == "properties" else _closed(inner) if key in ("items", "additionalProperties") else inner
        for key, inner in schema.items()
    }
    if "properties" in closed and "additionalProperties" not in closed:
        closed["unevaluatedProperties"] = False
    return closed

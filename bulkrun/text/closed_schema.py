"""JSON schemas whose objects have the properties that they declare and no others, for grammars to write by.

To JSON schema an object may have any property beside the declared ones, unless told otherwise. A model that may invent
properties does so until it is cut off, and they have no place in a typed column. So an object that declares properties
and says nothing of others is closed: what fits the closed schema fits the schema. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains")
# An object that says one of these has other properties than the declared ones, or counts on them.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties")


def closed(schema: Any) -> Any:
    """The schema with its objects closed; as it is where it joins object schemas: closed ones would exclude each other.

    Takes any JSON value, and returns what is not a schema as it is.
    """
    return schema if _joins_anywhere(schema) else _closed(schema)


def _joins_anywhere(schema: Any) -> bool:
    return isinstance(schema, dict) and (_joins(schema) or any(map(_joins_anywhere, _inner(schema))))


def _joins(schema: dict[str, Any]) -> bool:
    """Whether a value has to fit several schemas here, or must not fit one (which closing would make smaller)."""
    ways = sum(keyword in schema for keyword in ("$ref", "anyOf", "oneOf", "properties"))
    all_of = schema.get("allOf", ())
    return "not" in schema or "if" in schema or ways + (len(all_of) if isinstance(all_of, list) else 0) > 1


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas directly inside of one."""
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif keyword in _LISTS and isinstance(value, list):
            yield from value
        elif keyword in _SINGLE:
            yield value


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    copy = with_inner(schema, _closed)
    declared, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(declared, dict) or not declared or any(keyword in schema for keyword in _OPEN):
        return copy
    if not isinstance(required, list) or any(name not in declared for name in map(str, required)):
        return copy
    return {**copy, "additionalProperties": False}


def with_inner(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with `change` of each schema directly inside of it."""
    return {keyword: _with_inner(keyword, value, change) for keyword, value in schema.items()}


def _with_inner(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    if keyword in _BY_NAME and isinstance(value, dict):
        return {name: change(inner) for name, inner in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [change(inner) for inner in value]
    return change(value) if keyword in _SINGLE else value

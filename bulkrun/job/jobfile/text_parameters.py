"""Which parameters of tools may be texts, and what else they may be, told from their schemas.

Some models write texts without quotes (Qwen3-Coder, GLM): only the schema tells there whether 75001 is a number. Knows
JSON schemas; knows no calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from bulkrun.data.results.schema_check import referenced

_KIND_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_ANY = frozenset({"null", *_KIND_OF.values()})
_MOST_REFERENCES = 16  # that lead on to others
_SAID = {"title", "description", "default", "examples", "deprecated"}  # which asks nothing of a value
_NULL = {"type": "null"}
_SEVERAL = ("$ref", "allOf", "anyOf", "oneOf")
_GIVEN = ("const", "enum")


def text_parameters(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """By function, the parameters that may be texts, each with the kinds of JSON that are read as such there.

    No kinds: whatever is written is the text; null alone: but for that word. Where a parameter may be something else,
    texts in quotes are a kind too. What may be anything is not there, and neither is what cannot be a text.
    """
    texts = {}
    for tool in tools:
        parameters = in_place(tool["function"].get("parameters") or {})
        kinds = {key: _read_kinds(schema, parameters) for key, schema in _declared(parameters).items()}
        texts[tool["function"]["name"]] = {key: sorted(these) for key, these in kinds.items() if these is not None}
    return texts


def _read_kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    kinds = _kinds(schema, root)
    if "string" not in kinds or kinds == _ANY:
        return None
    return kinds - {"string"} if kinds <= {"string", "null"} and _is_plain(schema) else kinds


def in_place(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters, each with its schema where a reference to it stood, and that of a text or null as one."""
    declared = _declared(parameters)
    placed = {key: schema if _is_plain(schema) else _placed(schema, parameters) for key, schema in declared.items()}
    return parameters if placed == declared else {**parameters, "properties": placed}


def _declared(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    declared = parameters.get("properties")
    return declared if isinstance(declared, dict) else {}


def _placed(schema: Any, root: Mapping[str, Any]) -> Any:
    return _with_null(_followed(schema, root), root)


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema refers to, or is all of, with what stands beside the reference."""
    for _ in range(_MOST_REFERENCES):
        key, inner = _one_inner(schema, root)
        beside = {name: value for name, value in schema.items() if name != key} if key else {}
        if not isinstance(inner, dict) or inner.keys() & beside.keys() - _SAID:
            break
        schema = {**inner, **beside}
    return schema


def _with_null(schema: Any, root: Mapping[str, Any]) -> Any:
    """The one schema of two, of which one is for null and the other for texts (pydantic's Optional[str])."""
    parts = schema.get("anyOf") if isinstance(schema, dict) else None
    if not isinstance(parts, list) or len(parts) != 2 or _NULL not in parts:
        return schema
    text = _followed(parts[parts[0] == _NULL], root)
    beside = {name: value for name, value in schema.items() if name != "anyOf"}
    if _kinds(text, root) != {"string"} or not _is_plain(text) or text.keys() & beside.keys() - _SAID:
        return schema
    given = [text["const"]] if "const" in text else text.get("enum")
    either = {"type": ["string", "null"], **({} if given is None else {"enum": [*given, None]})}
    return {**{name: value for name, value in text.items() if name != "const"}, **beside, **either}


def _one_inner(schema: Any, root: Mapping[str, Any]) -> tuple[str, Any]:
    """The one schema that a value of this one has to fit too, and the keyword that says so."""
    if not isinstance(schema, dict):
        return "", None
    if isinstance(reference := schema.get("$ref"), str):
        return "$ref", referenced(reference, root)
    all_of = schema.get("allOf")
    return ("allOf", all_of[0]) if isinstance(all_of, list) and len(all_of) == 1 else ("", None)


def _is_plain(schema: Any) -> bool:
    """Whether the schema says itself how its texts look."""
    return isinstance(schema, dict) and schema.keys().isdisjoint(_SEVERAL)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The kinds of JSON values that may fit a schema."""
    if _is_plain(schema) and schema.keys().isdisjoint(_GIVEN):  # nearly always; each row may bring its own tools
        return _named(schema.get("type"))
    schema = _followed(schema, root)
    if not isinstance(schema, dict) or depth > _MOST_REFERENCES:
        return frozenset() if schema is False else _ANY
    kinds = _named(schema.get("type"))
    if isinstance(given := [schema["const"]] if "const" in schema else schema.get("enum"), list):
        kinds &= {_KIND_OF.get(type(value), "null") for value in given}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(keyword), list):
            kinds &= frozenset().union(*(_kinds(part, root, depth + 1) for part in parts))
    parts = schema.get("allOf")
    inner = [_kinds(part, root, depth + 1) for part in parts] if isinstance(parts, list) else []
    return reduce(frozenset.intersection, inner, kinds)


def _named(type_: Any) -> frozenset[str]:
    """What `type` allows; a number may be a whole one."""
    names = {type_} if isinstance(type_, str) else set(type_) if isinstance(type_, list) else _ANY
    return frozenset(names | ({"integer"} if "number" in names else set()))

"""Grammars of calls written as in Python, as LFM2 writes them: name(key=value, ...), each value fitting its schema.

Values are JSON, which reads as Python does but for three words, and those may be written either way where they are the
whole value. What holds for arguments together is not in the grammar: finished calls are checked for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bulkrun.text.tagged_calls import Function, ToJson, literal, parameter_schemas

_WORD = re.compile(r"[^\s()\[\]{},=\"']+")
_INDIRECT = ("$ref", "allOf", "not", "if")  # whose values another schema tells
_CONSTANTS = {"boolean": ("True", "False"), "null": ("None",)}


def python_rules(functions: Sequence[Function], to_json: ToJson) -> list[str]:
    """The rules of `call`: one call of one of the functions. `to_json`: a schema as grammars of JSON are made of it.

    Raises ValueError for names that cannot be written so and parameters of which no grammar can be made.
    """
    rules = [f"call: {' | '.join(f'function{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        rules += _function(f"function{index}", function, to_json)
    return rules


def _function(rule: str, function: Function, to_json: ToJson) -> list[str]:
    """The rules of a call of one function: its parameters in their order."""
    name, parameters = function["name"], function["parameters"]
    schemas = parameter_schemas(name, parameters)
    _refuse_odd(name, schemas)
    required = set(parameters.get("required", ()))
    rules = [f'{rule}: {literal(f"{name}(")} {rule}_arguments ")"']
    rules += argument_rules(rule, [key in required for key in schemas], ", ")
    for index, (key, schema) in enumerate(schemas.items()):
        one = f"{rule}_{index}"
        values = [f"{one}_json", *map(literal, _constants(schema))]
        rules += [f"{one}: {literal(f'{key}=')} ({' | '.join(values)})"]
        rules += [f"{one}_json: %json {json.dumps(to_json(schema))}"]
    return rules


def argument_rules(rule: str, required: Sequence[bool], comma: str) -> list[str]:
    """The rules of which argument may be the first one, and of what may follow each."""
    first = required.index(True) + 1 if any(required) else len(required)
    begins = [f"{rule}_{index} {rule}_after{index}" for index in range(first)]
    begins += [] if any(required) else ['""']
    rules = [f"{rule}_arguments: {' | '.join(begins)}"]
    for index, is_required in enumerate(required[1:], 1):
        more = "" if is_required else "?"
        rules.append(f'{rule}_after{index - 1}: ("{comma}" {rule}_{index}){more} {rule}_after{index}')
    return [*rules, f'{rule}_after{len(required) - 1}: ""'] if required else rules


def _constants(schema: Any) -> list[str]:
    """True, False and None, as far as the schema says that they are values of it."""
    if not isinstance(schema, dict):
        return []
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(given, list):
        return [str(value) for value in given if value is None or isinstance(value, bool)]
    if any(key in schema for key in _INDIRECT):
        return []
    parts = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(parts, list):
        return sorted({word for part in parts for word in _constants(part)})
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return [word for kind, words in _CONSTANTS.items() if kind in kinds for word in words]


def _refuse_odd(name: str, keys: Iterable[str]) -> None:
    if odd := next((word for word in (name, *keys) if not _WORD.fullmatch(word)), None):
        what = "the function" if odd is name else f"the parameter of {name!r}"
        raise ValueError(f"{what} {odd!r} cannot be written in this format: white space, brackets, quotes or = in it")

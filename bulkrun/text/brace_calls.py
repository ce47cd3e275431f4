"""Grammars of calls as the Gemmas write them: keys without quotes, and texts between marks of their own.

Schemas are followed here, as no grammar of JSON writes that: types, properties, items and how many, const and enum,
anyOf and oneOf, references. What holds beside those (and for arguments together) is not in the grammar: finished calls
are checked for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from bulkrun.text.python_calls import argument_rules
from bulkrun.text.tagged_calls import Function, Mark, ToJson, is_special, literal, parameter_schemas
from bulkrun.text.text_pattern import text_regex

# By format: what begins a call, stands on both sides of a text, and ends the call.
_MARKS = {
    "gemma4": ("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": ("<start_function_call>", "<escape>", "<end_function_call>"),
}
BRACE_FORMATS = frozenset(_MARKS)
_NAME, _KEY = re.compile(r"[^\s{}<>]+"), re.compile(r"[^\s:{}\[\],\"<>]+")
_REFUSED = ("not", "if", "patternProperties", "prefixItems", "propertyNames", "unevaluatedProperties")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCALARS = ["number", "boolean", "null"]
_PARTS = ("anyOf", "oneOf", "allOf")


def brace_rules(bound: Mapping[str, Any], to_json: ToJson, mark: Mark) -> list[str]:
    """The rules of `start`: calls of the functions of `bound` (`bound_calls`), in its format.

    `to_json`: a schema as grammars of JSON are made of it. Raises ValueError for names that cannot be written so and
    parameters of which no grammar can be made.
    """
    begin, text, end = _MARKS[bound["format"]]
    called = " | ".join(f"function{index}" for index in range(len(bound["functions"])))
    rules = [f"start: call{'' if bound['one'] else '+'}", f'call: {mark(begin)} "call:" ({called}) {mark(end)}']
    values = _Values(text, mark(text), to_json)
    for index, function in enumerate(bound["functions"]):
        rules.append(f"function{index}: {literal(_plain(function['name'], _NAME))} {values.arguments(function)}")
    return [*rules, *values.rules]


class _Values:
    """The rules of values. What a schema refers to is one rule, so that it may recur."""

    def __init__(self, text: str, mark: str, to_json: ToJson) -> None:
        """`text` stands on both sides of a text, and is `mark` as Lark reads it."""
        self.rules: list[str] = []
        self._text, self._mark, self._to_json = text, mark, to_json
        self._root: Any = None
        self._referred: dict[str, str] = {}
        self._any = ""
        self._num_names = 0

    def arguments(self, function: Function) -> str:
        """The name of the rule of a function's arguments, braces included."""
        schemas = parameter_schemas(function["name"], function["parameters"])
        required = function["parameters"].get("required", ())
        rule = self._named("object")
        pairs = {key: partial(self._within, schema) for key, schema in schemas.items()}
        return self._object(rule, pairs, {*required})

    def _within(self, root: Any) -> str:
        """The rule of a parameter, whose references are to places in its own schema."""
        self._root, self._referred = root, {}
        return self._value(root)

    def _named(self, what: str) -> str:
        self._num_names += 1
        return f"{what}{self._num_names}"

    def _value(self, schema: Any) -> str:
        """The name of the rule of a value that fits a schema."""
        rule = self._named("value")
        self.rules.append(f"{rule}: {' | '.join(self._ways(schema))}")
        return rule

    def _ways(self, schema: Any) -> list[str]:
        """What a value may be."""
        if not isinstance(schema, dict):
            return [self._anything()]
        if refused := [key for key in _REFUSED if key in schema]:
            raise ValueError(f"{refused[0]} cannot be kept to in this format; say it without")
        if "$ref" in schema:
            return [self._reference(schema["$ref"])]
        if "const" in schema or "enum" in schema:
            return [self._written(value) for value in ([schema["const"]] if "const" in schema else schema["enum"])]
        parts = schema.get("anyOf", schema.get("oneOf", schema.get("allOf")))
        if parts is not None:
            if len(parts) > 1 and "anyOf" not in schema and "oneOf" not in schema:
                raise ValueError("allOf several schemas cannot be kept to in this format; say it with one")
            return [way for part in parts for way in self._ways(_with_part(schema, part))]
        return [self._of_kind(kind, schema) for kind in _kinds(schema)] or [self._anything()]

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._texts(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._objects(schema)
        return self._json({"type": kind, **{key: schema[key] for key in _OF_NUMBERS if key in schema}})

    def _json(self, schema: Mapping[str, Any]) -> str:
        rule = self._named("json")
        self.rules.append(f"{rule}: %json {json.dumps(self._to_json(schema))}")
        return rule

    def _texts(self, schema: Mapping[str, Any]) -> str:
        rule = self._named("text")
        looks = f"{rule.upper()}: {text_regex(schema, re.escape(self._text))}"
        if is_special(self._mark):
            self.rules += [f"{rule}: {self._mark} {rule.upper()} {self._mark}", looks]
        else:
            self.rules += [
                f"{rule}: {self._mark} {rule}_end",
                f"{rule}_end[suffix={self._mark}]: {rule.upper()}",
                looks,
            ]
        return rule

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        rule, item = self._named("array"), self._value(schema.get("items"))
        more = f'("," {item})'
        items = [item, *([f"{more}{{{least - 1}}}"] if least > 1 else [])]
        spare = None if most is None else int(most) - max(least, 1)
        items += [f"{more}*"] if spare is None else [f"{more}{{0,{spare}}}"] if spare > 0 else []
        self.rules.append(f'{rule}: "[" ({" ".join(items)}){"" if least else "?"} "]"')
        return rule

    def _objects(self, schema: Mapping[str, Any]) -> str:
        declared, required = schema.get("properties") or {}, schema.get("required", ())
        rule, others = self._named("object"), schema.get("additionalProperties")
        schemas = {**declared, **{key: others for key in required if key not in declared}}
        if schemas or others is False:
            values = {key: partial(self._value, one) for key, one in schemas.items()}
            return self._object(rule, values, {*required})
        pair = f"{rule}_KEY".upper()
        more = f'{pair} ":" {self._value(others)}'
        self.rules += [f'{rule}: "{{" ({more} ("," {more})*)? "}}"', f"{pair}: /{_KEY.pattern}/"]
        return rule

    def _object(self, rule: str, values: Mapping[str, Callable[[], str]], required: set[str]) -> str:
        """The rules of an object with some of these keys, in the order in which the template shows them."""
        keys = sorted(values, key=str.lower)
        self.rules.append(f'{rule}: "{{" {rule}_arguments "}}"')
        self.rules += argument_rules(rule, [key in required for key in keys], ",")
        self.rules += [f"{rule}_{n}: {literal(f'{_plain(key, _KEY)}:')} {values[key]()}" for n, key in enumerate(keys)]
        return rule

    def _reference(self, reference: str) -> str:
        if reference not in self._referred:
            rule = self._referred[reference] = self._named("value")
            self.rules.append(f"{rule}: {' | '.join(self._ways(_at(reference, self._root)))}")
        return self._referred[reference]

    def _anything(self) -> str:
        """The rule of any value at all."""
        if not self._any:
            self._any = rule = self._named("value")
            ways = [self._texts({}), self._json({"type": _SCALARS}), self._array({}), self._objects({})]
            self.rules.append(f"{rule}: {' | '.join(ways)}")
        return self._any

    def _written(self, value: Any) -> str:
        """One value as it is."""
        if isinstance(value, str):
            if self._text in value:
                raise ValueError(f"{value!r} cannot be written in this format: it has the mark of texts")
            return f"{self._mark} {literal(value)} {self._mark}"
        if isinstance(value, list):
            return f'"[" {""" "," """.join(map(self._written, value))} "]"'
        if isinstance(value, dict):
            keys = sorted(value, key=str.lower)
            pairs = (f"{literal(f'{_plain(key, _KEY)}:')} {self._written(value[key])}" for key in keys)
            return f'"{{" {""" "," """.join(pairs)} "}}"'
        return literal(json.dumps(value))


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names, or has other keywords of."""
    if "type" in schema:
        return [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else []


def _with_part(schema: Mapping[str, Any], part: Any) -> Any:
    """One of a schema's parts, with what the schema says beside them."""
    part = part if isinstance(part, dict) else {}  # true; that nothing fits false is not in the grammar
    beside = {key: value for key, value in schema.items() if key not in _PARTS}
    both = {**beside, **part}
    if "properties" in beside and "properties" in part:
        both["properties"] = {**beside["properties"], **part["properties"]}
    if "required" in beside and "required" in part:
        both["required"] = [*beside["required"], *part["required"]]
    return both


def _at(reference: str, root: Any) -> Any:
    """What stands at a JSON pointer."""
    if not re.match(r"#(/|\Z)", reference):
        raise ValueError(f"refers to {reference!r}, which is no place in it")
    try:
        for part in reference.removeprefix("#").split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            root = root[int(key)] if isinstance(root, list) else root[key]
    except (KeyError, IndexError, ValueError, TypeError):
        raise ValueError(f"refers to {reference!r}, which is not there") from None
    return root


def _plain(name: str, plain: re.Pattern[str]) -> str:
    """The name. Raises ValueError for one that would not be read back."""
    if not plain.fullmatch(name):
        raise ValueError(f"{name!r} cannot be written in this format: white space, brackets, quotes or : in it")
    return name

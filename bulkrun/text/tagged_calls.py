"""Grammars of calls whose arguments stand between tags of their own, as Qwen3-Coder and GLM-4.5 write them.

A text stands there as it is, up to the tag that ends it; every other value is JSON that fits its schema. What holds for
arguments together (`oneOf` over objects and the like) is not in the grammar: finished calls are checked for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bulkrun.text.text_pattern import ANY, regex, regex_of_pattern

Function = Mapping[str, Any]  # name, parameters
Texts = Mapping[str, Mapping[str, Collection[str]]]
Mark = Callable[[str], str]  # a marker as Lark reads it, a special token or a text
ToJson = Callable[[Any], Mapping[str, Any]]
_DEFINITIONS = ("$defs", "definitions")  # which a parameter's schema may refer to
_TOGETHER = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^\s<>]([^<>\n]*[^\s<>])?")
_REFERENCE = re.compile(r'"\$ref": "#')
_REFERS_ELSEWHERE = re.compile(_REFERENCE.pattern + r"(?!/(?:\$defs|definitions)/)")
_MAX_LENGTH = 1000  # of a text whose length the grammar keeps to: each character more is a state


class _Tags(NamedTuple):
    """What stands around a call and its arguments, as Lark reads it.

    A text ends with `end_of_text` and `line`, before which it may have what the pattern `after_text` fits. It never has
    `no_text`, though that is only spelled where the tag is a special token: a reader could not tell.
    """

    call: str
    name: str
    key: str
    value: str
    end_of_value: str
    after_text: str
    end_of_text: str
    line: str
    no_text: str
    end: str


def tagged_rules(
    tool_format: str, functions: Sequence[Function], texts: Texts, to_json: ToJson, mark: Mark
) -> list[str]:
    """The rules of `call`: one call of one of the functions.

    `texts`: by function, the parameters that may be texts, and the kinds of JSON that count there; where texts in
    quotes do not, a text stands there as it is. `to_json`: a schema as grammars of JSON are made of it.

    Raises ValueError for names that cannot stand between tags and parameters of which no grammar can be made.
    """
    tags = _TAGS[tool_format](mark)
    called = " | ".join(f"function{index}" for index in range(len(functions)))
    rules = [f"call: {tags.call} ({called}) {tags.end}"]
    for index, function in enumerate(functions):
        bare = {key for key, kinds in texts.get(function["name"], {}).items() if "string" not in kinds}
        rules += _function(f"function{index}", function, bare, to_json, tags)
    return rules


def _coder(mark: Mark) -> _Tags:
    return _Tags(
        call=f'{mark("<tool_call>")} "\\n<function="',
        name='">\\n"',
        key='"<parameter="',
        value='">\\n"',
        end_of_value='"\\n</parameter>\\n"',
        after_text="\\n?",
        end_of_text='"</parameter>"',
        line='"\\n"',
        no_text="</parameter>",
        end=f'"</function>\\n" {mark("</tool_call>")}',
    )


def _glm(mark: Mark) -> _Tags:
    """Since 4.7 there are no line breaks between tags."""
    return _Tags(
        call=mark("<tool_call>"),
        name='"\\n"?',
        key=mark("<arg_key>"),
        value=f'{mark("</arg_key>")} "\\n"? {mark("<arg_value>")}',
        end_of_value=f'{mark("</arg_value>")} "\\n"?',
        after_text="",
        end_of_text=mark("</arg_value>"),
        line='"\\n"?',
        no_text="</arg_value>",
        end=mark("</tool_call>"),
    )


_TAGS: Mapping[str, Callable[[Mark], _Tags]] = {"qwen3_coder": _coder, "glm45": _glm}
TAGGED_FORMATS = frozenset(_TAGS)


def _function(rule: str, function: Function, texts: Collection[str], to_json: ToJson, tags: _Tags) -> list[str]:
    """The rules of a call of one function, from its name on: its parameters in their order."""
    name, parameters = function["name"], function["parameters"]
    schemas = parameter_schemas(name, parameters)
    _refuse_odd(name, schemas)
    required, used = set(parameters.get("required", ())), [f"{rule}_{index}" for index in range(len(schemas))]
    parts = [one if key in required else f"{one}?" for one, key in zip(used, schemas, strict=True)]
    rules = [" ".join([f"{rule}: {literal(name)} {tags.name}", *parts])]
    for one, (key, schema) in zip(used, schemas.items(), strict=True):
        value = _text(one, schema, tags) if key in texts else [f"{one}_value: {one}_json {tags.end_of_value}"]
        rules += [f"{one}: {tags.key} {literal(key)} {tags.value} {one}_value", *value]
        rules += [] if key in texts else [f"{one}_json: %json {json.dumps(to_json(schema))}"]
    return rules


def parameter_schemas(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of each parameter of a function. Raises ValueError where they are not declared one by one."""
    declared = parameters.get("properties", {})
    if not declared and (together := [key for key in _TOGETHER if key in parameters]):
        raise ValueError(
            f"the parameters of {name!r} have {together[0]} for properties; this format needs them one by one"
        )
    schemas = {**declared, **{key: {} for key in parameters.get("required", ()) if key not in declared}}
    return {key: _alone(schema, parameters) if isinstance(schema, dict) else {} for key, schema in schemas.items()}


def _alone(schema: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema with what it refers to.

    Definitions that it has no use for could keep its objects from being closed (`closed_schema`).
    """
    if '"$ref"' not in json.dumps(schema):
        return schema
    shared = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    if not _REFERS_ELSEWHERE.search(json.dumps([schema, shared])):
        return {**schema, **shared}
    moved, whole = json.loads(_REFERENCE.sub(r"\g<0>/$defs/all", json.dumps([schema, parameters])))
    return {**moved, "$defs": {"all": whole}}


def _text(rule: str, schema: Mapping[str, Any], tags: _Tags) -> list[str]:
    """The rules of a text and what ends it."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if given is not None:
        texts = " | ".join(literal("null" if text is None else text) for text in given if isinstance(text, str | None))
        return [f"{rule}_value: ({texts}) {tags.end_of_value}"]
    text = rule.upper()  # Lark's name for what is one regex
    looks = f"{text}: {_shape(schema, tags)}"
    if tags.end_of_text.startswith("<["):  # a special token
        return [f"{rule}_value: {text} {tags.end_of_text} {tags.line}", looks]
    return [f"{rule}_value: {rule}_text {tags.line}", f"{rule}_text[suffix={tags.end_of_text}]: {text}", looks]


def _shape(schema: Mapping[str, Any], tags: _Tags) -> str:
    """How a text looks, and what of its end is not part of it."""
    pattern = "" if "pattern" not in schema else f" & {regex_of_pattern(schema['pattern'])}"
    null = " | /null/" if "null" in schema.get("type", ()) else ""
    after = f" /{tags.after_text}/" if tags.after_text else ""
    return f"((/(?s:.{_length(schema)})/ & ~{regex(f'{ANY}{tags.no_text}{ANY}')}{pattern}){null}){after}"


def _length(schema: Mapping[str, Any]) -> str:
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if max(least, most or 0) > _MAX_LENGTH:
        return "*"
    return f"{{{least},}}" if most is None else f"{{{least},{int(most)}}}"


def _refuse_odd(name: str, keys: Iterable[str]) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the function {name!r} cannot be called in this format: white space, tags or braces in its name"
        )
    if odd := [key for key in keys if not _KEY.fullmatch(key)]:
        raise ValueError(f"the parameter {odd[0]!r} of {name!r} cannot be written in this format: tags in its name")


def literal(text: str) -> str:
    """As Lark reads it: without the one control character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

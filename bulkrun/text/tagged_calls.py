"""Grammars of calls whose arguments stand between tags of their own, as Qwen3-Coder, GLM, MiniMax and DeepSeek do.

A text stands there as it is, up to the tag that ends it; every other value is JSON that fits its schema. What holds for
arguments together (`oneOf` over objects and the like) is not in the grammar: finished calls are checked for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from bulkrun.text.text_pattern import text_regex

Function = Mapping[str, Any]  # name, parameters
Texts = Mapping[str, Mapping[str, Collection[str]]]
Mark = Callable[[str], str]  # a marker as Lark reads it, a special token or a text
ToJson = Callable[[Any], Mapping[str, Any]]
_DEFINITIONS = ("$defs", "definitions")  # which a parameter's schema may refer to
_TOGETHER = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^\s<>]([^<>\n]*[^\s<>])?")
_QUOTED_KEY = re.compile(r'[^\s<>"]([^<>"\n]*[^\s<>"])?')
_REFERENCE = re.compile(r'"\$ref": "#')
_REFERS_ELSEWHERE = re.compile(_REFERENCE.pattern + r"(?!/(?:\$defs|definitions)/)")


class _Tags(NamedTuple):
    """What stands around calls and their arguments, as Lark reads it.

    `begin` and `last` stand around all of them. Where the tag tells texts from other values, `value` and `text` are
    not the same. A text ends with `end_of_text` and `line`, before which it may have what the pattern `after_text`
    fits. It never has `no_text`, though that is only spelled where the tag is a special token: a reader could not tell.
    """

    begin: str
    call: str
    name: str
    key: str
    value: str
    text: str
    end_of_value: str
    after_text: str
    end_of_text: str
    line: str
    no_text: str
    end: str
    between: str
    last: str
    keys: re.Pattern[str] = _KEY


def tagged_rules(bound: Mapping[str, Any], to_json: ToJson, mark: Mark) -> list[str]:
    """The rules of `start`: calls of the functions of `bound` (`bound_calls`), in its format.

    Its `texts`: by function, the parameters that may be texts, and the kinds of JSON that count there; where texts in
    quotes do not, a text stands there as it is. `to_json`: a schema as grammars of JSON are made of it.

    Raises ValueError for names that cannot stand between tags and parameters of which no grammar can be made.
    """
    tags, functions = _TAGS[bound["format"]](mark), bound["functions"]
    called = " | ".join(f"function{index}" for index in range(len(functions)))
    more = "" if bound["one"] else f" ({tags.between} call)*"
    rules = [f"start: {tags.begin} call{more} {tags.last}", f"call: {tags.call} ({called}) {tags.end}"]
    for index, function in enumerate(functions):
        kinds_of = bound["texts"].get(function["name"], {})
        bare = {key: "null" in kinds for key, kinds in kinds_of.items() if "string" not in kinds}
        rules += _function(f"function{index}", function, bare, to_json, tags)
    return rules


def _coder(mark: Mark) -> _Tags:
    return _Tags(
        begin="",
        call=f'{mark("<tool_call>")} "\\n<function="',
        name='">\\n"',
        key='"<parameter="',
        value='">\\n"',
        text='">\\n"',
        end_of_value='"\\n</parameter>\\n"',
        after_text="\\n?",
        end_of_text='"</parameter>"',
        line='"\\n"',
        no_text="</parameter>",
        end=f'"</function>\\n" {mark("</tool_call>")}',
        between='"\\n"?',
        last="",
    )


def _glm(mark: Mark) -> _Tags:
    """Since 4.7 there are no line breaks between tags."""
    value = f'{mark("</arg_key>")} "\\n"? {mark("<arg_value>")}'
    return _Tags(
        begin="",
        call=mark("<tool_call>"),
        name='"\\n"?',
        key=mark("<arg_key>"),
        value=value,
        text=value,
        end_of_value=f'{mark("</arg_value>")} "\\n"?',
        after_text="",
        end_of_text=mark("</arg_value>"),
        line='"\\n"?',
        no_text="</arg_value>",
        end=mark("</tool_call>"),
        between='"\\n"?',
        last="",
    )


def _minimax(mark: Mark) -> _Tags:
    return _Tags(
        begin=f'{mark("<minimax:tool_call>")} "\\n"',
        call='"<invoke name=\\""',
        name='"\\">\\n"',
        key='"<parameter name=\\""',
        value='"\\">"',
        text='"\\">"',
        end_of_value='"</parameter>\\n"',
        after_text="",
        end_of_text='"</parameter>"',
        line='"\\n"',
        no_text="</parameter>",
        end='"</invoke>\\n"',
        between="",
        last=mark("</minimax:tool_call>"),
        keys=_QUOTED_KEY,
    )


def _dsml(section: str, mark: Mark) -> _Tags:
    """DeepSeek's: `section` is the name of what stands around calls. What marks its tags may be a special token."""
    marker = mark("｜DSML｜")
    opens, closes = f'"<" {marker}', f'"</" {marker}'
    special = is_special(marker)
    return _Tags(
        begin=f'{opens} "{section}>\\n"',
        call=f'{opens} "invoke name=\\""',
        name='"\\">\\n"',
        key=f'{opens} "parameter name=\\""',
        value='"\\" string=\\"false\\">"',
        text='"\\" string=\\"true\\">"',
        end_of_value=f'{closes} "parameter>\\n"',
        after_text="<\\/" if special else "",
        end_of_text=marker if special else '"</｜DSML｜parameter>"',
        line='"parameter>\\n"' if special else '"\\n"',
        no_text="</｜DSML｜parameter>",
        end=f'{closes} "invoke>\\n"',
        between="",
        last=f'{closes} "{section}>"',
        keys=_QUOTED_KEY,
    )


_TAGS: Mapping[str, Callable[[Mark], _Tags]] = {
    "qwen3_coder": _coder,
    "glm45": _glm,
    "minimax_m2": _minimax,
    "deepseek_v32": partial(_dsml, "function_calls"),
    "deepseek_v4": partial(_dsml, "tool_calls"),
}
TAGGED_FORMATS = frozenset(_TAGS)


def _function(rule: str, function: Function, texts: Mapping[str, bool], to_json: ToJson, tags: _Tags) -> list[str]:
    """The rules of a call of one function, from its name on: its parameters in their order.

    `texts`: whether a parameter that is a text may be null too.
    """
    name, parameters = function["name"], function["parameters"]
    schemas = parameter_schemas(name, parameters)
    _refuse_odd(name, schemas, tags.keys)
    required, used = set(parameters.get("required", ())), [f"{rule}_{index}" for index in range(len(schemas))]
    parts = [one if key in required else f"{one}?" for one, key in zip(used, schemas, strict=True)]
    rules = [" ".join([f"{rule}: {literal(name)} {tags.name}", *parts])]
    for one, (key, schema) in zip(used, schemas.items(), strict=True):
        before = f"{one}: {tags.key} {literal(key)}"
        if key not in texts:
            rules += _json(one, before, to_json(schema), tags)
        elif texts[key] and tags.text != tags.value:
            rules += _text_or_null(one, before, schema, tags)
        else:
            rules += [f"{before} {tags.text} {one}_value", *_text(one, schema, tags)]
    return rules


def _json(rule: str, before: str, schema: Mapping[str, Any], tags: _Tags) -> list[str]:
    """The rules of a value that is JSON, with what stands around it."""
    return [
        f"{before} {tags.value} {rule}_value",
        f"{rule}_value: {rule}_json {tags.end_of_value}",
        f"{rule}_json: %json {json.dumps(schema)}",
    ]


def _text_or_null(rule: str, before: str, schema: Mapping[str, Any], tags: _Tags) -> list[str]:
    """The rules of either, with what stands around it, where the tag tells them apart."""
    given = {"enum": [text for text in schema["enum"] if text is not None]} if "enum" in schema else {}
    ways = f'({tags.text} {rule}_value | {tags.value} "null" {tags.end_of_value})'
    return [f"{before} {ways}", *_text(rule, {**schema, "type": "string", **given}, tags)]


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
    if is_special(tags.end_of_text):
        return [f"{rule}_value: {text} {tags.end_of_text} {tags.line}", looks]
    return [f"{rule}_value: {rule}_text {tags.line}", f"{rule}_text[suffix={tags.end_of_text}]: {text}", looks]


def _shape(schema: Mapping[str, Any], tags: _Tags) -> str:
    """How a text looks, and what of its end is not part of it."""
    null = " | /null/" if "null" in schema.get("type", ()) else ""
    after = f" /{tags.after_text}/" if tags.after_text else ""
    return f"({text_regex(schema, tags.no_text)}{null}){after}"


def is_special(mark: str) -> bool:
    """Whether a marker, as Lark reads it, is a special token."""
    return mark.startswith("<[")


def _refuse_odd(name: str, keys: Iterable[str], plain: re.Pattern[str]) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the function {name!r} cannot be called in this format: white space, tags or braces in its name"
        )
    if odd := [key for key in keys if not plain.fullmatch(key)]:
        what = "tags" if plain is _KEY else "tags or quotes"
        raise ValueError(f"the parameter {odd[0]!r} of {name!r} cannot be written in this format: {what} in its name")


def literal(text: str) -> str:
    """As Lark reads it: without the one control character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

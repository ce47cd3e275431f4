"""Tool calls that have to be made, as a llguidance grammar: the model's format around arguments that fit a schema.

A marker that is a special token of the model is asked for by its id: no text is made of it. Knows formats of calls and
JSON schemas; knows no conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bulkrun.text.brace_calls import BRACE_FORMATS, brace_rules
from bulkrun.text.closed_schema import closed
from bulkrun.text.python_calls import python_rules
from bulkrun.text.schema_formats import without_unknown_formats
from bulkrun.text.tagged_calls import TAGGED_FORMATS, literal, tagged_rules

SpecialId = Callable[[str], int | None]  # of a text that is a special token
# At most one space after a separator, and no other white space.
JSON_OPTIONS: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,  # the finished text is checked against the schema itself
}

_PLAIN = re.compile(r"[^\s\[\]{}]+")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
_NAME = re.compile(r"[^\s<]+")


def calls_grammar(value: str, special_id: SpecialId = lambda _text: None) -> str:
    """The Lark grammar of a `StructuredOutput` of the kind `tool_calls`. Raises ValueError for a schema too deep."""
    bound = json.loads(value)
    try:
        return "\n".join(_rules(bound, special_id))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _rules(bound: Mapping[str, Any], special_id: SpecialId) -> list[str]:
    if bound["format"] in TAGGED_FORMATS:
        return tagged_rules(bound, _schema, partial(_marker, special_id=special_id))
    if bound["format"] in BRACE_FORMATS:
        return brace_rules(bound, _schema, partial(_marker, special_id=special_id))
    return _lfm2(bound, special_id) if bound["format"] == "lfm2" else _in_json(bound, special_id)


def _lfm2(bound: Mapping[str, Any], special_id: SpecialId) -> list[str]:
    """The rules of a list of calls as in Python."""
    begin, end = _marker("<|tool_call_start|>", special_id), _marker("<|tool_call_end|>", special_id)
    more = "" if bound["one"] else ' (", " call)*'
    return [f'start: {begin} "[" call{more} "]" {end}', *python_rules(bound["functions"], _schema)]


def _in_json(bound: Mapping[str, Any], special_id: SpecialId) -> list[str]:
    """The rules of a format whose arguments are one JSON object."""
    schemas = [json.dumps(_schema(function["parameters"])) for function in bound["functions"]]
    names = [function["name"] for function in bound["functions"]]
    rules = _FORMATS[bound["format"]](names, bound["one"], special_id)
    return [*rules, *(f"arguments{index}: %json {schema}" for index, schema in enumerate(schemas))]


def _schema(schema: Any) -> dict[str, Any]:
    return {**closed(without_unknown_formats(schema)), "x-guidance": dict(JSON_OPTIONS)}


def _hermes(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    begin, end = _marker("<tool_call>", special_id), _marker("</tool_call>", special_id)
    more = "" if one else ' ("\\n" call)*'
    return [f"start: call{more}", f'call: {begin} "\\n" object "\\n" {end}', *_objects(names, "arguments")]


def _llama(names: list[str], one: bool, _special_id: SpecialId) -> list[str]:
    more = "" if one else ' ("; " object)*'
    return [f"start: object{more}", *_objects(names, "parameters")]


def _mistral(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    """The newer format where the tokenizer has the marker of its arguments."""
    begin = _marker("[TOOL_CALLS]", special_id)
    if special_id("[ARGS]") is None:
        return _listed(begin, names, one)
    plain = _readable(names, _PLAIN, "white space or brackets")
    calls = [f"{literal(name)} {_marker('[ARGS]', special_id)} arguments{index}" for index, name in enumerate(plain)]
    return [f"start: call{'' if one else '+'}", f"call: {begin} named", f"named: {' | '.join(calls)}"]


def _granite(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    return _listed(_marker("<|tool_call|>", special_id), names, one)


def _nemotron(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    return _listed(_marker("<TOOLCALL>", special_id), names, one, _marker("</TOOLCALL>", special_id))


def _cohere(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    """Each call on a line of its own, with a number that counts the calls of the conversation, earlier ones too."""
    begin, end = _marker("<|START_ACTION|>", special_id), _marker("<|END_ACTION|>", special_id)
    more = "" if one else ' (",\\n    " call)*'
    head = r'"{\"tool_call_id\": \"" /[0-9]{1,3}/ "\", \"tool_name\": "'
    calls = (
        f'{literal(json.dumps(name, ensure_ascii=False))} ", \\"parameters\\": " arguments{index}'
        for index, name in enumerate(names)
    )
    return [
        f'start: {begin} "[\\n    " call{more} "\\n]" {end}',
        f'call: {head} ({" | ".join(calls)}) "}}"',
    ]


def _hunyuan(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    return _listed(_marker("<tool_calls>", special_id), names, one, _marker("</tool_calls>", special_id))


def _listed(begin: str, names: list[str], one: bool, end: str = "") -> list[str]:
    more = "" if one else ' (", " object)*'
    return [f'start: {begin} / ?/ "[" object{more} "]" {end}', *_objects(names, "arguments")]


def _deepseek_v3(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    separator = _marker("<｜tool▁sep｜>", special_id)
    fenced = (literal(name + "\n```json\n") for name in _readable(names))
    heads = [f'"function" {separator} {name}' for name in fenced]
    return _section(_DEEPSEEK, heads, special_id, more="" if one else ' ("\\n" call)*', tail=' "\\n```"')


def _deepseek_v31(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    separator = _marker("<｜tool▁sep｜>", special_id)
    heads = [f"{literal(name)} {separator}" for name in _readable(names)]
    return _section(_DEEPSEEK, heads, special_id, more="" if one else " call*")


def _kimi(names: list[str], one: bool, special_id: SpecialId) -> list[str]:
    """The number behind a name counts the calls of the conversation, earlier ones too."""
    begin = _marker("<|tool_call_argument_begin|>", special_id)
    heads = [f"{literal(f'functions.{name}:')} /[0-9]{{1,3}}/ {begin}" for name in _readable(names)]
    return _section(_KIMI, heads, special_id, more="" if one else " call*")


def _section(
    markers: Sequence[str], heads: Sequence[str], special_id: SpecialId, *, more: str, tail: str = ""
) -> list[str]:
    """A section of calls. `heads`: what stands before the arguments of each; `more`: what may follow the first call."""
    begin, begin_call, end_call, end = (_marker(text, special_id) for text in markers)
    calls = [f"{head} arguments{index}{tail}" for index, head in enumerate(heads)]
    return [f"start: {begin} call{more} {end}", f"call: {begin_call} ({' | '.join(calls)}) {end_call}"]


def _harmony(names: list[str], _one: bool, special_id: SpecialId) -> list[str]:
    """One call, after which outputs end. The model may say whom it calls before the channel, or behind it.

    It comes after thoughts, or at once, where the prompt has begun the message.
    """
    names = _readable(names)
    start, channel, constrain, message = (
        _marker(f"<|{name}|>", special_id) for name in ("start", "channel", "constrain", "message")
    )
    rules = [f'start: ({start} "assistant")? ({" | ".join(f"call{index}" for index in range(len(names)))})']
    for index, name in enumerate(names):
        to = literal(f" to=functions.{name}")
        heads = f'{to} {channel} "commentary" | {channel} "commentary" {to}'
        rules.append(f'call{index}: ({heads}) " " {constrain}? "json" {message} arguments{index}')
    return rules


_FORMATS: Mapping[str, Callable[[list[str], bool, SpecialId], list[str]]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
    "granite": _granite,
    "nemotron_json": _nemotron,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi,
    "cohere": _cohere,
    "hunyuan_a13b": _hunyuan,
    "harmony": _harmony,
}


def _readable(names: list[str], plain: re.Pattern[str] = _NAME, what: str = "white space or <") -> list[str]:
    """The names. Raises ValueError for one that would not be read back."""
    if odd := [name for name in names if not plain.fullmatch(name)]:
        raise ValueError(f"the function {odd[0]!r} cannot be called in this format: {what} in its name")
    return names


def _objects(names: list[str], key: str) -> list[str]:
    """The rule of a call as a JSON object, as models are shown them: the name first."""
    heads = (f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ' for name in names)
    calls = (f'{literal(head)} arguments{index} "}}"' for index, head in enumerate(heads))
    return [f"object: {' | '.join(calls)}"]


def _marker(text: str, special_id: SpecialId) -> str:
    token_id = special_id(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"

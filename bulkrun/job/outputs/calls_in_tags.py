"""Calls as models write them that put each argument between tags of its own: Qwen3-Coder, GLM-4.5.

    <tool_call>                          <tool_call>weather
    <function=weather>                   <arg_key>city</arg_key>
    <parameter=city>                     <arg_value>Paris</arg_value>
    Paris                                </tool_call>
    </parameter>
    </function>
    </tool_call>

Texts have no quotes there, all other values are JSON. So whether 75001 is a number or a text, the tool's schema tells.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any, NamedTuple

from bulkrun.job.outputs.call import Call, NoCall, call_of, json_at

Texts = Mapping[str, Mapping[str, Collection[str]]]  # see `text_parameters`


class _Tags(NamedTuple):
    """What stands around a call and its arguments. `text`: a text, up to the end of its value."""

    name: re.Pattern[str]
    key: re.Pattern[str]
    end_of_value: re.Pattern[str]
    text: re.Pattern[str]
    end: re.Pattern[str]


def _tags(name: str, key: str, line: str, end_of_value: str, end: str) -> _Tags:
    """`line`: the break around a text that is not part of it."""
    patterns = name, key + line, r"\s*" + end_of_value, f"(.*?){line}{end_of_value}", end
    return _Tags(*(re.compile(pattern, re.DOTALL) for pattern in patterns))


_CODER = _tags(
    name=r"\s*(?:<function=)?([^\s<>{}\"]+)>",
    key=r"\s*<parameter=([^<>\n]+)>",
    line=r"\n?",
    end_of_value=r"</parameter>(?=\s*(?:<parameter=|</function>))",
    end=r"\s*</function>(?:\s*</tool_call>)?",
)
_GLM = _tags(
    name=r"\s*([^\s<>{}\"]+)",
    key=r"\s*<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>",
    line="",
    end_of_value=r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))",
    end=r"\s*</tool_call>",
)
_PYTHONS: Mapping[str, Any] = {"True": True, "False": False, "None": None}  # as templates show them to the model
_KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    NoneType: "null",
}


def read_coder(text: str, at: int, texts: Texts) -> tuple[list[Call], int]:
    """One call of Qwen3-Coder's. Raises NoCall for one that is not whole."""
    return _read(text, at, texts, _CODER)


def read_glm(text: str, at: int, texts: Texts) -> tuple[list[Call], int]:
    """One call of GLM's. Raises NoCall for one that is not whole."""
    return _read(text, at, texts, _GLM)


def _read(text: str, at: int, texts: Texts, tags: _Tags) -> tuple[list[Call], int]:
    if (named := tags.name.match(text, at)) is None:
        raise NoCall
    name, at, arguments = named[1], named.end(), dict[str, Any]()
    while argument := tags.key.match(text, at):
        key = argument[1].strip()
        arguments[key], at = _value(text, argument.end(), texts.get(name, {}).get(key), tags)
    if (end := tags.end.match(text, at)) is None:
        raise NoCall
    return [call_of(name, arguments)], end.end()


def _value(text: str, at: int, kinds: Collection[str] | None, tags: _Tags) -> tuple[Any, int]:
    """The value that stands at a position, and where its tag ends.

    What is no JSON is a text, whatever the schema wants; so is JSON of another kind than `kinds` (None: any).
    """
    try:
        value, after = json_at(text, at)
        if (end := tags.end_of_value.match(text, after)) and _is_one_of(value, kinds):
            return value, end.end()  # whatever tags stand within
    except NoCall:
        pass
    if (written := tags.text.match(text, at)) is None:
        raise NoCall
    python = _PYTHONS.get(word := written[1].strip(), word)
    return python if python is not word and _is_one_of(python, kinds) else written[1], written.end()


def _is_one_of(value: Any, kinds: Collection[str] | None) -> bool:
    """To a schema 5.0 is a whole number."""
    kind = "integer" if isinstance(value, float) and value.is_integer() else _KINDS[type(value)]
    return kinds is None or kind in kinds

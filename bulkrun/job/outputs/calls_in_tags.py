"""Calls as models write them that put each argument between tags of its own: Qwen3-Coder, GLM-4.5, MiniMax, DeepSeek.

    <tool_call>                          <tool_call>weather
    <function=weather>                   <arg_key>city</arg_key>
    <parameter=city>                     <arg_value>Paris</arg_value>
    Paris                                </tool_call>
    </parameter>
    </function>
    </tool_call>

MiniMax M2 and DeepSeek V3.2 and V4 write a section of calls:

    <minimax:tool_call>                         <｜DSML｜function_calls>
    <invoke name="weather">                     <｜DSML｜invoke name="weather">
    <parameter name="city">Paris</parameter>    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </invoke>                                   </｜DSML｜invoke>
    </minimax:tool_call>                        </｜DSML｜function_calls>

Texts have no quotes there, all other values are JSON. So whether 75001 is a number or a text, the tool's schema tells;
of DeepSeek the tag itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

from bulkrun.job.outputs.call import Call, NoCall, call_of, json_at, read_section

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
_MINIMAX = _tags(
    name=r"\s*<invoke name=\"?([^\s<>{}\"]+)\"?>",
    key=r"\s*<parameter name=\"([^<>\"\n]+)\">",
    line="",
    end_of_value=r"</parameter>(?=\s*(?:<parameter name=|</invoke>))",
    end=r"\s*</invoke>",
)
_DSML = _tags(
    name=r"\s*<｜DSML｜invoke name=\"([^\s<>{}\"]+)\">",
    key=r"\s*<｜DSML｜parameter name=\"([^<>\"\n]+)\"(?: string=\"(?P<string>true|false)\")?>",
    line="",
    end_of_value=r"</｜DSML｜parameter>(?=\s*(?:<｜DSML｜parameter name=|</｜DSML｜invoke>))",
    end=r"\s*</｜DSML｜invoke>",
)
_END_OF_MINIMAX = re.compile(r"(?:\s*</minimax:tool_call>)?")
_END_OF_DSML = re.compile(r"(?:\s*</｜DSML｜(?:function|tool)_calls>)?")
_PYTHONS: Mapping[str, Any] = {"True": True, "False": False, "None": None}  # as templates show them to the model
_KINDS_TOLD: Mapping[str | None, Collection[str] | None] = {"true": (), "false": None, None: None}
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
    call, at = _read(text, at, texts, _CODER)
    return [call], at


def read_glm(text: str, at: int, texts: Texts) -> tuple[list[Call], int]:
    """One call of GLM's. Raises NoCall for one that is not whole."""
    call, at = _read(text, at, texts, _GLM)
    return [call], at


def read_minimax(text: str, at: int, texts: Texts) -> tuple[list[Call], int]:
    """The calls of a section of MiniMax's. Raises NoCall where the first one is not whole."""
    return read_section(text, at, partial(_read, texts=texts, tags=_MINIMAX), _END_OF_MINIMAX)


def read_dsml(text: str, at: int, texts: Texts) -> tuple[list[Call], int]:
    """The calls of a section of DeepSeek's. Raises NoCall where the first one is not whole."""
    return read_section(text, at, partial(_read, texts=texts, tags=_DSML), _END_OF_DSML)


def _read(text: str, at: int, texts: Texts, tags: _Tags) -> tuple[Call, int]:
    if (named := tags.name.match(text, at)) is None:
        raise NoCall
    name, at, arguments = named[1], named.end(), dict[str, Any]()
    while argument := tags.key.match(text, at):
        key = argument[1].strip()
        kinds = _KINDS_TOLD[argument["string"]] if "string" in argument.re.groupindex else texts.get(name, {}).get(key)
        arguments[key], at = _value(text, argument.end(), kinds, tags)
    if (end := tags.end.match(text, at)) is None:
        raise NoCall
    return call_of(name, arguments), end.end()


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

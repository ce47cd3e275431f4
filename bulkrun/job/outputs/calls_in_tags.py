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

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from bulkrun.job.outputs.call import Call, NoCall, call_of

Texts = Mapping[str, Collection[str]]  # by function, the parameters that are texts

_CODER_NAME = re.compile(r"\s*(?:<function=)?([^\s<>{}\"]+)>")
_CODER_ARGUMENT = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
_CODER_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_GLM_NAME = re.compile(r"\s*([^\s<>{}\"]+)")
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))", re.DOTALL
)
_GLM_END = re.compile(r"\s*</tool_call>")
_PYTHONS: Mapping[str, Any] = {"True": True, "False": False, "None": None}  # as templates show them to the model


def read_coder(text: str, at: int, texts: Texts) -> tuple[list[Call], int]:
    """One call of Qwen3-Coder's. Raises NoCall for one that is not whole."""
    return _read(text, at, texts, (_CODER_NAME, _CODER_ARGUMENT, _CODER_END))


def read_glm(text: str, at: int, texts: Texts) -> tuple[list[Call], int]:
    """One call of GLM's. Raises NoCall for one that is not whole."""
    return _read(text, at, texts, (_GLM_NAME, _GLM_ARGUMENT, _GLM_END))


def _read(text: str, at: int, texts: Texts, tags: tuple[re.Pattern[str], ...]) -> tuple[list[Call], int]:
    of_name, of_argument, of_end = tags
    named = of_name.match(text, at)
    if named is None:
        raise NoCall
    name, at, arguments = named[1], named.end(), dict[str, Any]()
    while argument := of_argument.match(text, at):
        key, at = argument[1].strip(), argument.end()
        arguments[key] = _value(argument[2], is_text=key in texts.get(name, ()))
    if (end := of_end.match(text, at)) is None:
        raise NoCall
    return [call_of(name, arguments)], end.end()


def _value(written: str, *, is_text: bool) -> Any:
    """What is no JSON is a text, whatever the schema wants."""
    if is_text:
        return written
    try:
        return _PYTHONS[written.strip()] if written.strip() in _PYTHONS else json.loads(written)
    except (ValueError, RecursionError):
        return written

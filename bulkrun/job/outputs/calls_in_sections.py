"""Calls as models write them that begin a section of calls, each with its name before its arguments: DeepSeek, Kimi K2.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}
        <｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}
        <|tool_call_end|><|tool_calls_section_end|>

DeepSeek's V3 and R1 write `function`, the separator, the name, and the arguments between fences of Markdown.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from bulkrun.job.outputs.call import Call, NoCall, call_of, json_at, read_section


class _Section(NamedTuple):
    """What stands before and behind the arguments of a call, and what ends a section."""

    head: re.Pattern[str]
    tail: re.Pattern[str]
    end: re.Pattern[str]


def _section(begin: str, named: str, tail: str, end: str) -> _Section:
    """`named`: a call's name, up to its arguments. The end of the answer may stand for those of call and section.

    No two repetitions of white space stand side by side: an answer may have very much of it.
    """
    return _Section(
        re.compile(rf"(?:\s*{re.escape(begin)})?\s*(?:{named})"),
        re.compile(rf"{tail}|\s*\Z"),
        re.compile(rf"(?:\s*{re.escape(end)})?"),
    )


_DEEPSEEK = _section(
    begin="<｜tool▁call▁begin｜>",
    named=r"function<｜tool▁sep｜>\s*([^\s<]+?)\s*```(?:json)?|([^\s<]+)\s*<｜tool▁sep｜>",
    tail=r"(?:\s*```)?\s*<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
_KIMI = _section(
    begin="<|tool_call_begin|>",
    named=r"(?:functions\.)?([^\s<]+?):\d+\s*<\|tool_call_argument_begin\|>",
    tail=r"\s*<\|tool_call_end\|>",
    end="<|tool_calls_section_end|>",
)


def read_deepseek(text: str, at: int) -> tuple[list[Call], int]:
    """The calls of a section, of either form. Raises NoCall where the first one is not whole."""
    return read_section(text, at, partial(_read_call, section=_DEEPSEEK), _DEEPSEEK.end)


def read_kimi(text: str, at: int) -> tuple[list[Call], int]:
    """The calls of a section. The number behind a name counts the calls of a conversation, and names none."""
    return read_section(text, at, partial(_read_call, section=_KIMI), _KIMI.end)


def _read_call(text: str, at: int, section: _Section) -> tuple[Call, int]:
    if (head := section.head.match(text, at)) is None:
        raise NoCall
    arguments, at = json_at(text, head.end())
    if (tail := section.tail.match(text, at)) is None:
        raise NoCall
    return call_of(head[head.lastindex or 0], arguments), tail.end()

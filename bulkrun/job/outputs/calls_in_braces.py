"""Calls as the Gemmas write them: keys without quotes, and texts between marks of their own.

    <|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3,near:[{x:1.5,open:true}]}<tool_call|>     Gemma 4
    <start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>        FunctionGemma

All other values are JSON. A text ends with the next mark, whatever it holds.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

from bulkrun.job.outputs.call import Call, NoCall, after_space, call_of, items_within, json_at


class _Marks(NamedTuple):
    """What stands on both sides of a text, and what ends a call."""

    text: str
    end: str


_GEMMA4 = _Marks('<|"|>', "<tool_call|>")
_FUNCTIONGEMMA = _Marks("<escape>", "<end_function_call>")
_NAME = re.compile(r"\s*call:\s*([^\s{}<>]+)\s*\{")
_KEY = re.compile(r"([^:{}\[\],\"<>\n]+):")
_MAX_DEPTH = 100


def read_gemma4(text: str, at: int) -> tuple[list[Call], int]:
    """One call of Gemma 4's. Raises NoCall for one that is not whole."""
    return _read(text, at, _GEMMA4)


def read_functiongemma(text: str, at: int) -> tuple[list[Call], int]:
    """One call of FunctionGemma's. Raises NoCall for one that is not whole."""
    return _read(text, at, _FUNCTIONGEMMA)


def _read(text: str, at: int, marks: _Marks) -> tuple[list[Call], int]:
    """The end of the answer may stand for that of the call, and for what is missing of its marker."""
    if (named := _NAME.match(text, at)) is None:
        raise NoCall
    arguments, at = items_within(text, named.end(), "}", partial(_pair, mark=marks.text, depth=0))
    at = after_space(text, at)
    if not marks.end.startswith(text[at : at + len(marks.end)]):
        raise NoCall
    return [call_of(named[1], dict(arguments))], min(len(text), at + len(marks.end))


def _pair(text: str, at: int, mark: str, depth: int) -> tuple[tuple[str, Any], int]:
    """A key and its value; a key may stand between marks too."""
    if bare := _KEY.match(text, at):
        key, at = bare[1].strip(), bare.end()
    else:
        key, at = _text(text, at, mark)
        at = after_space(text, at) + 1
        if text[at - 1 : at] != ":":
            raise NoCall
    value, at = _value(text, at, mark, depth)
    return (key, value), at


def _value(text: str, at: int, mark: str, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise NoCall
    at = after_space(text, at)
    if text.startswith("[", at):
        return items_within(text, at + 1, "]", partial(_value, mark=mark, depth=depth + 1))
    if text.startswith("{", at):
        pairs, at = items_within(text, at + 1, "}", partial(_pair, mark=mark, depth=depth + 1))
        return dict(pairs), at
    if text.startswith(mark, at):
        return _text(text, at, mark)
    if text.startswith("None", at):  # as templates show null to the model
        return None, at + len("None")
    return json_at(text, at)


def _text(text: str, at: int, mark: str) -> tuple[str, int]:
    begin = at + len(mark)
    end = text.find(mark, begin)
    if not text.startswith(mark, at) or end < 0:
        raise NoCall
    return text[begin:end], end + len(mark)

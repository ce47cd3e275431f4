"""A call as models write it that write Python: weather(city="Paris", days=3, alerts=True, near=['a', {"b": null}]).

It is read here and never evaluated, and not by `ast`, which takes neither what chat templates show models as values
(true and null in objects, line breaks in texts) nor names that Python keeps for itself (from=...).
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from bulkrun.job.outputs.call import Call, NoCall, after_space, call_of, items_within, json_at

_WORD = r"\s*([^\s()\[\]{},=\"']+)\s*"
_NAME, _KEY = re.compile(_WORD + r"\("), re.compile(_WORD + "=")
_TEXT = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_CONSTANTS = {"True": True, "False": False, "None": None}
_MAX_DEPTH = 100


def read_python_call(text: str, at: int) -> tuple[Call, int]:
    """The call that stands at a position, after white space, and where it ends. Raises NoCall.

    Each argument has its name: only the tool could tell which one another is.
    """
    if (named := _NAME.match(text, at)) is None:
        raise NoCall
    arguments, at = items_within(text, named.end(), ")", _argument)
    return call_of(named[1], dict(arguments)), at


def _argument(text: str, at: int) -> tuple[tuple[str, Any], int]:
    if (key := _KEY.match(text, at)) is None:
        raise NoCall
    value, at = _value(text, key.end(), 0)
    return (key[1], value), at


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """A value that JSON has too, written as in Python or in JSON."""
    if depth > _MAX_DEPTH:
        raise NoCall
    at = after_space(text, at)
    first = text[at : at + 1]
    if first == "[":
        return items_within(text, at + 1, "]", partial(_value, depth=depth + 1))
    if first == "{":
        pairs, at = items_within(text, at + 1, "}", partial(_pair, depth=depth + 1))
        return dict(pairs), at
    if first in ("'", '"'):
        return _text(text, at)
    word = next((word for word in _CONSTANTS if text.startswith(word, at)), None)
    return json_at(text, at) if word is None else (_CONSTANTS[word], at + len(word))


def _pair(text: str, at: int, depth: int) -> tuple[tuple[str, Any], int]:
    key, at = _text(text, at)
    at = after_space(text, at)
    if not text.startswith(":", at):
        raise NoCall
    value, at = _value(text, at + 1, depth)
    return (key, value), at


def _text(text: str, at: int) -> tuple[str, int]:
    """A text in either quotes, as JSON reads it where it can: it knows pairs of surrogates."""
    if (written := _TEXT.match(text, at)) is None:
        raise NoCall
    if text.startswith('"', at):
        try:
            return json_at(written[0], 0)[0], written.end()
        except NoCall:
            pass
    return _ESCAPE.sub(_unescaped, written[1] or written[2] or ""), written.end()


def _unescaped(escape: re.Match[str]) -> str:
    """What is no escape of Python's stays as it is, with its backslash."""
    *hexadecimals, octal, other = escape.groups()
    if code := next(filter(None, hexadecimals), None):
        return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else escape[0]
    if octal:
        return chr(int(octal, 8))
    return other if other in "\\'\"" else _ESCAPES.get(other, escape[0])

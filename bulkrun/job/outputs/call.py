"""One tool call, and the JSON that it is made of. Knows none of the formats that models write calls in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import isinf
from typing import Any, NamedTuple, NoReturn

from bulkrun.data.types.json_types import is_unicode

_SPACE = re.compile(r"\s*")


class Call(NamedTuple):
    """A call of a tool; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class NoCall(ValueError):
    """What stands here is not a call."""


ReadCall = Callable[[str, int], tuple[Call, int]]  # the call at a position, and where it ends
_ReadItem = Callable[[str, int], tuple[Any, int]]  # the same of anything


def call_of(name: Any, arguments: Any) -> Call:
    """The call of a function by its name, with an object or nothing at all. Raises NoCall for what is neither."""
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not is_unicode(name) or not isinstance(arguments, dict):
        raise NoCall
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        return Call(name, text if is_unicode(text) else json.dumps(arguments))
    except RecursionError:
        raise NoCall from None


def read_section(text: str, at: int, read: ReadCall, end: re.Pattern[str]) -> tuple[list[Call], int]:
    """The whole calls at a position, one after another, and where they end, with the section's end where it is there.

    `end` matches nothing too. Raises NoCall where the first one is not whole.
    """
    call, at = read(text, at)
    calls = [call]
    while True:
        try:
            call, at = read(text, at)
        except NoCall:
            ended = end.match(text, at)
            assert ended is not None, "it matches nothing too"
            return calls, ended.end()
        calls.append(call)


def items_within(text: str, at: int, close: str, read: _ReadItem) -> tuple[list[Any], int]:
    """What stands in brackets from behind the first one on, with commas between, and where the last one ends.

    Raises NoCall where that one is missing.
    """
    items = []
    while not text.startswith(close, at := after_space(text, at)):
        item, at = read(text, at)
        items.append(item)
        at = after_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(close, at):
            raise NoCall
    return items, at + 1


def json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that stands at a position, after white space, and where it ends. Raises NoCall."""
    try:
        return _DECODER.raw_decode(text, after_space(text, at))
    except (ValueError, RecursionError):
        raise NoCall from None


def after_space(text: str, at: int) -> int:
    """The position of what follows white space."""
    space = _SPACE.match(text, at)
    assert space is not None, "it matches nothing too"
    return space.end()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    """Raise ValueError for what is too large for a double: it would come back as no number."""
    if isinf(value := float(number)):
        raise ValueError(f"{number} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)

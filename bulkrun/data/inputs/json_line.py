"""One line as one JSON object, or why it is none: stricter than Python's json, and never a value that was bent."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from bulkrun.data.inputs.lines import Line
from bulkrun.data.types.json_types import is_unicode

MAX_DEPTH = 100  # objects and lists inside each other
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]')


class BadLine(ValueError):
    """Why a line is not a row; the message names the problem, not the place."""


def parse_line(line: Line, max_row_bytes: int) -> dict[str, Any]:
    """The object on a line. Raises BadLine for everything that is not exactly one well-formed JSON object."""
    if line.data is None:
        raise BadLine(f"the line that starts at byte {line.offset} is longer than input.max_row_bytes {max_row_bytes}")
    text = _decode(line.data)
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise BadLine(f"objects or lists nested more than {MAX_DEPTH} deep")
    value = _parse(text)
    if not isinstance(value, dict):
        raise BadLine(f"the line is {_NOT_AN_OBJECT.get(type(value), 'a plain value')}, not a JSON object")
    if "\\u0000" in text and _has_nul(value):
        raise BadLine("text with a NUL character (\\u0000)")
    if _SURROGATE.search(text) and not _has_unicode_keys(value):
        raise BadLine("a key that is not Unicode (a lone surrogate)")
    return value


_NOT_AN_OBJECT = {list: "a list", str: "a string", int: "a number", float: "a number", type(None): "null"}


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"invalid UTF-8 at byte {error.start + 1} of the line") from None


def _parse(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at").removesuffix(" starting")
        raise BadLine(f"not valid JSON: {what} at column {error.colno}") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise error if isinstance(error, BadLine) else BadLine("a number with too many digits") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise BadLine(f"key {twice!r} appears twice in one object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise BadLine(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise BadLine(f"the number {text[:24]} is beyond what a double holds")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite)


def _depth(text: str) -> int:
    """How deep brackets nest, those inside strings not counted."""
    deepest = depth = 0
    for token in _TOKENS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _has_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any("\0" in key or _has_nul(inner) for key, inner in value.items())
    if isinstance(value, list):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


def _has_unicode_keys(value: Any) -> bool:
    """Whether all keys can name columns and fields; values that cannot be stored are found with their columns."""
    if isinstance(value, dict):
        return all(is_unicode(key) and _has_unicode_keys(inner) for key, inner in value.items())
    return not isinstance(value, list) or all(map(_has_unicode_keys, value))

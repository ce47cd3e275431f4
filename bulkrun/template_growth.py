"""How large what a template is about to make can be, and how long it can take: known before it is made.

For `sandbox`, which refuses what is too large. Infinite stands for more than anyone counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from string import Formatter
from typing import Any

from jinja2.utils import Namespace

MAX_CHARS = 32 * 2**20  # of any string a template makes, the output included
MAX_ITEMS = 2**20  # of any list, tuple or dict a template makes
MAX_INTEGER_BITS = 2**14  # of any number; Python writes out no larger ones, and divides them slowly
_VIEWS: tuple[Any, ...] = ({}.keys(), {}.values(), {}.items())
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, *map(type, _VIEWS))
_CHARS_MOVED_AT_ONCE = 1024  # in the time that one takes when it is made
_MOST_ESCAPED = 100  # characters that one becomes when it cannot be encoded
_ENCODINGS = frozenset(
    {"utf-8", "utf8", "ascii", "latin-1", "utf-16", "utf-32"}
)  # others take the square of the length
_BYTES_METHODS = frozenset({"decode", "hex", "startswith", "endswith"})


def operator_size(operator: str, left: Any, right: Any) -> float:
    """How large the result of an operator can be, in characters or items."""
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "%" and isinstance(left, str | bytes):
        return _percent_formatted_size(left if isinstance(left, str) else left.decode("latin-1"), right)
    if isinstance(left, int) and isinstance(right, int):
        return _integer_size(operator, left, right)
    if operator == "*":
        return max(_length(left) * _reach([right]), _length(right) * _reach([left]))
    return 0


def _integer_size(operator: str, left: int, right: int) -> float:
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    else:
        bits = left.bit_length() * right if operator == "**" and abs(left) > 1 else 0
    return float("inf") if bits > MAX_INTEGER_BITS else 0


def growth(name: str, value: Any, options: Sequence[Any]) -> float:
    """How large the result of a filter, or of a method of a string or number, can be; 0 where it cannot multiply."""
    text = value if isinstance(value, str) else ""
    if name == "replace" and len(options) >= 2 and isinstance(options[0], str):
        return len(text) + text.count(options[0]) * _length(options[1])
    if name in ("indent", "expandtabs"):
        return len(text) + (text.count("\n") + text.count("\t") + 1) * _reach(options)
    if name == "wordwrap":
        return max(_translated_size(text, options), _work_of_cutting(text, options))
    if name == "translate":
        return _translated_size(text, options)
    if name == "format":
        return _formatted_size(text, options)
    if name == "encode":
        return _encoded_size(text, options)
    if name in ("center", "ljust", "rjust", "zfill", "batch", "slice", "to_bytes"):
        return len(text) + _reach(options)
    if name == "round":
        return _integer_size("**", 10, _reach(options))
    if name in ("tojson", "pprint", "string", "urlencode", "xmlattr"):
        return printed_size(value) * (1 + _reach(options))
    if name == "sum" and any(not isinstance(option, int | float | str) for option in options):
        return float("inf")  # lists can be added up too, each sum longer than the last
    return 0


def method_growth(name: str, value: Any, options: Sequence[Any]) -> float:
    """`growth` of the methods of a value, which know more than the filters of the same names."""
    if isinstance(value, bytes) and name not in _BYTES_METHODS:
        return float("inf")
    if name in ("decode", "encode"):
        return _encoded_size(value, options)
    if name == "format_map":
        return _formatted_size(value, options)
    return growth(name, value, options)


def _translated_size(text: str, options: Sequence[Any]) -> float:
    return len(text) * max(1, *(printed_size(option) for option in options)) if options else 0


def _work_of_cutting(text: str, options: Sequence[Any]) -> float:
    """A word that is longer than a line is cut off line by line, and what is left of it copied each time."""
    width = min((option for option in options if type(option) is int), default=79)
    return sum(len(word) ** 2 for word in text.split()) / max(1, width) / _CHARS_MOVED_AT_ONCE


def _encoded_size(value: str | bytes, options: Sequence[Any]) -> float:
    if any(str(option).lower() not in _ENCODINGS for option in options[:1]):
        return float("inf")
    return len(value) * (_MOST_ESCAPED if len(options) > 1 else 1)


def _percent_formatted_size(pattern: str, values: Any) -> float:
    """Any number and any asterisk is taken for a width."""
    if "*" in pattern:
        return float("inf")
    return len(pattern) + _widths(pattern) + pattern.count("%") * printed_size(values)


def _formatted_size(pattern: str, values: Any) -> float:
    """A format pattern may print each value at each of its places, and as wide as it says."""
    specs = [spec for _, _, spec, _ in Formatter().parse(pattern) if spec]
    if any("{" in spec for spec in specs):  # a width that is another value
        return float("inf")
    return len(pattern) + sum(map(_widths, specs)) + pattern.count("{") * printed_size(values)


def _widths(text: str) -> float:
    return sum(map(float, re.findall(r"\d+", text)))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _reach(options: Iterable[Any]) -> int:
    """The largest width or count among options: a number's value, a string's length, the largest in a tuple."""
    return max(map(_reach_of, options), default=0)


def _reach_of(option: Any) -> int:
    if isinstance(option, tuple):
        return max(len(option), _reach(option))
    return abs(option) if isinstance(option, int) else _length(option)


def printed_size(value: Any) -> float:
    """About how many characters a value prints as; infinite where it holds too many items to count."""
    if isinstance(value, str):
        return len(value)
    size, items, todo = 0, 0, [value]
    while todo:
        item = todo.pop()
        items += 1
        size += 2 + _printed_scalar_size(item)
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, CONTAINERS):
            todo += item
        if items > MAX_ITEMS or size > MAX_CHARS or isinstance(item, Namespace):  # which holds anything
            return float("inf")
    return size


def _printed_scalar_size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length() // 3
    return len(value) if isinstance(value, str | bytes) else 0


def num_items(container: Any) -> float:
    """The items of a container and of those inside, each as often as it stands there; infinite where too many."""
    items, todo = 0, [container]
    while todo:
        inner = todo.pop()
        items += len(inner)
        if items > MAX_ITEMS:
            return float("inf")
        todo += [item for item in inner if isinstance(item, CONTAINERS)]
        if isinstance(inner, dict):
            todo += [item for item in inner.values() if isinstance(item, CONTAINERS)]
    return items

"""What type a JSON column has, from a sample of its values, and whether a value has that type. Knows no files.

Numbers that are sometimes whole and sometimes not are doubles, unless some are integers that no double holds and few
have a fraction: those few are errors then, and not the ids. Objects and lists become Arrow structs and lists when
the sample agrees on their inside. A column of strings takes numbers, true and false as text. One whose values have no
one type is kept as text: strings as they are, everything else as its JSON. So is a column that the sample knows nothing
about (all null, all empty lists or objects), unless its type is known from elsewhere. What is known decides too where a
sample would do with less: whole numbers in a column of doubles, numbers alone in one that was text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

Kind = Literal["null", "bool", "int", "bigint", "float", "string", "list", "object"]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_DOUBLE_INT = 2**53  # beyond it doubles are not exact
MAX_MINORITY = 0.1  # at most this share of values of other types are errors; more of them make the column text
MAX_STRUCT_FIELDS = 64  # an object with more keys is a map in disguise
_LIST_INDEX = re.compile(r"\[\d+\]")
_KINDS: dict[type, Kind] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "string",
    list: "list",
    dict: "object",
}
_EXACT = {"string": str, "bool": bool, "float": float}  # a value of this Python type needs no closer look
_WANTED = {"bool": "true or false", "int": "a 64-bit integer", "float": "a number", "string": "a string"}
_WANTED |= {"list": "a list", "object": "an object"}


def kind_of(value: Any) -> Kind:
    """The JSON kind of a parsed value; an integer beyond 64 bits is a kind of its own."""
    kind = _KINDS[type(value)]
    return "bigint" if kind == "int" and not INT64_MIN <= value <= INT64_MAX else kind


@dataclass(frozen=True)
class JsonType:
    """A declared type. `text` columns are strings that hold the JSON of values that are not strings."""

    kind: Literal["bool", "int", "float", "string", "list", "object", "text"]
    item: JsonType | None = None
    fields: dict[str, JsonType] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()  # keys of an object that must not get lost, whether it declares them or not

    def needing(self, keys: Iterable[str]) -> JsonType:
        """The same whose objects, or a list's, need these keys."""
        if self.kind == "list" and self.item is not None:
            return replace(self, item=self.item.needing(keys))
        return replace(self, needed=frozenset(keys)) if self.kind == "object" else self

    @property
    def nested(self) -> bool:
        """Whether values have others inside."""
        return self.kind in ("list", "object")

    def arrow(self) -> pa.DataType:
        """The Arrow type of the column."""
        if self.kind == "object":
            return pa.struct([(name, inner.arrow()) for name, inner in self.fields.items()])
        if self.kind == "list":
            assert self.item is not None, "a list type has an item type"
            return pa.list_(self.item.arrow())
        return {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}.get(self.kind, pa.string())


TEXT = JsonType("text")


def list_in(text: str) -> list[Any] | None:
    """The list that a text holds as JSON: how lists come where a column is text, as CSV's are and those of JSON lines
    that have lists in some rows and strings in others. None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) else None


_SCALARS: dict[pa.DataType, JsonType] = {
    pa.bool_(): JsonType("bool"),
    pa.int64(): JsonType("int"),
    pa.float64(): JsonType("float"),
    pa.string(): JsonType("string"),
}


def json_type(type_: pa.DataType) -> JsonType | None:
    """The type whose Arrow type this is; None for one that no JSON column has."""
    if pa.types.is_list(type_):
        item = json_type(type_.value_type)
        return JsonType("list", item=item) if item else None
    if pa.types.is_struct(type_):
        fields = {field.name: json_type(field.type) for field in type_}
        agreed = {name: inner for name, inner in fields.items() if inner is not None}
        return JsonType("object", fields=agreed) if len(agreed) == len(fields) else None
    return _SCALARS.get(type_)


class Shape:
    """What a sample showed of one column, or of one place inside it."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter()
        self.fractions = 0  # floats with a fraction
        self.beyond_doubles = False
        self.item: Shape | None = None
        self.fields: dict[str, Shape] = {}

    def add(self, value: Any) -> None:
        """Count one value, and everything inside it."""
        kind = kind_of(value)
        self.counts[kind] += 1
        if kind == "float":
            self.fractions += not value.is_integer()
        elif kind == "int":
            self.beyond_doubles = self.beyond_doubles or abs(value) > MAX_DOUBLE_INT
        elif isinstance(value, dict):
            for name, inner in value.items():
                self.fields.setdefault(name, Shape()).add(inner)
        elif isinstance(value, list):
            self.item = self.item or Shape()
            for inner in value:
                self.item.add(inner)

    def resolve(self, known: JsonType | None = None) -> JsonType:
        """The column's type. `known` is what it has elsewhere, for what the sample does not tell."""
        if known and known.kind == "string":  # may be a text column
            return TEXT
        if not _known(self):
            return known or TEXT
        if self._is_hollow() and not (known and known.nested):
            return TEXT
        return self._resolve(known) or TEXT

    def _resolve(self, known: JsonType | None) -> JsonType | None:
        """The type of this place; None when the values in it do not agree on one."""
        if not _known(self):
            return known or JsonType("string")
        if known and known.nested and self._is_hollow():
            return known
        kind = self._majority()
        exact = {"float": not self.beyond_doubles, "int": not self.fractions}
        if known and kind in ("int", "float") and exact.get(known.kind):
            return known
        if kind == "list":
            item = (self.item or Shape())._resolve(known.item if known else None)
            return JsonType("list", item=item) if item else None
        if kind == "object":
            return self._resolve_object(known.fields if known else {})
        return JsonType(kind) if kind in ("bool", "int", "float", "string") else None

    def _resolve_object(self, known: dict[str, JsonType]) -> JsonType | None:
        if not 0 < len(self.fields) <= MAX_STRUCT_FIELDS:
            return None
        fields = {name: shape._resolve(known.get(name)) for name, shape in self.fields.items()}
        agreed = {name: inner for name, inner in fields.items() if inner is not None}
        return JsonType("object", fields=agreed) if len(agreed) == len(fields) else None

    def _is_hollow(self) -> bool:
        """Whether the values are lists or objects with nothing in them that would tell a type."""
        kind = self._majority()
        return (kind == "list" and not _known(self.item)) or (kind == "object" and not self.fields)

    def _majority(self) -> Kind | None:
        """The kind that all values but a small minority have."""
        counts = Counter({kind: count for kind, count in self.counts.items() if kind != "null"})
        if self.beyond_doubles and self.fractions <= MAX_MINORITY * (counts["int"] + counts["float"]):
            counts["int"] += counts["float"] - self.fractions
            counts["float"] = self.fractions
        elif counts["float"]:
            counts["float"] += counts.pop("int", 0)
        if not counts.total():
            return None
        kind, count = counts.most_common(1)[0]
        return kind if count >= (1 - MAX_MINORITY) * counts.total() else None


def _known(shape: Shape | None) -> bool:
    """Whether the sample had any value but null here."""
    return shape is not None and shape.counts.total() > shape.counts["null"]


class KeyCounts:
    """Keys that the declared types do not have -> how often they came. Remembers a bounded number of names."""

    MAX_NAMES = 1000

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, name: str, times: int = 1) -> None:
        """Count a key by its path; places in lists do not tell keys apart."""
        name = _LIST_INDEX.sub("", name)
        if name in self.counts or len(self.counts) < self.MAX_NAMES:
            self.counts[name] = self.counts.get(name, 0) + times

    def include(self, other: KeyCounts) -> None:
        """Count what the other has counted."""
        for name, times in other.counts.items():
            self.add(name, times)


def find_mismatch(value: Any, want: JsonType, place: str, undeclared: KeyCounts) -> str | None:
    """Why `value` is not of type `want` (None: it is), and count the keys inside it that the type does not have."""
    if value is None or want.kind == "text" or type(value) is _EXACT.get(want.kind):
        return None
    if want.kind == "object" and isinstance(value, dict):
        for key in value.keys() - want.fields.keys():
            if key in want.needed and value[key]:
                return _lost(key, place)
            undeclared.add(f"{place}.{key}")
        for key, inner in want.fields.items():
            if problem := find_mismatch(value.get(key), inner, f"{place}.{key}", undeclared):
                return problem
        return None
    if want.kind == "list" and isinstance(value, list):
        assert want.item is not None, "a list type has an item type"
        for number, element in enumerate(value):
            if problem := find_mismatch(element, want.item, f"{place}[{number}]", undeclared):
                return problem
        return None
    return _mismatch_of_kinds(value, want, place)


def _lost(key: str, place: str) -> str:
    return (
        f"column {place}: has {key!r}, which nothing in the sample of lines had that declares the columns; put a line "
        "that has it at the start of an input file"
    )


def _mismatch_of_kinds(value: Any, want: JsonType, place: str) -> str | None:
    """The same of a value whose inside is not asked about; a number may be of a kind that holds it exactly."""
    kind = kind_of(value)
    if want.kind == "float" and kind == "int" and abs(value) > MAX_DOUBLE_INT:
        return (
            f"column {place}: {describe(value)} beyond 2^53, where doubles are not exact, as other rows have fractions"
        )
    if kind == want.kind or (want.kind == "float" and kind == "int") or (want.kind == "int" and _is_whole(value)):
        return None
    return f"column {place}: {describe(value)} where the other rows have {_WANTED[want.kind]}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and INT64_MIN <= value <= INT64_MAX


NOT_UNICODE = "half a surrogate pair (\\ud800-\\udfff), which is not text"  # what a text that is none holds


def is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str) -> str:
    """The text with a question mark for each lone surrogate (JSON may escape them), which cannot go into Parquet."""
    return text.encode("utf-8", "replace").decode("utf-8")


def describe(value: Any) -> str:
    """A value for an error message: what it is, and its start (never more: logs hold no payloads)."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(value)
    kind = {"bigint": "integer beyond 64 bits:", "int": "integer", "float": "number"}.get(
        kind_of(value), kind_of(value)
    )
    return f"{kind} {text if len(text) <= 24 else text[:20] + '...'}"

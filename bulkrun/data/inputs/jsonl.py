"""JSON lines: every line but a blank one is exactly one row; a bad one is a row with an error that names it.

The schema is declared from a bounded sample of all files. DuckDB's and pyarrow's own readers lose bad lines or accept
them silently, so this one reads bytes, splits lines itself and decodes them one by one.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import pyarrow as pa

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, MAX_BATCH_ROWS, InputBatch, Position, record_batch
from bulkrun.data.inputs.files import InputFile, open_stream
from bulkrun.data.inputs.lines import Line, filled_lines
from bulkrun.data.types.json_types import TEXT, JsonType, KeyCounts, Shape, find_mismatch, is_unicode, json_type
from bulkrun.data.types.known_types import KnownTypes
from bulkrun.errors import InputError
from bulkrun.request import RowError

SAMPLE_LINES = 20_000  # over all files together, as is the next
SAMPLE_BYTES = 64 * 2**20
MAX_DEPTH = 100  # objects and lists inside each other
MAX_COLUMNS = 4096
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]')

ChooseColumns = Callable[[Mapping[str, Shape]], Sequence[str]]  # of all columns, by what the sample showed of each


NeededKeys = Mapping[str, Sequence[str]]  # of a column


class BadLine(ValueError):
    """Why a line is not a row; the message names the problem, not the place."""


class JsonlSource:
    """Rows of JSON lines files with the columns `types`."""

    num_rows: int | None = None

    def __init__(self, files: Sequence[InputFile], types: dict[str, JsonType], max_row_bytes: int) -> None:
        self._files = files
        self._types = types
        self._all_names = frozenset(types)
        self._max_row_bytes = max_row_bytes
        self._undeclared = KeyCounts()
        self.schema = pa.schema([(name, type_.arrow()) for name, type_ in types.items()])

    @classmethod
    def open(
        cls,
        files: Sequence[InputFile],
        max_row_bytes: int,
        kept_as_text: ChooseColumns | None = None,
        known: KnownTypes | None = None,
        needed: NeededKeys | None = None,
    ) -> JsonlSource:
        """Declare the columns from a sample of every file; `kept_as_text` chooses those to be kept as JSON text.

        A column of which the sample shows no value has its type in `known`, if that names it. A row is bad whose
        objects in a column have a key that is `needed` there and is not declared.
        """
        shapes = sample_shapes(files, max_row_bytes)
        declared = {name: json_type(type_) for name, type_ in (known or {}).items() if name in shapes}
        types = {name: shape.resolve(declared.get(name)) for name, shape in shapes.items()}
        types |= {name: types[name].needing(keys) for name, keys in (needed or {}).items() if name in types}
        as_text = kept_as_text(shapes) if kept_as_text else ()
        return cls(files, types | dict.fromkeys(as_text, TEXT), max_row_bytes)

    @property
    def undeclared_columns(self) -> dict[str, int]:
        return dict(self._undeclared.counts)

    def select(self, columns: Sequence[str]) -> JsonlSource:
        chosen = JsonlSource(self._files, {name: self._types[name] for name in columns}, self._max_row_bytes)
        chosen._all_names = self._all_names
        return chosen

    def batches(self, start: Position) -> Iterator[InputBatch]:
        file = self._files[start.file]
        row = start.row
        with open_stream(file) as stream:
            for lines in _in_groups(islice(filled_lines(stream, self._max_row_bytes), row, None)):
                yield self._batch(file, Position(start.file, row), lines)
                row += len(lines)

    def _batch(self, file: InputFile, position: Position, lines: list[Line]) -> InputBatch:
        rows: list[dict[str, Any]] = []
        errors: dict[int, RowError] = {}
        for index, line in enumerate(lines):
            try:
                row = parse_line(line, self._max_row_bytes)
                self._note_undeclared(row)
            except BadLine as problem:
                errors[index] = _row_error(file, line, problem)
                row = {}
            rows.append(row)
        arrays = [self._column(name, rows, self._undeclared) for name in self._types]
        if any(array is None for array in arrays):
            self._drop_mismatches(file, lines, rows, errors)
            arrays = [self._column(name, rows, KeyCounts()) for name in self._types]
        return InputBatch(position, record_batch(arrays, self.schema, len(rows)), dict(sorted(errors.items())))

    def _column(self, name: str, rows: list[dict[str, Any]], undeclared: KeyCounts) -> pa.Array | None:
        """The values of one column as an array; None when some row has a value of another type."""
        type_ = self._types[name]
        values = [row.get(name) for row in rows]
        if type_.kind in ("text", "string"):
            values = [v if v is None or isinstance(v, str) else _as_text(v, type_) for v in values]
        bent = type_.kind in _BENT and any(map(_BENT[type_.kind], values))
        if bent or (type_.nested and any(find_mismatch(value, type_, name, undeclared) for value in values)):
            return None
        try:
            return pa.array(values, type_.arrow())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            return None

    def _drop_mismatches(
        self, file: InputFile, lines: list[Line], rows: list[dict[str, Any]], errors: dict[int, RowError]
    ) -> None:
        """Make each row that keeps a batch from being built an error, and take the values out that do not fit: the
        others stay, the id above all."""
        for index, row in enumerate(rows):
            for name, type_ in self._types.items():
                if problem := self._misfit(name, type_, row):
                    errors.setdefault(index, _row_error(file, lines[index], problem))
                    row[name] = None

    def _misfit(self, name: str, type_: JsonType, row: dict[str, Any]) -> str | None:
        """Why a column cannot hold the value that the row has for it; None where it can."""
        value = _as_text(row.get(name), type_) if type_.kind == "string" else row.get(name)
        return find_mismatch(value, type_, name, KeyCounts()) or self._unstorable(name, row)

    def _unstorable(self, name: str, row: dict[str, Any]) -> str | None:
        """Values of the right type that Arrow cannot hold: lone surrogates."""
        if self._column(name, [row], KeyCounts()) is not None:
            return None
        return f"column {name}: the value holds text that is not Unicode (a lone surrogate)"

    def _note_undeclared(self, row: dict[str, Any]) -> None:
        if not row.keys() <= self._all_names:
            for name in row.keys() - self._all_names:
                self._undeclared.add(name)


def _as_text(value: Any, type_: JsonType) -> Any:
    """A value as JSON text. Strings stay as they are, and so do lists and objects where only strings are declared."""
    if value is None or isinstance(value, str) or (type_.kind == "string" and isinstance(value, dict | list)):
        return value
    return _json_text(value)


def _json_text(value: Any) -> str:
    """A value as JSON; one that holds half a surrogate pair is escaped, as Arrow's text cannot hold it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(value)


# Values that pa.array would take and change: 1.5 to 1 in a column of integers, true to 1.0 in one of doubles.
# (A string for a list becomes its letters: nested columns are looked through value by value.)
_BENT: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, float) and not value.is_integer(),
    "float": lambda value: isinstance(value, bool),
}


def sample_shapes(files: Sequence[InputFile], max_row_bytes: int) -> dict[str, Shape]:
    """The shapes of the columns in the first lines of every file, in the order of their first appearance."""
    shapes: dict[str, Shape] = {}
    max_lines, max_bytes = max(16, SAMPLE_LINES // len(files)), max(2**16, SAMPLE_BYTES // len(files))
    for file in files:
        with open_stream(file) as stream:
            for line in islice(filled_lines(stream, max_row_bytes), max_lines):
                _add_to_sample(shapes, line, max_row_bytes)
                if line.offset > max_bytes:
                    break
        if len(shapes) > MAX_COLUMNS:
            raise InputError(
                f"{file.path}: more than {MAX_COLUMNS} different keys in the first lines; is this one row?"
            )
    return shapes


def _add_to_sample(shapes: dict[str, Shape], line: Line, max_row_bytes: int) -> None:
    try:
        row = parse_line(line, max_row_bytes)
    except BadLine:
        return  # it becomes an error row when the rows are read
    for name, value in row.items():
        shapes.setdefault(name, Shape()).add(value)


def _in_groups(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Lines by the batch: bounded in number and in bytes."""
    group: list[Line] = []
    size = 0
    for line in lines:
        group.append(line)
        size += len(line.data or b"")
        if len(group) == MAX_BATCH_ROWS or size >= MAX_BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _row_error(file: InputFile, line: Line, problem: BadLine | str) -> RowError:
    return RowError("bad_input", f"{file.path}:{line.number}: {problem}")


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

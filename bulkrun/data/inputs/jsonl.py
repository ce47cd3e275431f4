"""JSON lines: every line but a blank one is exactly one row; a bad one is a row with an error that names it.

The schema is declared from a bounded sample of all files. DuckDB's and pyarrow's own readers lose bad lines or accept
them silently, so this one reads bytes, splits lines itself (`lines`) and parses them one by one (`json_line`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, MAX_BATCH_ROWS, InputBatch, Position, record_batch
from bulkrun.data.inputs.files import InputFile, open_stream
from bulkrun.data.inputs.json_line import BadLine, parse_line
from bulkrun.data.inputs.lines import Line, filled_lines
from bulkrun.data.types.json_types import TEXT, JsonType, KeyCounts, Shape, find_mismatch, is_unicode, json_type
from bulkrun.data.types.known_types import KnownTypes
from bulkrun.errors import InputError
from bulkrun.request import RowError

SAMPLE_LINES = 20_000  # over all files together, as is the next
SAMPLE_BYTES = 64 * 2**20
MAX_COLUMNS = 4096

ChooseColumns = Callable[[Mapping[str, Shape]], Sequence[str]]  # of all columns, by what the sample showed of each
NeededKeys = Mapping[str, Sequence[str]]  # of a column


class JsonlSource:
    """Rows of JSON lines files with the columns `types`."""

    num_rows: int | None = None

    def __init__(
        self,
        files: Sequence[InputFile],
        types: dict[str, JsonType],
        max_row_bytes: int,
        own_columns: Sequence[Collection[str]],
    ) -> None:
        self._files = files
        self._own_columns = own_columns
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
        shapes, own_columns = sample_shapes(files, max_row_bytes)
        declared = {name: json_type(type_) for name, type_ in (known or {}).items() if name in shapes}
        types = {name: shape.resolve(declared.get(name)) for name, shape in shapes.items()}
        types |= {name: types[name].needing(keys) for name, keys in (needed or {}).items() if name in types}
        as_text = kept_as_text(shapes) if kept_as_text else ()
        return cls(files, types | dict.fromkeys(as_text, TEXT), max_row_bytes, own_columns)

    @property
    def undeclared_columns(self) -> dict[str, int]:
        return dict(self._undeclared.counts)

    def own_columns(self, file: int) -> Collection[str]:
        return self._own_columns[file]

    def select(self, columns: Sequence[str]) -> JsonlSource:
        types = {name: self._types[name] for name in columns}
        chosen = JsonlSource(self._files, types, self._max_row_bytes, self._own_columns)
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
        inside = KeyCounts()
        arrays = [self._column(name, rows, inside) for name in self._types]
        if any(array is None for array in arrays):
            self._drop_mismatches(file, lines, rows, errors)
            inside = KeyCounts()  # else what came before the first mismatch would count twice, and the rest not
            arrays = [self._column(name, rows, inside) for name in self._types]
        self._undeclared.include(inside)
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
        """Make each row that keeps a batch from being built an error, and take the values out that do not fit.

        The others stay, the id above all.
        """
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


def sample_shapes(files: Sequence[InputFile], max_row_bytes: int) -> tuple[dict[str, Shape], Sequence[Collection[str]]]:
    """The shapes of the columns in the first lines of every file, in the order of their first appearance.

    And the names of each file's own columns there.
    """
    shapes: dict[str, Shape] = {}
    own_columns: list[frozenset[str]] = []
    same: dict[frozenset[str], frozenset[str]] = {}  # as most of many files have
    max_lines, max_bytes = max(16, SAMPLE_LINES // len(files)), max(2**16, SAMPLE_BYTES // len(files))
    for file in files:
        names: set[str] = set()
        for line in _first_lines(file, max_row_bytes, max_lines, max_bytes):
            names.update(_add_to_sample(shapes, line, max_row_bytes))
        own_columns.append(same.setdefault(frozenset(names), frozenset(names)))
        if len(shapes) > MAX_COLUMNS:
            raise InputError(
                f"{file.path}: more than {MAX_COLUMNS} different keys in the first lines; is this one row?"
            )
    return shapes, own_columns


def _first_lines(file: InputFile, max_row_bytes: int, max_lines: int, max_bytes: int) -> Iterator[Line]:
    """At most so many, up to the first that begins beyond `max_bytes`."""
    with open_stream(file) as stream:
        for line in islice(filled_lines(stream, max_row_bytes), max_lines):
            yield line
            if line.offset > max_bytes:
                return


def _add_to_sample(shapes: dict[str, Shape], line: Line, max_row_bytes: int) -> Collection[str]:
    """Returns the columns that the line has."""
    try:
        row = parse_line(line, max_row_bytes)
    except BadLine:
        return ()  # it becomes an error row when the rows are read
    for name, value in row.items():
        shapes.setdefault(name, Shape()).add(value)
    return row.keys()


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

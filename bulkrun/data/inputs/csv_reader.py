"""CSV with a header row: every record is exactly one row, every column is text. Blank lines between records are none.

CSV has no types, so guessing them would make a row's value depend on other rows: cast in `input.sql` where it matters.
Commas separate the fields, in .tsv tabs, or what the job says; a field in double quotes may hold them, and newlines. A
record with too few or too many fields, bad quotes, a NUL or invalid UTF-8 becomes a row with an error that names the
line on which the record starts.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Collection, Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, MAX_BATCH_ROWS, InputBatch, Position, record_batch
from bulkrun.data.inputs.files import InputFile, has_tabs, open_stream
from bulkrun.data.inputs.lines import Line, is_blank, read_lines
from bulkrun.errors import InputError
from bulkrun.request import RowError

Record = list[str] | RowError
_OTHERS = ";\t|,"  # separators that a file may have instead of its own
_MEANINGS = {  # of what Python's reader says
    "unexpected end of data": "a quote that is never closed",
    "new-line character": r"not valid CSV: its lines end in \r alone; write \n or \r\n",
}


class CsvSource:
    """Rows of CSV files; `columns` is the union of the headers, a column that a file lacks is null there.

    `delimiter` None: as each file's name says.
    """

    num_rows: int | None = None

    def __init__(
        self,
        files: Sequence[InputFile],
        headers: list[list[str]],
        columns: list[str],
        max_row_bytes: int,
        delimiter: str | None = None,
    ) -> None:
        self._files = files
        self._delimiter = delimiter
        self._headers = headers
        self._max_row_bytes = max_row_bytes
        self.undeclared_columns: dict[str, int] = {}
        self.schema = pa.schema([(name, pa.string()) for name in columns])

    @classmethod
    def open(cls, files: Sequence[InputFile], max_row_bytes: int, delimiter: str | None = None) -> CsvSource:
        """Read the headers. Raises InputError for a file without a usable one."""
        headers = [_read_header(file, max_row_bytes, delimiter) for file in files]
        columns = list(dict.fromkeys(name for header in headers for name in header))
        return cls(files, headers, columns, max_row_bytes, delimiter)

    def own_columns(self, file: int) -> Collection[str]:
        return self._headers[file]

    def select(self, columns: Sequence[str]) -> CsvSource:
        return CsvSource(self._files, self._headers, list(columns), self._max_row_bytes, self._delimiter)

    def batches(self, start: Position) -> Iterator[InputBatch]:
        file, row = self._files[start.file], start.row
        width = len(self._headers[start.file])
        with open_stream(file) as stream:
            records = _Records(file, stream, self._max_row_bytes, self._delimiter)
            for _ in range(start.row + 1):  # the header is a record too
                next(records, None)
            while group := _next_group(records, width):
                yield self._batch(Position(start.file, row), group)
                row += len(group)

    def _batch(self, position: Position, records: list[Record]) -> InputBatch:
        header = self._headers[position.file]
        errors = {i: record for i, record in enumerate(records) if isinstance(record, RowError)}
        blank: list[str | None] = [None] * len(header)
        filled = [blank if isinstance(record, RowError) else record for record in records]
        values = dict(zip(header, zip(*filled, strict=True), strict=True))
        absent = [None] * len(records)
        arrays = [pa.array(values.get(name, absent), pa.string()) for name in self.schema.names]
        return InputBatch(position, record_batch(arrays, self.schema, len(records)), errors)


def _next_group(records: _Records, width: int) -> list[Record]:
    """The next batch of records, each of `width` fields or an error; empty at the end."""
    group: list[Record] = []
    end = records.bytes_read + MAX_BATCH_BYTES
    while len(group) < MAX_BATCH_ROWS and records.bytes_read < end and (record := next(records, None)) is not None:
        if not isinstance(record, RowError) and len(record) != width:
            record = records.error(f"{len(record)} fields where the header has {width}")
        group.append(record)
    return group


class _TooLong(Exception):
    """The record being read is longer than allowed."""


class _Records:
    """The records of a CSV stream, the header included; a bad one is a RowError."""

    def __init__(self, file: InputFile, stream: BinaryIO, max_row_bytes: int, delimiter: str | None) -> None:
        self._file = file
        delimiter = delimiter or ("\t" if has_tabs(file) else ",")
        self._lines = _Lines(stream, max_row_bytes, delimiter)
        csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))  # the module's own is 128 KiB
        self._reader = csv.reader(self._lines, strict=True, delimiter=delimiter)

    @property
    def bytes_read(self) -> int:
        return self._lines.bytes_read

    def __iter__(self) -> _Records:
        return self

    def __next__(self) -> Record:
        self._lines.start_record()
        try:
            return self._checked(next(self._reader))
        except csv.Error as error:
            known = (what for said, what in _MEANINGS.items() if said in str(error))
            return self.error(next(known, f"not valid CSV: {error}"))
        except _TooLong:
            return self.error(f"longer than input.max_row_bytes {self._lines.max_bytes} (or a quote is never closed)")

    def error(self, what: str) -> RowError:
        """An error in the record that was read last."""
        first, last = self._lines.record_line, self._lines.line
        lines = f"lines {first} to {last}: " if last > first else ""
        return RowError("bad_input", f"{self._file.path}:{first}: {lines}{what}")

    def _checked(self, record: list[str]) -> Record:
        text = "".join(record)
        if "\0" in text:
            return self.error("text with a NUL character")
        try:
            text.encode()
        except UnicodeEncodeError:
            return self.error("invalid UTF-8")
        return record


class _Lines:
    """Decoded lines for the csv module, with the place of the record being read and a cap on its bytes.

    Bytes that are not UTF-8 come through as lone surrogates, so that the record they are in can be found.
    """

    def __init__(self, stream: BinaryIO, max_bytes: int, delimiter: str) -> None:
        self._lines = read_lines(stream, max_bytes)
        self._delimiter = delimiter.encode()
        self.max_bytes = max_bytes
        self.line = 0
        self.record_line = 1
        self.bytes_read = 0
        self._record_start = 0
        self._between = True

    def start_record(self) -> None:
        self._between = True
        self.record_line = self.line + 1
        self._record_start = self.bytes_read

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._next()
        while self._between and is_blank(line) and self._delimiter not in (line.data or b""):  # tabs are empty fields
            self.start_record()
            line = self._next()
        self._between = False
        if line.data is None or self.bytes_read - self._record_start > self.max_bytes + 1:
            raise _TooLong
        return line.data.decode("utf-8", errors="surrogateescape") + "\n"

    def _next(self) -> Line:
        line = next(self._lines)
        self.line = line.number
        self.bytes_read += len(line.data or b"") + 1
        return line


def _read_header(file: InputFile, max_row_bytes: int, delimiter: str | None) -> list[str]:
    with open_stream(file) as stream:
        header = next(_Records(file, stream, max_row_bytes, delimiter), None)
    if header is None:
        return []  # not one line, so not one row
    if isinstance(header, RowError):
        if _is_utf_16(file):
            raise InputError(f"{file.path}:1: the file is UTF-16, as some spreadsheets write it; save it as UTF-8")
        raise InputError(f"{header.message} (in the header, which names the columns)")
    if delimiter is None and len(header) == 1 and (other := next((c for c in _OTHERS if c in header[0]), None)):
        raise InputError(
            f"{file.path}:1: the header has one column, {header[0]!r}; if {other!r} separates its fields, set "
            f'input.delimiter: {json.dumps(other)}, and input.delimiter: "," if it does not'
        )
    for number, name in enumerate(header, start=1):
        if not name.strip():
            raise InputError(f"{file.path}:1: column {number} has no name; every column of the header needs one")
        if name in header[: number - 1]:
            raise InputError(f"{file.path}:1: two columns are named {name!r}; give each its own name")
    return header


def _is_utf_16(file: InputFile) -> bool:
    """Whether the file says so of itself: its text is NULs and carriage returns to who takes it for UTF-8."""
    with open_stream(file) as stream:
        return stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

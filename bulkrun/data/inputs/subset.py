"""Rows picked out of a larger input, kept in one file so that they can be run again as an input of their own.

An Arrow IPC file (any type that a reader declares fits in; nothing that ends in .parquet). Beside the input's columns
it holds the result row that each picked row answers, what its key is, and why it could not be read, where it could
not. Readers of the subset see the input's columns alone. Knows nothing of why rows were picked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, MAX_BATCH_ROWS, InputBatch, Position
from bulkrun.data.inputs.reader import Dataset
from bulkrun.data.storage.arrow_errors import read_errors
from bulkrun.data.storage.durable import new_file
from bulkrun.errors import InputError
from bulkrun.request import RowError

_NUM_ROWS = b"bulkrun.subset.rows"
_ROW, _KEY, _KEEP_SUCCESS = "bulkrun.row", "bulkrun.row_key", "bulkrun.keep_success"
_CODE, _MESSAGE = "bulkrun.error_code", "bulkrun.error_message"
_HIDDEN = pa.schema(
    [
        pa.field(_ROW, pa.int64()),
        pa.field(_KEY, pa.string()),
        pa.field(_KEEP_SUCCESS, pa.bool_()),
        pa.field(_CODE, pa.string()),
        pa.field(_MESSAGE, pa.string()),
    ]
)
# What says which rows of an input to take, ordered by `position` (the row's place in the input, from 0).
PICK_SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64()),
        pa.field("row", pa.int64()),  # the result row that it answers
        pa.field("row_key", pa.string()),
        pa.field("keep_success", pa.bool_()),  # an old success is not replaced by a new error
    ]
)


class Targets(NamedTuple):
    """Where the rows of a subset go, one entry per row in order: result row, its key, and whether a success stays."""

    rows: pa.ChunkedArray  # int64
    keys: pa.ChunkedArray  # string
    keep_success: pa.ChunkedArray  # bool


class SubsetSource:
    """A `Source` over a subset file. Batches carry the rows' numbers in the results they answer."""

    undeclared_columns: dict[str, int]

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        self._path = path
        self.undeclared_columns = {}
        with _opened(path) as file, pa.ipc.open_file(file) as reader:
            declared = [field for field in reader.schema if field.name not in _HIDDEN.names]
            self.num_rows: int | None = int(reader.schema.metadata[_NUM_ROWS])
        whole = pa.schema(declared)
        self.schema = whole if columns is None else pa.schema([whole.field(name) for name in columns])

    def select(self, columns: Sequence[str]) -> SubsetSource:
        return SubsetSource(self._path, columns)

    def batches(self, start: Position) -> Iterator[InputBatch]:
        with _opened(self._path) as file, pa.ipc.open_file(file) as reader:
            row = 0
            for number in range(reader.num_record_batches):
                stored = reader.get_batch(number)
                unread = max(0, start.row - row)
                if unread < stored.num_rows:
                    yield self._batch(Position(0, row + unread), stored.slice(unread))
                row += stored.num_rows

    def _batch(self, position: Position, stored: pa.RecordBatch) -> InputBatch:
        codes, messages = (stored.column(name).to_pylist() for name in (_CODE, _MESSAGE))
        pairs = enumerate(zip(codes, messages, strict=True))
        errors = {index: RowError(code, message) for index, (code, message) in pairs if code is not None}
        return InputBatch(position, stored.select(self.schema.names), errors, stored.column(_ROW))


def open_subset(path: Path) -> Dataset:
    """The rows of a subset file as an input."""
    return Dataset([], SubsetSource(path), 1)


@contextmanager
def _opened(path: Path) -> Iterator[pa.NativeFile]:
    """Not mapped: a disk that fails while a map of it is read kills the process."""
    with read_errors(path), pa.OSFile(str(path)) as file:
        yield file


def read_targets(path: Path) -> Targets:
    """Where the rows go: about 50 bytes of memory a row."""
    with _opened(path) as file:
        names = pa.ipc.open_file(file).schema.names
        wanted = [names.index(name) for name in (_ROW, _KEY, _KEEP_SUCCESS)]
        options = pa.ipc.IpcReadOptions(included_fields=wanted)
        table = pa.ipc.open_file(file, options=options).read_all()
    return Targets(*(table[name] for name in (_ROW, _KEY, _KEEP_SUCCESS)))


def write_subset(
    path: Path, schema: pa.Schema, batches: Iterable[InputBatch], picks: Iterable[pa.RecordBatch], num_rows: int
) -> None:
    """Write the picked rows of an input to the new file `path` and fsync it.

    `batches` is the whole input in order, of `schema`; `picks` (of `PICK_SCHEMA`, ordered by position) says which
    `num_rows` rows of it to take. Raises OSError or RunError, and InputError where the input has fewer rows than when
    they were picked; its own errors pass through.
    """
    stored = pa.schema([*schema, *_HIDDEN], metadata={_NUM_ROWS: json.dumps(num_rows).encode()})
    options = pa.ipc.IpcWriteOptions(compression="zstd", unify_dictionaries=True)
    written = 0
    with new_file(path) as sink, pa.ipc.new_file(sink, stored, options=options) as writer:
        for table in _gathered(_picked(batches, picks, stored)):
            writer.write_table(table, max_chunksize=MAX_BATCH_ROWS)
            written += table.num_rows
    if written != num_rows:
        raise InputError(
            f"input.path: changed while it was read: of {num_rows} rows to run only {written} are still there; run the "
            "same command again when the input is whole"
        )


def _picked(
    batches: Iterable[InputBatch], picks: Iterable[pa.RecordBatch], stored: pa.Schema
) -> Iterator[pa.RecordBatch]:
    cursor, end = _Cursor(picks), 0
    for batch in batches:
        begin, end = end, end + batch.rows.num_rows
        for pick in cursor.below(end):
            yield _stored(batch, pick, begin, stored)
        if cursor.done:
            return


def _stored(batch: InputBatch, pick: pa.RecordBatch, begin: int, stored: pa.Schema) -> pa.RecordBatch:
    indexes = [position - begin for position in pick.column("position").to_pylist()]
    rows = batch.rows.take(pa.array(indexes, pa.int64()))
    errors = [batch.errors.get(index) for index in indexes]
    hidden = [
        pick.column("row"),
        pick.column("row_key"),
        pick.column("keep_success"),
        pa.array([error.code if error else None for error in errors], pa.string()),
        pa.array([error.message if error else None for error in errors], pa.string()),
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *hidden], schema=stored)


class _Cursor:
    """Goes forward through the picks."""

    def __init__(self, picks: Iterable[pa.RecordBatch]) -> None:
        self._picks = (pick for pick in picks if pick.num_rows)
        self._next = next(self._picks, None)

    @property
    def done(self) -> bool:
        return self._next is None

    def below(self, end: int) -> Iterator[pa.RecordBatch]:
        """The picks at positions before `end` that were not taken yet."""
        while self._next is not None and self._next.column("position")[0].as_py() < end:
            pick = self._next
            positions = pick.column("position").to_numpy()
            count = int(positions.searchsorted(end))
            yield pick.slice(0, count)
            self._next = pick.slice(count) if count < pick.num_rows else next(self._picks, None)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Few large tables instead of many small batches (one picked row in a thousand is usual)."""
    waiting: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        waiting.append(batch)
        rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
        if rows >= MAX_BATCH_ROWS or nbytes >= MAX_BATCH_BYTES:
            yield pa.Table.from_batches(waiting).combine_chunks()
            waiting, rows, nbytes = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()

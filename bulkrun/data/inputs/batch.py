"""What every reader yields: a bounded record batch with an address, and the rows in it that could not be read.

Knows no file format. A batch never spans two files, so an address is always (file number, row in that file).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from bulkrun.request import RowError

MAX_BATCH_ROWS = 1024
MAX_BATCH_BYTES = 8 * 2**20  # a target, not a limit: one row may be bigger


class Position(NamedTuple):
    """The address of a row: the number of its file in `Dataset.files` and its number in that file, both from 0."""

    file: int
    row: int


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Consecutive rows of one file.

    `rows` has the declared schema of the dataset; `errors` maps an index in the batch to why that row could not be
    read, and such a row is null in the columns that could not. `numbers` (int64) are the rows' numbers in a larger
    input that they were picked from; None where the rows are the whole input.
    """

    position: Position
    rows: pa.RecordBatch
    errors: dict[int, RowError] = field(default_factory=dict)
    numbers: pa.Array | None = None

    @property
    def next(self) -> Position:
        """Where reading goes on after this batch."""
        return Position(self.position.file, self.position.row + self.rows.num_rows)

    def head(self, rows: int) -> InputBatch:
        """The first `rows` rows of the batch."""
        return self.slice(0, rows)

    def slice(self, start: int, rows: int | None = None) -> InputBatch:
        """At most `rows` rows of the batch from `start` on; without, all of them."""
        position = Position(self.position.file, self.position.row + start)
        taken = self.rows.slice(start, rows)
        end = start + taken.num_rows
        errors = {index - start: error for index, error in self.errors.items() if start <= index < end}
        numbers = None if self.numbers is None else self.numbers.slice(start, rows)
        return InputBatch(position, taken, errors, numbers)


class Source(Protocol):
    """A reader of files of one format. The schema is declared before the first row is read."""

    @property
    def schema(self) -> pa.Schema:
        """The declared columns; every batch has exactly these."""

    @property
    def num_rows(self) -> int | None:
        """Rows in all files where the format tells without reading them, else None."""

    @property
    def undeclared_columns(self) -> dict[str, int]:
        """Columns met so far that the declared schema does not have -> rows that had them."""

    def batches(self, start: Position) -> Iterator[InputBatch]:
        """The rows of file `start.file` from row `start.row` on. Raises InputError where the file is broken."""

    def select(self, columns: Sequence[str]) -> Source:
        """A source of these rows with only these columns, in this order (names must exist)."""


class FileSource(Source, Protocol):
    """A source that reads the files themselves."""

    def own_columns(self, file: int) -> Collection[str]:
        """The columns that file number `file` has; of JSON lines those that the sample shows."""


def record_batch(arrays: Sequence[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    """A record batch that knows its number of rows even when it has no columns."""
    if arrays:
        return pa.RecordBatch.from_arrays(list(arrays), schema=schema)
    return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))


def blank_rows(rows: pa.RecordBatch, bad: Sequence[int]) -> pa.RecordBatch:
    """`rows` with the rows at the indices `bad` null in every column."""
    unreadable = set(bad)
    keep = pa.array([None if row in unreadable else row for row in range(rows.num_rows)], pa.int64())
    return record_batch([column.take(keep) for column in rows.columns], rows.schema, rows.num_rows)


def joined(batches: Iterable[InputBatch]) -> Iterator[InputBatch]:
    """Consecutive small batches of one file as batches of the usual size; without `numbers`."""
    waiting: list[InputBatch] = []
    rows = nbytes = 0
    for batch in batches:
        rows += batch.rows.num_rows
        nbytes += batch.rows.nbytes
        if waiting and (rows > MAX_BATCH_ROWS or nbytes > MAX_BATCH_BYTES):
            yield _as_one(waiting)
            waiting, rows, nbytes = [], batch.rows.num_rows, batch.rows.nbytes
        waiting.append(batch)
    if waiting:
        yield _as_one(waiting)


def _as_one(batches: list[InputBatch]) -> InputBatch:
    errors: dict[int, RowError] = {}
    rows = 0
    for batch in batches:
        errors |= {rows + index: error for index, error in batch.errors.items()}
        rows += batch.rows.num_rows
    return InputBatch(batches[0].position, pa.concat_batches([batch.rows for batch in batches]), errors)

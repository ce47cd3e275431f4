"""The rows of many tables in input order (column `row`, then `sample`) in bounded memory.

What fits in memory is sorted there. More is dealt by row number into temporary files, which are then put in order one
by one in the same way. The payload is written and read once a level (up to 64 times 64 MiB, 64 times that...) and is
never compared. Knows no files but its own, which have no names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

HELD_BYTES = 64 * 2**20  # of rows in memory
NUM_PILES = 64
SLICE_ROWS = 1024  # of what is yielded: callers make Python objects of it


def in_row_order(tables: Iterator[pa.Table], rows: range, folder: Path | None = None) -> Iterator[pa.Table]:
    """All rows of `tables`, sorted, in tables of at most SLICE_ROWS rows.

    `rows` is a range that all row numbers are in. Temporary files go to `folder` (None: the system's place for them).
    Raises OSError where they cannot be written.
    """
    held, nbytes = list[pa.Table](), 0
    for table in tables:
        held.append(table)
        nbytes += table.nbytes
        if nbytes > HELD_BYTES and len(rows) > 1:
            return (yield from _by_piles(chain(held, tables), rows, folder))
    if held:
        whole = pa.concat_tables(held).sort_by([("row", "ascending"), ("sample", "ascending")])
        for start in range(0, whole.num_rows, SLICE_ROWS):
            yield whole.slice(start, SLICE_ROWS)


def _by_piles(tables: Iterator[pa.Table], rows: range, folder: Path | None) -> Iterator[pa.Table]:
    width = -(-len(rows) // NUM_PILES)
    piles = [_Pile(rows[start : start + width], folder) for start in range(0, len(rows), width)]
    try:
        for table in tables:
            pile_of_row = (table["row"].to_numpy() - rows.start) // width
            for number in np.unique(pile_of_row):
                piles[number].add(table.take(pa.array(np.flatnonzero(pile_of_row == number))))
        for pile in piles:
            yield from in_row_order(pile.read(), pile.rows, folder)
            pile.close()
    finally:
        for pile in piles:
            pile.close()


class _Pile:
    """The rows of one range of row numbers, growing in a temporary file."""

    def __init__(self, rows: range, folder: Path | None) -> None:
        self.rows = rows
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by close)
        self._writer: pa.RecordBatchWriter | None = None

    def add(self, table: pa.Table) -> None:
        if self._writer is None:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(self._file, table.schema, options=options)
        self._writer.write_table(table)

    def read(self) -> Iterator[pa.Table]:
        """What was added, a batch at a time."""
        if self._writer is None:
            return
        self._writer.close()
        self._file.seek(0)
        with pa.ipc.open_stream(self._file) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])

    def close(self) -> None:
        """Let go of the file; may be repeated."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._file.close()

"""The rows of many tables in input order (column `row`, then `sample`) in bounded memory.

What fits in memory is sorted there. More is dealt by row number into temporary files, which are then put in order one
by one in the same way. The payload is written and read once a level (up to 64 times 64 MiB, 64 times that...) and is
never compared. Knows no files but its own, which have no names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from bulkrun.data.tables.temporary_rows import TemporaryRows

HELD_BYTES = 64 * 2**20  # of rows in memory
NUM_PILES = 64
# Of what is yielded: callers make Python objects of it, which take some ten times its bytes where they are numbers.
SLICE_ROWS = 1024
SLICE_BYTES = 4 * 2**20  # a target, not a limit: rows are about alike, and one may be bigger


def in_row_order(tables: Iterator[pa.Table], rows: range, folder: Path | None = None) -> Iterator[pa.Table]:
    """All rows of `tables`, sorted, in tables of at most SLICE_ROWS rows and about SLICE_BYTES.

    `rows` is a range that all row numbers are in. Temporary files go to `folder` (None: the system's place for them).
    Raises OSError where they cannot be written.
    """
    held, nbytes = list[pa.Table](), 0
    for table in tables:
        held.append(table)
        nbytes += table.nbytes
        if nbytes > HELD_BYTES and len(rows) > 1:
            return (yield from _by_piles(chain(held, tables), held[0].schema, rows, folder))
    if held:
        whole = pa.concat_tables(held).sort_by([("row", "ascending"), ("sample", "ascending")])
        at_once = max(1, min(SLICE_ROWS, SLICE_BYTES * whole.num_rows // max(1, whole.nbytes)))
        for start in range(0, whole.num_rows, at_once):
            yield whole.slice(start, at_once)


def _by_piles(tables: Iterator[pa.Table], schema: pa.Schema, rows: range, folder: Path | None) -> Iterator[pa.Table]:
    width = -(-len(rows) // NUM_PILES)
    ranges = [rows[start : start + width] for start in range(0, len(rows), width)]
    piles = [TemporaryRows(folder, schema, compression="lz4") for _ in ranges]
    try:
        for table in tables:
            pile_of_row = (table["row"].to_numpy() - rows.start) // width
            for number in np.unique(pile_of_row):
                piles[number].add(table.take(pa.array(np.flatnonzero(pile_of_row == number))))
        for pile, its_rows in zip(piles, ranges, strict=True):
            yield from in_row_order((pa.Table.from_batches([batch]) for batch in pile.batches()), its_rows, folder)
            pile.close()
    finally:
        for pile in piles:
            pile.close()

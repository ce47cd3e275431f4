"""The window's rows on disk while it is ordered: written once in input order, then dealt out to the shards.

Rows lie in unnamed temporary files, so that nothing is left behind whatever happens to the process. Memory holds one
chunk and one shard; open files are bounded, with another pass over the spool when there are more shards. Knows the
shard columns; knows nothing of order or cost beyond "this row goes to that shard".
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import pyarrow as pa

from bulkrun.data.storage.durable import disk_errors
from bulkrun.data.tables.row_groups import RowBuffer
from bulkrun.data.tables.temporary_rows import TemporaryRows
from bulkrun.job.plan.index import I64

MAX_OPEN_SHARDS = 256
CHUNK_ROWS = 16 * 1024
CHUNK_BYTES = 64 * 2**20


class Spool:
    """Rows of one window. Use as a context manager; `folder` is where the temporary files are."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._chunk = RowBuffer(self._write, CHUNK_ROWS, CHUNK_BYTES)
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with self._writing():
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
            self._writer = pa.ipc.new_file(self._file, schema, options=options)

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing writes what is buffered: on a full disk it fails again, and must not hide what came of the first time.
        with suppress(OSError):
            self._writer.close()
        with suppress(OSError):
            self._file.close()

    def _writing(self) -> AbstractContextManager[None]:
        return disk_errors("writing the rows to plan", self._folder)

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows, in input order, with the columns of `schema`."""
        self._chunk.add(rows)

    def shards(self, shard_of_row: I64, num_shards: int) -> Iterator[tuple[int, pa.Table]]:
        """Each shard's number (from 0) and its rows in input order; `shard_of_row` is per row of the window."""
        self._chunk.flush()
        with self._writing():
            self._writer.close()
            self._file.flush()
        for start in range(0, num_shards, MAX_OPEN_SHARDS):
            yield from self._deal(shard_of_row, start, min(start + MAX_OPEN_SHARDS, num_shards))

    def _write(self, chunk: pa.Table) -> None:
        with self._writing():
            self._writer.write_table(chunk.combine_chunks())

    def _deal(self, shard_of_row: I64, start: int, stop: int) -> Iterator[tuple[int, pa.Table]]:
        """One pass over the spool for the shards from `start` to `stop`."""
        piles = list[TemporaryRows]()
        try:
            with self._writing():
                piles += [TemporaryRows(self._folder, self._schema) for _ in range(start, stop)]
            for rows, shard, batch in self._rows_by_shard(shard_of_row, start, stop):
                with self._writing():
                    piles[shard - start].add(batch.slice(rows.start, len(rows)))
            for shard, pile in enumerate(piles, start):
                with self._writing():
                    table = pa.Table.from_batches(pile.batches(), self._schema).combine_chunks()
                yield shard, table
        finally:
            for pile in piles:
                pile.close()

    def _rows_by_shard(self, shard_of_row: I64, start: int, stop: int) -> Iterator[tuple[range, int, pa.RecordBatch]]:
        """Runs of rows of one shard: where they lie in a batch that was sorted by shard (stable: input order)."""
        self._file.seek(0)
        reader, row = pa.ipc.open_file(self._file), 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            shards = shard_of_row[row : row + batch.num_rows]
            row += batch.num_rows
            by_shard = np.argsort(shards, kind="stable")
            by_shard = by_shard[(shards[by_shard] >= start) & (shards[by_shard] < stop)]
            picked, sorted_shards = batch.take(pa.array(by_shard)), shards[by_shard]
            borders = np.flatnonzero(np.diff(sorted_shards, prepend=-1, append=-1))
            for first, last in pairwise(borders):
                yield range(int(first), int(last)), int(sorted_shards[first]), picked

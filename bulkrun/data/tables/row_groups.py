"""Small batches into large ones: rows wait until they are worth a write, in as much memory as one write takes.

Knows neither what the rows are nor where the file lies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

GROUP_BYTES = 64 * 2**20


class RowBuffer:
    """Rows that wait until there are `max_rows` or `max_bytes` of them; then `write` gets them as one table."""

    def __init__(self, write: Callable[[pa.Table], None], max_rows: int, max_bytes: int) -> None:
        self._write, self._max_rows, self._max_bytes = write, max_rows, max_bytes
        self._waiting: list[pa.Table | pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        """These rows come next; all have one schema."""
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes  # measured once: looking at all that wait each time is quadratic
        if self._rows >= self._max_rows or self._bytes >= self._max_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._write(pa.concat_tables(map(_as_table, self._waiting)))
            self._waiting, self._rows, self._bytes = [], 0, 0


def _as_table(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows


class RowGroupWriter:
    """A Parquet file (zstd, page checksums) in row groups of about `group_rows`, fewer where rows are large.

    Memory holds one row group. Leaving it as a context manager closes it, an error also without what waits. Leaves a
    stream that it was given open.
    """

    def __init__(self, target: Path | IO[bytes], schema: pa.Schema, group_rows: int) -> None:
        self._writer = pq.ParquetWriter(target, schema, compression="zstd", write_page_checksum=True)
        self._buffer = RowBuffer(self._writer.write_table, group_rows, GROUP_BYTES)

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """These rows come next, whatever number they are."""
        self._buffer.add(rows)

    def close(self) -> None:
        """Write what waits, and the footer."""
        self._buffer.flush()
        self._writer.close()

    def __enter__(self) -> RowGroupWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close() if error is None else self._writer.close()
        except (OSError, pa.ArrowException):
            self._writer.is_open = False  # else it tries again when it is collected, where nobody can catch that
            with suppress(OSError):
                self._writer.close()  # the file alone: while it is open NFS does not remove it, nor its folder
            if error is None:
                raise

"""Rows on disk for a while: they grow in a file without a name, which nothing can leave behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pyarrow as pa


class TemporaryRows:
    """Rows of `schema`, added and then read once, in `folder` (None: the system's place for temporary files).

    `compression` is a codec of Arrow's IPC. `add` and `batches` raise OSError where the disk fails.
    """

    def __init__(self, folder: Path | None, schema: pa.Schema, compression: str | None = None) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by close)
        options = pa.ipc.IpcWriteOptions(compression=compression)
        self._writer = pa.ipc.new_stream(self._file, schema, options=options)

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows of the schema."""
        self._writer.write(rows)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows in the order in which they were added; nothing can be added afterwards."""
        self._writer.close()
        self._file.seek(0)
        with pa.ipc.open_stream(self._file) as reader:
            yield from reader

    def close(self) -> None:
        """Drop the rows, read or not; may be repeated. An error here (full disk) must not hide the first one."""
        if self._file.closed:
            return
        with suppress(OSError):
            self._writer.close()
        with suppress(OSError):
            self._file.close()

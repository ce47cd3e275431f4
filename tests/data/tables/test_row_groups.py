"""Small batches become large row groups, bounded in rows and in bytes, in their order."""

from __future__ import annotations

import errno
import gc
import io
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.tables import row_groups
from bulkrun.data.tables.row_groups import RowBuffer, RowGroupWriter
from tests.full_disk import file_size_limit

TABLE = pa.table({"row": list(range(100)), "text": [str(row) * 50 for row in range(100)]})


@pytest.mark.parametrize("as_table", [True, False])
def test_small_batches_are_one_file_of_larger_groups_with_page_checksums(tmp_path: Path, as_table: bool) -> None:
    stream = io.BytesIO()
    with RowGroupWriter(stream, TABLE.schema, 40) as writer:
        for start in range(0, 100, 7):
            rows = TABLE.slice(start, 7)
            writer.write(rows if as_table else rows.to_batches()[0])
    path = tmp_path / "x.parquet"
    path.write_bytes(stream.getvalue())
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [42, 42, 16]
        assert file.read().equals(TABLE)
    assert duckdb.execute(f"SELECT count(*), max(row) FROM '{path}'").fetchall() == [(100, 99)]


def test_large_rows_make_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "GROUP_BYTES", TABLE.nbytes // 2)
    stream = io.BytesIO()
    writer = RowGroupWriter(stream, TABLE.schema, 10**6)
    for row in range(100):
        writer.write(TABLE.slice(row, 1))
    writer.close()
    assert 2 <= pq.ParquetFile(stream).num_row_groups <= 4


def test_an_error_adds_nothing_of_what_waits_and_closes_the_file() -> None:
    stream = io.BytesIO()
    with pytest.raises(ZeroDivisionError), RowGroupWriter(stream, TABLE.schema, 10**6) as writer:
        writer.write(TABLE)
        raise ZeroDivisionError
    assert pq.read_table(stream).num_rows == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # what a finalizer could not say
def test_an_error_stays_the_first_where_the_file_cannot_be_closed_either() -> None:
    class FullDisk(io.BytesIO):
        full = False

        def write(self, data: Any, /) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "full")
            return super().write(data)

    stream = FullDisk()
    with pytest.raises(ZeroDivisionError), RowGroupWriter(stream, TABLE.schema, 1) as writer:
        stream.full = True
        raise ZeroDivisionError
    del writer
    gc.collect()


def test_a_batch_is_measured_once_however_many_wait() -> None:
    """Measuring all of them for each made thousands of single rows take minutes."""

    class Measured:
        num_rows, looks = 1, 0

        @property
        def nbytes(self) -> int:
            self.looks += 1
            return 100

    rows = Measured()
    buffer = RowBuffer(pytest.fail, 10**6, 10**6)
    for _ in range(50):
        buffer.add(rows)  # type: ignore[arg-type]
    assert rows.looks == 50


@pytest.mark.parametrize("group_rows", [1, 10**6])
def test_a_file_on_a_full_disk_is_closed_at_once(group_rows: int, tmp_path: Path) -> None:
    """Whoever removes its folder next would have to wait for that, on NFS for ever."""
    path = tmp_path / "full"
    with file_size_limit(1400), pytest.raises(OSError, match="too large"):  # noqa: SIM117
        with RowGroupWriter(path, TABLE.schema, group_rows) as writer:
            writer.write(TABLE)
    still_open = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    assert str(path) not in [str(link.readlink()) for link in still_open]

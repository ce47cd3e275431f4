from __future__ import annotations

import errno
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bulkrun.errors import RunError
from bulkrun.job.plan import spool as spool_module
from bulkrun.job.plan.spool import Spool
from tests.full_disk import file_size_limit

SCHEMA = pa.schema({"row": pa.int64(), "payload": pa.struct([("text", pa.string()), ("tags", pa.list_(pa.int8()))])})


def batch(rows: range) -> pa.RecordBatch:
    payload = [{"text": "x" * (row % 5) if row % 3 else None, "tags": list(range(row % 4))} for row in rows]
    return pa.RecordBatch.from_arrays([pa.array(rows), pa.array(payload, SCHEMA.field("payload").type)], schema=SCHEMA)


@pytest.mark.parametrize("open_shards", [1, 3, 256])
def test_each_shard_gets_its_rows_in_input_order_in_as_many_passes_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_shards: int
) -> None:
    monkeypatch.setattr(spool_module, "MAX_OPEN_SHARDS", open_shards)
    monkeypatch.setattr(spool_module, "CHUNK_ROWS", 50)
    whole, shard_of_row = batch(range(333)).to_pylist(), np.random.default_rng(1).integers(0, 7, 333)
    with Spool(tmp_path, SCHEMA) as spool:
        for start in range(0, 333, 31):
            spool.append(batch(range(start, min(start + 31, 333))))
        shards = {shard: table.to_pylist() for shard, table in spool.shards(shard_of_row, 7)}
    assert list(shards) == list(range(7))
    assert all(rows == [row for row in whole if shard_of_row[row["row"]] == shard] for shard, rows in shards.items())


def test_nothing_lies_in_the_folder_even_while_it_is_used(tmp_path: Path) -> None:
    with Spool(tmp_path, SCHEMA) as spool:
        spool.append(batch(range(10)))
        for _ in spool.shards(np.zeros(10, np.int64), 1):
            assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_run_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write_table(self, table: pa.Table) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    with Spool(tmp_path, SCHEMA) as spool:
        monkeypatch.setattr(spool, "_writer", Full())
        spool.append(batch(range(10)))
        with pytest.raises(RunError, match="free some space"):
            next(spool.shards(np.zeros(10, np.int64), 1))


def test_a_disk_that_fills_while_rows_are_buffered_is_said_once_and_well(tmp_path: Path) -> None:
    """Every file is limited, so a close fails as the write before it did."""
    text = "".join(random.Random(1).choices("abcdefgh", k=50_000))
    rows = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([{"text": text}], SCHEMA.field(1).type)], schema=SCHEMA)
    for limit in range(0, 80_000, 2000):
        with (
            file_size_limit(limit),
            pytest.raises(RunError, match=r"to plan failed|fitted"),
            Spool(tmp_path, SCHEMA) as s,
        ):
            s.append(rows)
            next(s.shards(np.zeros(1, np.int64), 1))
            raise RunError("it fitted")

"""The file of a planned shard: what it holds, and that no flipped bit of it becomes a prompt."""

from __future__ import annotations

import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from bulkrun.errors import RunError
from bulkrun.job.plan.shard_file import read_refused, read_row_ids, read_shard, read_shard_info
from bulkrun.job.store.run_dir import RunDir
from tests.job.small_runs import enter, job, make_rows, write_shard

ROWS = make_rows(40)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    run: RunDir = enter(tmp_path / "run", job(tmp_path / "run"))[0]
    write_shard(run, 0, ROWS)
    return run.shard(0)


def test_it_reads_back_whole_and_in_parts(shard: Path) -> None:
    info, table = read_shard(shard)
    assert (info.shard, info.rows) == (0, 40) and read_shard_info(shard) == info
    assert table["token_ids"].to_pylist() == [None if row.token_ids is None else list(row.token_ids) for row in ROWS]
    assert read_row_ids(shard) == ([row.row for row in ROWS], [row.row_id for row in ROWS])
    assert list(read_refused(shard)) == [row.row for row in ROWS if row.error_code]


def test_no_flipped_bit_and_no_missing_byte_of_it_passes(shard: Path) -> None:
    whole = shard.read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        shard.write_bytes(flipped)
        with pytest.raises(RunError, match=r"shard-00000\.arrow: not a whole shard of the plan \(.*--fresh"):
            read_shard(shard)
    for size in (*range(0, len(whole), 97), len(whole) - 1):
        shard.write_bytes(whole[:size])
        with pytest.raises(RunError, match="not a whole shard"):
            read_shard(shard)


def test_a_shard_of_a_bulkrun_that_wrote_no_checksum_still_runs(shard: Path) -> None:
    want = read_shard(shard)
    shard.write_bytes(shard.read_bytes()[: -len("crc32 01234567\n")])
    assert read_shard(shard) == want and read_shard_info(shard) == want[0] and len(read_row_ids(shard)[0]) == 40


def test_before_its_checksum_it_is_a_file_for_any_arrow_reader(shard: Path) -> None:
    contents, line = shard.read_bytes()[:-15], shard.read_bytes()[-15:]
    assert line == b"crc32 %08x\n" % zlib.crc32(contents)
    assert pa.ipc.open_file(contents).read_all().num_rows == 40

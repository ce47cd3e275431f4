"""Part files say what they hold, and a flipped bit in one is found."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results import parts
from bulkrun.data.results.parts import (
    METADATA_KEY,
    PartInfo,
    count_ends,
    read_part_columns,
    read_part_info,
    read_part_schema,
    row_bounds,
    write_groups,
    write_part,
)
from bulkrun.errors import BulkrunError, RunError

INFO = PartInfo("run", "plan", 3, "attempt", 7, 7, {"bad_input": 2}, 70, 14, {"bulkrun": "1"})
TABLE = pa.table({"row": list(range(7)), "response": ["word " * 50] * 7, "nothing": pa.nulls(7, pa.string())})


def test_a_part_reads_back_with_its_schema_and_footer(tmp_path: Path) -> None:
    write_part(tmp_path / "p.parquet", TABLE, INFO)
    assert read_part_info(tmp_path / "p.parquet") == INFO and INFO.error_rows == 2
    assert read_part_schema(tmp_path / "p.parquet") == TABLE.schema
    assert pa.concat_tables(read_part_columns(tmp_path / "p.parquet")) == TABLE
    types = duckdb.execute(f"DESCRIBE SELECT * FROM '{tmp_path}/p.parquet'").fetchall()
    assert [(name, kind) for name, kind, *_ in types][2] == ("nothing", "VARCHAR"), "an all-null column keeps its type"


def test_a_part_of_a_newer_version_is_named_as_one(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Newer(PartInfo):
        colour: str = "red"

    write_part(tmp_path / "p.parquet", TABLE, Newer(**asdict(INFO)))
    with pytest.raises(
        RunError, match=r"p.parquet: not the footer of a part.*'colour'\); it was written by a newer bulkrun"
    ):
        read_part_info(tmp_path / "p.parquet")


def test_row_groups_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_ROW_GROUP_BYTES", 600)
    write_part(tmp_path / "p", TABLE, INFO)
    assert pq.read_metadata(tmp_path / "p").num_row_groups == 4
    assert [table.num_rows for table in read_part_columns(tmp_path / "p", ["row"])] == [2, 2, 2, 1]


def test_every_flipped_bit_of_the_data_is_found(tmp_path: Path) -> None:
    write_part(tmp_path / "p", TABLE, INFO)
    good = (tmp_path / "p").read_bytes()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    found = 0
    for at in range(4, footer, 3):
        (tmp_path / "bad").write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        try:
            same = pa.concat_tables(read_part_columns(tmp_path / "bad")) == TABLE
        except RunError as error:
            assert "bad: damaged" in str(error) and "\n" not in str(error)
            assert str(error).endswith("; delete this file and _SUCCESS, then run the same command again")
            found += 1
        else:
            assert same, f"byte {at}: other data without an error"
    assert found > 20


def test_a_flipped_bit_of_a_footer_is_damage_or_nothing_and_never_a_traceback(tmp_path: Path) -> None:
    write_part(tmp_path / "p", TABLE, INFO)
    good, found = (tmp_path / "p").read_bytes(), 0
    begin = good.index(b'{"run_id"')  # what it says of itself; before it, the names of columns
    for at in (*range(begin, begin + 200, 9), good.rindex(b"response", 0, begin)):
        (tmp_path / "bad").write_bytes(good[:at] + bytes([good[at] ^ 0x80]) + good[at + 1 :])
        try:
            read_part_info(tmp_path / "bad")
        except RunError as error:
            found += "bad: not a whole Parquet file" in str(error)
    assert found > 20


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_torn_part_is_named(tmp_path: Path, cut: int) -> None:
    write_part(tmp_path / "p", TABLE, INFO)
    (tmp_path / "torn").write_bytes((tmp_path / "p").read_bytes()[:cut])
    for read in (read_part_info, read_part_schema, lambda path: list(read_part_columns(path))):
        with pytest.raises(RunError, match="torn: not a whole Parquet file"):
            read(tmp_path / "torn")


def test_a_stranger_and_a_footer_that_lies_are_refused(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "foreign")
    with pytest.raises(RunError, match="bulkrun did not write"):
        read_part_info(tmp_path / "foreign")
    with pytest.raises(AssertionError):
        write_part(tmp_path / "p", TABLE, replace(INFO, rows=8))
    for rows in (6, 8):
        footer = {METADATA_KEY: json.dumps(asdict(replace(INFO, rows=rows)))}
        pq.write_table(TABLE.replace_schema_metadata(footer), tmp_path / "p")
        with pytest.raises(RunError, match=f"holds 7 rows, its footer declares {rows}; it is damaged"):
            read_part_info(tmp_path / "p")


def test_the_bounds_are_those_of_all_parts_and_row_groups(tmp_path: Path) -> None:
    for number, rows in enumerate(([5, 9], [], [0, 7, 3])):
        tables = [pa.table({"text": ["x"], "row": [row]}) for row in rows]
        nothing, info = pa.table({"text": ["x"], "row": [0]}).slice(1), replace(INFO, rows=len(rows))
        path = tmp_path / str(number)
        write_groups(path, [*tables, nothing], nothing.schema, partial(replace, info), compression="zstd")
        assert pq.read_metadata(path).num_row_groups == len(rows), "none without a row"
    assert row_bounds(tmp_path / str(number) for number in range(3)) == (0, 9)
    assert row_bounds([tmp_path / "1"]) == row_bounds([]) == (0, -1)


def test_what_was_cut_and_what_was_stopped_is_counted() -> None:
    reasons = ["length", "stop", "repetition", None, "timeout", "length", "length"]
    made = {"row": range(len(reasons)), "finish_reason": reasons}
    assert count_ends(pa.table(made)) == {"cut": 3, "stopped": 2}
    assert count_ends(TABLE) == {"cut": 0, "stopped": 0}


def test_a_failed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        write_part(tmp_path / "p", TABLE, INFO)
    assert list(tmp_path.iterdir()) == []


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["read_metadata", "ParquetFile"])
def test_a_disk_that_fails_is_not_a_damaged_part(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part(tmp_path / "p", TABLE, INFO)

    error = OSError(number, "Error reading bytes from file")  # as Arrow has it: with an errno, without a name
    monkeypatch.setattr(pq, call, raising(error))
    with pytest.raises(RunError, match=rf"/p: reading failed: {os.strerror(number)}; .*run the same command again$"):
        list(read_part_columns(tmp_path / "p"))


@pytest.mark.parametrize(
    "error",
    [pa.ArrowMemoryError("malloc of size 62914624 failed"), pa.ArrowException("Failed to launch worker thread: x")],
)
@pytest.mark.parametrize("call", ["read_metadata", "ParquetFile"])
def test_a_shortage_of_memory_or_threads_is_no_damage(
    call: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part(tmp_path / "p", TABLE, INFO)

    monkeypatch.setattr(pq, call, raising(error))
    with pytest.raises(BulkrunError, match=r"/p: reading failed: .*; the file is as it was: give .*ulimit") as found:
        list(read_part_columns(tmp_path / "p"))
    assert not isinstance(found.value, RunError), "which a check of a run counts as damage"

"""Partition folders: what is written is what DuckDB and pyarrow read, and nothing leaves the run's directory."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bulkrun.data.storage.partitions import (
    NULL_FOLDER,
    duckdb_type,
    find_parts,
    folder_name,
    folder_values,
    is_plain_name,
    partition_columns,
    sql_type,
)

texts = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts)
@example("..")
@example("/etc/passwd")
@example("a/../../b")
@example("\x00\x1f\x7f")
@example("NULL")
@example("")
@example("[a]*?{b}%41'\"\\ =;\u2028")
def test_duckdb_and_pyarrow_read_the_value_that_was_written_whatever_it_is(tmp_path: Path, value: str) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    folder = root / folder_name("k", value)
    assert folder.parent == root and folder.resolve().parent == root.resolve(), "a value is one name"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), folder / "part-00000.parquet")
    hive = ds.partitioning(pa.schema([("k", pa.string())]), flavor="hive")
    assert ds.dataset(root, partitioning=hive).to_table().to_pylist() == [{"x": 1, "k": value}]
    [part] = find_parts(root)
    sql = "SELECT k FROM read_parquet($1, hive_partitioning = true, hive_types = {'k': VARCHAR})"
    assert duckdb.execute(sql, [str(part)]).fetchall() == [(value,)]
    assert folder_values(part.parent.name) == {"k": value}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), -(2**63)),
        (pa.uint64(), 2**64 - 1),
        (pa.int8(), 7),
        (pa.bool_(), True),
        (pa.date32(), date(2024, 2, 29)),
        (pa.string(), "007"),
        (pa.large_string(), "x"),
        (pa.int32(), None),
    ],
)
def test_values_come_back_in_their_declared_type(tmp_path: Path, kind: pa.DataType, value: Any) -> None:
    text = pa.array([value], kind).cast(pa.string())[0].as_py()
    folder = folder_name("k", text)
    assert partition_columns(folder, {"k": str(kind)}, 2) == {"k": pa.array([value, value], kind)}
    (tmp_path / folder).mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / folder / "part-00000.parquet")
    sql = f"SELECT k FROM read_parquet('{tmp_path}/*/*.parquet', hive_types = {{'k': {sql_type(str(kind))}}})"
    assert duckdb.sql(sql).fetchall() == [(value,)]


def test_a_null_is_the_default_partition_of_hive(tmp_path: Path) -> None:
    assert folder_name("lang", None) == f"lang={NULL_FOLDER}" == "lang=__HIVE_DEFAULT_PARTITION__"
    assert folder_values("lang=__HIVE_DEFAULT_PARTITION__/year=2024") == {"lang": None, "year": "2024"}


def test_a_text_that_is_hives_name_for_null_is_that_text(tmp_path: Path) -> None:
    folder = tmp_path / folder_name("k", NULL_FOLDER)
    folder.mkdir()
    pq.write_table(pa.table({"x": [1]}), folder / "part-00000.parquet")
    assert folder_values(folder.name) == {"k": NULL_FOLDER}
    assert duckdb.sql(f"SELECT k FROM read_parquet('{tmp_path}/*/*.parquet')").fetchall() == [(NULL_FOLDER,)]


@pytest.mark.parametrize("name", ["_lang", ".x", "a=b", "a/b", "a b", "", "a%20b", "a'b"])
def test_names_that_readers_take_for_something_else_are_not_plain(name: str) -> None:
    assert not is_plain_name(name)


def test_plain_names_are(tmp_path: Path) -> None:
    assert all(map(is_plain_name, ["lang", "Year", "a_b-c", "x2", "日本"]))
    assert duckdb_type(pa.float64()) is None and duckdb_type(pa.timestamp("us")) is None


def test_parts_are_found_in_folders_but_not_in_the_runs_state_or_under_other_names(tmp_path: Path) -> None:
    wanted = ["part-00000.parquet", "lang=en/part-00001.parquet", "lang=de/year=1/part-123456.parquet"]
    others = [".bulkrun/tmp/part-00002.parquet", "notes/part-00003.parquet", "lang=en/mine.parquet", "_SUCCESS"]
    for name in wanted + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in find_parts(tmp_path)} == set(wanted)
    assert list(find_parts(tmp_path / "nowhere")) == []

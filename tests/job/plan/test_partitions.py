"""output.partition_by in the plan: one shard, one folder; order and copies inside it; clear refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.errors import InputError, JobFileError
from bulkrun.job.plan import window
from bulkrun.job.plan.cut import Limits, cut
from bulkrun.job.plan.order import RunOrder
from bulkrun.job.plan.partitions import Partitions
from tests.job.plan.planning import job, make_plan, read_rows, read_shards, write_jsonl, write_parquet

LANGS = ["en", "de", None, "x/y", ".."]
SAFE = {"en": "lang=en", "de": "lang=de", None: "lang=__HIVE_DEFAULT_PARTITION__", "x/y": "lang=x%2Fy", "..": "lang=.."}


def write_input(folder: Path, count: int = 900) -> Path:
    rng = np.random.default_rng(1)
    columns = {
        "text": [f"prompt {rng.integers(0, 300)}" for _ in range(count)],
        "lang": [LANGS[rng.integers(0, 5)] for _ in range(count)],
        "year": [int(2020 + rng.integers(0, 3)) for _ in range(count)],
    }
    return write_parquet(folder / "in.parquet", columns)


def partitioned(path: Path, columns: list[str], **sections: Any) -> Any:
    return job(path, output={"path": "out", "partition_by": columns}, **sections)


def test_every_shard_holds_exactly_one_combination_of_values(tmp_path: Path) -> None:
    path = write_input(tmp_path)
    make_plan(tmp_path / "run", partitioned(path, ["lang", "year"], run={"window_rows": 500}))
    shards = read_shards(tmp_path / "run")
    for info, rows in shards:
        values = {(row["passthrough"]["lang"], row["passthrough"]["year"]) for row in rows}
        assert len(values) == 1
        [(lang, year)] = values
        assert info.folder == f"{SAFE[lang]}/year={year}"
    assert sorted(row["row"] for _, rows in shards for row in rows) == list(range(900))


def test_without_partitions_the_plan_has_no_folders(tmp_path: Path) -> None:
    make_plan(tmp_path / "run", job(write_input(tmp_path)))
    assert {info.folder for info, _ in read_shards(tmp_path / "run")} == {""}


def test_copies_of_a_prompt_run_once_in_each_partition(tmp_path: Path) -> None:
    columns = {"text": ["same"] * 10 + ["other"] * 2, "lang": ["en", "de"] * 6}
    report = make_plan(tmp_path / "run", partitioned(write_parquet(tmp_path / "in.parquet", columns), ["lang"]))
    assert report.counters.duplicate_prompts == 12 - 4
    for _, rows in read_shards(tmp_path / "run"):
        in_order = sorted(rows, key=lambda row: row["order"])
        texts = [tuple(row["token_ids"]) for row in in_order]
        assert texts == sorted(texts, key=texts.index), "copies stand together"


def test_rows_that_could_not_be_read_are_in_the_default_partition(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "a", "lang": "en"}, {"text": "b", "lang": "en"}])
    path.write_text(path.read_text() + '{"text": "c", "la\n')
    make_plan(tmp_path / "run", partitioned(path, ["lang"]))
    folders = {row["row"]: info.folder for info, rows in read_shards(tmp_path / "run") for row in rows}
    assert folders == {0: "lang=en", 1: "lang=en", 2: "lang=__HIVE_DEFAULT_PARTITION__"}


def test_a_value_too_long_for_a_folder_is_an_error_of_its_row_alone(tmp_path: Path) -> None:
    columns = {"text": ["a", "b", "c"], "lang": ["x" * 250, "x" * 251, "é" * 130], "year": [1, 2, 3]}
    make_plan(tmp_path / "run", partitioned(write_parquet(tmp_path / "in.parquet", columns), ["lang", "year"]))
    folders = {row["row"]: info.folder for info, rows in read_shards(tmp_path / "run") for row in rows}
    null = "lang=__HIVE_DEFAULT_PARTITION__"
    assert folders == {0: f"lang={'x' * 250}/year=1", 1: f"{null}/year=2", 2: f"{null}/year=3"}
    codes = {row["row"]: (row["error_code"], row["error_message"]) for row in read_rows(tmp_path / "run")}
    assert codes[0] == (None, None) and [codes[row][0] for row in (1, 2)] == ["bad_input"] * 2
    assert "output.partition_by: the value of 'lang' makes a folder name of 256 bytes" in codes[1][1]


def test_a_date_that_no_folder_gives_back_is_an_error_of_its_row_alone() -> None:
    days = pa.array([0, 2**31 - 1, None, 2_932_897], pa.int32()).cast(pa.date32())  # PostgreSQL's infinity, year 10000
    rows = pa.record_batch({"day": days})
    found = Partitions(["day"], rows.schema).of(rows)
    null = "day=__HIVE_DEFAULT_PARTITION__"
    assert [found.folders[folder] for folder in found.of_row] == ["day=1970-01-01", null, null, null]
    assert set(found.errors) == {1, 3} and {error.code for error in found.errors.values()} == {"bad_input"}
    assert "output.partition_by: the value of 'day' is a date32[day] that cannot be read" in found.errors[1].message


def test_more_partitions_than_a_window_may_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MAX_PARTITIONS", 20)
    columns = {"text": ["t"] * 21, "n": list(range(21)), "lang": ["en", "de", "fr"] * 7}
    path = write_parquet(tmp_path / "in.parquet", columns)
    make_plan(tmp_path / "ok", partitioned(path, ["n"], run={"window_rows": 20}))
    said = r"more than 20 partitions within 21 rows .from row 0 on: n has 21 values, lang has 3 values.*coarser column"
    with pytest.raises(InputError, match=said):
        make_plan(tmp_path / "run", partitioned(path, ["lang", "n"]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["lnag"], "'lnag' is not among the input columns.*did you mean 'lang'"),
        (["hidden"], "'hidden' is not among the input columns that go to the output"),
        (["score"], "'score' is double; text, integers, booleans and dates name folders: CAST it in input.sql"),
        (["_x"], "'_x' cannot be part of a folder's name.*rename it in input.sql"),
    ],
)
def test_a_column_that_cannot_name_folders_is_refused_before_the_first_row(columns: list[str], message: str) -> None:
    schema = pa.schema([("lang", pa.string()), ("score", pa.float64()), ("_x", pa.int32())])
    with pytest.raises(JobFileError, match=f"output.partition_by: column {message}"):
        Partitions(columns, schema)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 2), st.booleans()), max_size=30))
def test_folders_are_those_of_a_plain_loop_over_the_rows(rows: list[tuple[str | None, int, bool]]) -> None:
    schema = pa.schema([("s", pa.string()), ("i", pa.int32()), ("b", pa.bool_())])
    batch = pa.RecordBatch.from_pylist([dict(zip("sib", row, strict=True)) for row in rows], schema)
    found = Partitions(["s", "b", "i"], schema).of(batch)
    null = "__HIVE_DEFAULT_PARTITION__"
    expected = [f"s={null if s is None else s}/b={str(b).lower()}/i={i}" for s, i, b in rows]
    assert [found.folders[code] for code in found.of_row] == expected and not found.errors
    assert len(set(found.folders)) == len(found.folders)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 40), st.integers(1, 12))
def test_a_partitions_end_is_always_a_border(sizes: list[int], rows: int, shards: int) -> None:
    count = sum(sizes)
    order = RunOrder(np.arange(count), np.ones(count, np.bool_), np.cumsum(sizes))
    ones = np.ones(count, np.int64)
    borders = cut(order, ones, ones, Limits(rows, count, shards))
    assert set(np.cumsum(sizes)) <= set(borders.tolist())
    assert Counter(np.diff(borders) > rows)[True] == 0

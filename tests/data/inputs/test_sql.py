from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.data.storage.durable import publish_new
from bulkrun.errors import InputError, RunError
from tests.data.reading import read, read_all, write_lines
from tests.signalled import LONG_SELECT, signalled_after

ROWS = [{"id": number, "lang": "en" if number % 3 else "de", "text": f"row {number}"} for number in range(3001)]


@pytest.fixture(params=["parquet", "jsonl", "csv"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = tmp_path / "in"
    source.mkdir()
    for number, rows in enumerate((ROWS[:1234], ROWS[1234:])):
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), source / f"{number}.parquet")
        elif request.param == "jsonl":
            write_lines(source / f"{number}.jsonl", rows)
        else:
            lines = [f"{row['id']},{row['lang']},{row['text']}" for row in rows]
            (source / f"{number}.csv").write_text("\n".join(["id,lang,text", *lines]) + "\n")
    return source


def test_the_rows_are_those_of_the_query_for_every_format(folder: Path) -> None:
    sql = "SELECT id::BIGINT AS id, upper(text) AS t FROM input WHERE lang = 'de' ORDER BY id::BIGINT DESC;"
    want = [{"id": row["id"], "t": str(row["text"]).upper()} for row in ROWS if row["lang"] == "de"][::-1]
    assert read(folder, sql=sql) == (want, {})


def test_the_snapshot_is_made_once_and_fixes_the_rows(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "run" / ".bulkrun" / "input.snapshot"
    sql = "SELECT *, random() AS noise FROM input USING SAMPLE 50 ROWS"
    first = read(folder, sql=sql, sql_snapshot=snapshot)
    assert len(first[0]) == 50
    assert read(folder, sql="what is asked no more", sql_snapshot=snapshot) == first
    assert [path.name for path in snapshot.parent.rglob("*")] in (["input.snapshot", "tmp"], ["tmp", "input.snapshot"])


def test_a_second_process_that_publishes_later_keeps_the_first_snapshot(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_a_rival(tmp: Path, final: Path) -> bool:
        with open_input(str(folder), sql="SELECT 'rival' AS a FROM input LIMIT 7", sql_snapshot=tmp_path / "r"):
            shutil.copy(tmp_path / "r", final)
        return publish_new(tmp, final)

    monkeypatch.setattr("bulkrun.data.inputs.sql.publish_new", Once(after_a_rival, publish_new))
    sql, snapshot = "SELECT 1 AS a FROM input", tmp_path / "input.snapshot"
    with open_input(str(folder), sql=sql, sql_snapshot=snapshot) as dataset:
        assert dataset.num_rows == 7 and not list((tmp_path / "tmp").iterdir())


class Once:
    """Calls `first` the first time, `later` from then on."""

    def __init__(self, first: Callable[[Path, Path], bool], later: Callable[[Path, Path], bool]) -> None:
        self._calls = iter([first])
        self._later = later

    def __call__(self, tmp: Path, final: Path) -> bool:
        return next(self._calls, self._later)(tmp, final)


def test_a_file_system_that_cannot_sync_folders_is_no_obstacle(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_alone(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_alone)
    with open_input(str(folder), sql="SELECT id FROM input", sql_snapshot=tmp_path / "s") as dataset:
        assert dataset.num_rows == 3001


def test_a_snapshot_without_a_run_is_gone_when_the_dataset_is_closed(folder: Path) -> None:
    with open_input(str(folder), sql="SELECT id FROM input") as dataset:
        assert dataset._folder is not None
        temporary = dataset._folder.path
        assert temporary.exists() and len(dataset.files) == 2
    assert not temporary.exists()


def test_lines_that_cannot_be_read_come_as_error_rows_after_the_querys(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*ROWS[:40], b"{broken", *ROWS[40:50], b"x"])
    rows, errors = read(path, sql="SELECT id FROM input WHERE id < 3")
    assert [row["id"] for row in rows] == [0, 1, 2, None, None]
    assert [error.message.split(": ")[0] for error in errors.values()] == [f"{path}:41", f"{path}:52"]
    assert {error.code for error in errors.values()} == {"bad_input"}


def test_what_a_query_encodes_is_kept_plainly(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"n": 1}, {"n": 0}])
    one = "00000000-0000-0000-0000-000000000001"
    sql = f"SELECT ['b', 'a'][n + 1]::ENUM('a', 'b') AS e, [e] AS l, '{one}'::UUID AS u FROM input"
    assert read(path, sql=sql)[0] == [{"e": e, "l": [e], "u": one} for e in "ab"]


def test_a_row_that_the_query_makes_too_large_is_an_error_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"n": 1}, {"n": 5000}])
    rows, errors = read(path, sql="SELECT n, repeat('x', n) AS t FROM input ORDER BY n", max_row_bytes=4000)
    assert rows == [{"n": 1, "t": "x"}, {"n": None, "t": None}] and list(errors) == [1]


def test_a_snapshot_reads_from_any_position_and_with_chosen_columns(folder: Path) -> None:
    with open_input(str(folder), sql="SELECT id::BIGINT AS id, lang FROM input ORDER BY id::BIGINT") as dataset:
        assert dataset.schema.names == ["id", "lang"] and dataset.num_rows == 3001
        for start in (0, 1, 1024, 2999, 3001):
            rows, _ = read_all(dataset.select(["id"]), Position(0, start), limit=1025)
            assert rows == [{"id": number} for number in range(start, min(start + 1025, 3001))]


@pytest.mark.parametrize("name", ["in[12].parquet", "in*.parquet", "in?.parquet", "in[[]1].parquet"])
def test_a_file_whose_name_is_a_glob_is_read_once_and_no_other_for_it(tmp_path: Path, name: str) -> None:
    for number, file in enumerate(("in1.parquet", name, "in2.parquet")):
        pq.write_table(pa.table({"id": [number]}), tmp_path / file)
    assert read(tmp_path, sql="SELECT id FROM input ORDER BY id")[0] == [{"id": 0}, {"id": 1}, {"id": 2}]
    assert read([tmp_path / name], sql="SELECT id FROM input")[0] == [{"id": 1}]


@pytest.mark.parametrize("sql", ["SELECT a::INTEGER AS a FROM input", "SELECT a, error('no') FROM input WHERE a = 'x'"])
def test_a_query_that_fails_after_its_first_rows_says_why(tmp_path: Path, sql: str) -> None:
    pq.write_table(pa.table({"a": [*map(str, range(300_000)), "x"]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"^input\.sql: .*(Could not convert string|no)"):
        open_input(str(tmp_path), sql=sql, sql_snapshot=tmp_path / "run" / "input.snapshot")
    assert not list((tmp_path / "run").rglob("*.*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_told_with_the_file_and_what_to_do(
    folder: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "in Arrow's words")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(RunError) as caught:
        open_input(str(folder), sql="SELECT * FROM input", sql_snapshot=tmp_path / "run" / "input.snapshot")
    for words in (
        "input.snapshot: writing the rows of input.sql failed",
        os.strerror(number),
        "run the same command again",
    ):
        assert words in str(caught.value)
    assert ("free some space" in str(caught.value)) == (number == errno.ENOSPC)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT idd FROM input", '"idd" not found'),
        ("SELEC 1", "syntax error"),
        ("SELECT 1; SELECT 2", "exactly one SELECT is wanted, but there are 2"),
        ("", "exactly one SELECT is wanted, but there are 0"),
        ("DROP VIEW input", "only SELECT is allowed, but this is DROP"),
        ("COPY input TO 'stolen.csv'", "only SELECT is allowed, but this is COPY"),
        ("SET memory_limit = '1TB'", "only SELECT is allowed, but this is SET"),
        ("ATTACH 'x.db'", "only SELECT is allowed, but this is ATTACH"),
        ("SELECT * FROM read_text('/etc/hostname')", "Permission Error"),
        ("SELECT * FROM read_csv('../*.csv')", "Permission Error"),
        ("SELECT * FROM '/etc/hostname'", "does not exist"),
        ("SELECT id AS a, text AS a FROM input", "two columns of the result are named 'a'"),
        ("SELECT [md5_number(text)] AS h FROM input", "column 'h' has a type that Parquet does not have (UHUGEINT[])"),
        ("SELECT '12:00:00+05:30'::TIMETZ AS t FROM input", "'t' has a type that Parquet does not have (TIME WITH"),
        ("SELECT 1 AS n, INTERVAL 1 DAY AS i FROM input", "column 'i' has a type that Parquet does not have (month_"),
        (
            "SELECT union_value(n := 1) AS u FROM input",
            "column 'u' has a type that Parquet does not have (sparse_union<",
        ),
        ("SELECT 'x'::INTEGER AS i FROM input", "Could not convert"),
    ],
)
def test_a_query_that_cannot_run_says_why_and_leaves_nothing(
    folder: Path, tmp_path: Path, sql: str, message: str
) -> None:
    snapshot = tmp_path / "run" / "input.snapshot"
    with pytest.raises(InputError, match=r"^input\.sql: ") as caught:
        open_input(str(folder), sql=sql, sql_snapshot=snapshot)
    assert message in str(caught.value)
    assert list((tmp_path / "run").rglob("*.*")) == []


def write_days(folder: Path, *days: pa.Table) -> Path:
    for number, rows in enumerate(days):
        place = folder / f"year={2024 + number}"
        place.mkdir(parents=True)
        pq.write_table(rows, place / "x.parquet")
    return folder


BIG = 2**53 + 1


def test_files_that_differ_in_a_columns_type_have_no_value_that_is_rounded(tmp_path: Path) -> None:
    days = pa.table({"id": [BIG, 7]}), pa.table({"id": pa.array([], pa.int64())}), pa.table({"id": [0.5, None]})
    rows, errors = read(write_days(tmp_path, *days), sql="SELECT id, typeof(year) AS t FROM Input ORDER BY id")
    assert rows == [{"id": id_, "t": "BIGINT"} for id_ in (0.5, 7.0, None)] + [{"id": None, "t": None}]
    assert list(errors) == [3] and str(BIG) in errors[3].message and errors[3].code == "bad_input"


def test_a_query_that_names_files_reads_them_with_their_own_types(tmp_path: Path) -> None:
    one, other = pa.table({"id": [BIG]}), pa.table({"id": [float(BIG)], "b": ["x"]})
    paths = [str(path) for path in sorted(write_days(tmp_path, one, other).rglob("*.parquet"))]
    sql = f"SELECT a.id, b.b FROM '{paths[0]}' a, '{paths[1]}' b"
    assert read(tmp_path, sql=sql) == ([{"id": BIG, "b": "x"}], {})
    assert read(tmp_path, sql=f"{sql}, input")[0][0] == {"id": BIG, "b": "x"}


@pytest.mark.parametrize("kind", ["jsonl", "one type", "two types"])
def test_the_name_of_the_runs_own_folder_is_no_column(tmp_path: Path, kind: str) -> None:
    rows = [{"id": 1, "day": "monday"}, {"id": 2, "day": "friday"}]
    source, snapshot = tmp_path / "in", tmp_path / "day=2026-11-23" / "region=eu" / "out" / "input.snapshot"
    source.mkdir()
    if kind == "jsonl":
        write_lines(source / "a.jsonl", rows)
    else:
        second = pa.float64() if kind == "two types" else pa.int64()
        for number, (row, id_type) in enumerate(zip(rows, (pa.int64(), second), strict=True)):
            pq.write_table(
                pa.table({"id": pa.array([row["id"]], id_type), "day": [row["day"]]}), source / f"{number}.parquet"
            )
    found, _ = read(source, sql="SELECT * FROM input ORDER BY id", sql_snapshot=snapshot)
    assert found == rows


def test_files_that_differ_and_have_no_rows_are_no_rows(tmp_path: Path) -> None:
    days = [pa.table({"id": pa.array([], kind)}) for kind in (pa.int64(), pa.float64())]
    assert read(write_days(tmp_path, *days), sql="SELECT id FROM input") == ([], {})


def test_decimals_that_duckdb_cannot_hold_are_refused_where_a_query_uses_them(tmp_path: Path) -> None:
    for number, places in enumerate((0, 18)):
        columns = {"text": ["x"], 'the "sum"': pa.array([Decimal("1.0")], pa.decimal128(38, places))}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    assert read(tmp_path, sql="SELECT text FROM input") == ([{"text": "x"}] * 2, {})
    with pytest.raises(InputError, match=r"column 'the \"sum\"' is decimal256\(56, 18\), and DuckDB has no"):
        open_input(str(tmp_path), sql="SELECT * FROM input")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_that_differ_only_in_case_are_refused_where_a_query_uses_them(tmp_path: Path, kind: str) -> None:
    """DuckDB finds the first where the second is meant, and of files with another order others' values."""
    for number, row in enumerate(({"ID": 1, "id": "a", "n": 7}, {"id": "b", "ID": 2, "n": 8})):
        if kind == "jsonl":
            write_lines(tmp_path / f"{number}.jsonl", [row])
        else:
            pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
    assert read(tmp_path, sql="SELECT n FROM input ORDER BY n") == ([{"n": 7}, {"n": 8}], {})
    for columns in ("id", "*"):
        with pytest.raises(InputError, match=r"^input\.sql: .*differ only in case.*rename one"):
            open_input(str(tmp_path), sql=f"SELECT {columns} FROM input")


def test_the_time_zone_of_the_machine_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    pq.write_table(pa.table({"t": pa.array([stamp], pa.timestamp("us", "UTC"))}), tmp_path / "x.parquet")
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        with open_input(str(tmp_path), sql="SELECT t, strftime(t, '%H') AS hour FROM input") as dataset:
            assert dataset.schema.field("t").type == pa.timestamp("us", "UTC")
            assert read_all(dataset) == ([{"t": stamp, "hour": "22"}], {})
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("sql", [LONG_SELECT, LONG_SELECT.replace("sum(hash(a.range, b.range))", "hash(a.range)")])
def test_a_signal_ends_the_query_at_its_start_or_between_its_rows_and_leaves_nothing(tmp_path: Path, sql: str) -> None:
    write_lines(tmp_path / "x.jsonl", [{"a": 1}])
    began = time.monotonic()
    with signalled_after(0.5):
        open_input(str(tmp_path / "x.jsonl"), sql=sql, sql_snapshot=tmp_path / "run" / "input.snapshot")
    assert time.monotonic() - began < 20
    assert not list((tmp_path / "run").rglob("*.*"))

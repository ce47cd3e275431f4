"""Columns in folders' names: the same with and without SQL, in every format, and those of bulkrun's own partitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import InputError
from tests.data.reading import read, read_all

FOLDERS = {"lang=de/year=2023": "Haus", "lang=en/year=2024": "house", "lang=__HIVE_DEFAULT_PARTITION__/year=a%2Fb": "?"}
WANTED = [
    {"text": "?", "lang": None, "year": "a/b"},
    {"text": "Haus", "lang": "de", "year": "2023"},
    {"text": "house", "lang": "en", "year": "2024"},
]


@pytest.fixture(params=["parquet", "jsonl", "csv"])
def hive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for folder, text in FOLDERS.items():
        path = tmp_path / "k=above" / folder / f"x.{request.param}"
        path.parent.mkdir(parents=True)
        if request.param == "parquet":
            pq.write_table(pa.table({"text": [text]}), path)
        else:
            path.write_text(f"text\n{text}\n" if request.param == "csv" else json.dumps({"text": text}) + "\n")
    return tmp_path / "k=above"


def test_folders_below_the_path_are_columns_of_text(hive: Path) -> None:
    assert read(hive) == (WANTED, {})
    assert read(hive / "*" / "*" / "x.*") == (WANTED, {})


def test_columns_are_chosen_and_rows_begun_as_in_any_input(hive: Path) -> None:
    with open_input(str(hive)) as dataset:
        assert dataset.schema.names == ["text", "lang", "year"]
        chosen = dataset.select(["year", "text"]).select(["year"])
        assert read_all(chosen, Position(1, 0))[0] == [{"year": "2023"}, {"year": "2024"}]
        assert read_all(dataset.select([]))[0] == [{}, {}, {}]


def test_sql_sees_the_folders_too(hive: Path) -> None:
    rows, _ = read(hive, sql="SELECT text, lang, year::VARCHAR AS year FROM input ORDER BY year")
    assert sorted(rows, key=str) == sorted(WANTED, key=str)


def test_a_column_that_a_file_has_itself_is_the_files(tmp_path: Path) -> None:
    (tmp_path / "lang=en").mkdir()
    pq.write_table(pa.table({"lang": ["de"], "n": [1]}), tmp_path / "lang=en" / "x.parquet")
    assert read(tmp_path)[0] == read(tmp_path, sql="SELECT * FROM input")[0] == [{"lang": "de", "n": 1}]


def test_sql_finds_what_files_have_themselves_and_of_other_columns_what_their_folders_say(tmp_path: Path) -> None:
    for folder, columns in (("a=1/Lang=en", {"n": [1], "lang": ["de"]}), ("a=2/Lang=fr", {"n": [2]})):
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(pa.table(columns), tmp_path / folder / "x.parquet")
    rows = [{"n": 1, "a": 1}, {"n": 2, "a": 2}]
    assert read(tmp_path, sql="SELECT n, a FROM input ORDER BY n") == (rows, {})
    with pytest.raises(InputError, match="columns 'lang' and 'Lang' differ only in case"):
        read(tmp_path, sql="SELECT lang FROM input")
    (tmp_path / "a=1" / "Lang=en").rename(tmp_path / "a=1" / "lang=en")
    (tmp_path / "a=2" / "Lang=fr").rename(tmp_path / "a=2" / "lang=fr")
    assert [row["lang"] for row in read(tmp_path, sql="SELECT lang FROM input ORDER BY n")[0]] == ["de", "fr"]
    pq.write_table(pa.table({"n": [2], "lang": ["at"]}), tmp_path / "a=2" / "lang=fr" / "x.parquet")
    rows, _ = read(tmp_path, sql="SELECT lang, a FROM input ORDER BY n")
    assert rows == [{"lang": "de", "a": 1}, {"lang": "at", "a": 2}]


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_where_only_some_files_have_a_column_the_others_have_their_folders(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "lang=de" / f"1.{kind}", {"n": "1"})
    write(tmp_path / "lang=en" / f"2.{kind}", {"n": "2", "lang": "english"})
    rows = [{"n": "1", "lang": "de"}, {"n": "2", "lang": "english"}]
    assert read(tmp_path) == read(tmp_path, sql="SELECT n, lang FROM input ORDER BY n") == (rows, {})
    with open_input(str(tmp_path)) as dataset:
        assert read_all(dataset.select(["lang"]))[0] == [{"lang": "de"}, {"lang": "english"}]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_folders_have_the_type_of_the_files_or_are_refused(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "year=2023" / f"1.{kind}", {"n": 1})
    write(tmp_path / "year=2024" / f"2.{kind}", {"n": 2, "year": 1999}, {"n": 3, "year": None})
    assert [row["year"] for row in read(tmp_path)[0]] == [2023, 1999, None]
    write(tmp_path / "year=late" / f"3.{kind}", {"n": 3})
    with pytest.raises(InputError, match=rf"3\.{kind}: has no column 'year', and .* 'late' is not int64"):
        open_input(str(tmp_path))


def test_a_line_keeps_what_the_sample_did_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 16)
    write(tmp_path / "lang=de" / "1.jsonl", *[{"n": 1}] * 16, {"n": 2, "lang": "at"})
    write(tmp_path / "lang=en" / "2.jsonl", {"n": 3, "lang": "us"})
    assert [row["lang"] for row in read(tmp_path)[0]] == ["de"] * 16 + ["at", "us"]


def test_a_row_that_cannot_be_read_is_null_in_these_columns_too(tmp_path: Path) -> None:
    (tmp_path / "lang=en").mkdir()
    (tmp_path / "lang=en" / "x.jsonl").write_text('{"n": 1}\n{broken\n')
    rows, errors = read(tmp_path)
    assert rows == [{"n": 1, "lang": "en"}, {"n": None, "lang": None}] and list(errors) == [1]

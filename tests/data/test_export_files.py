"""The formats of an export, read back by other programs."""

from __future__ import annotations

import csv
import io
import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.export_files import CsvSink, JsonlSink, ParquetSink, RowSink, csv_cell, json_line

TABLE = pa.table(
    {
        "row": [0, 1, 2],
        "text": ['a "quoted"\nline', None, "=1+1"],
        "parsed": [{"title": "é", "tags": ["x", "y"]}, None, {"title": None, "tags": []}],
        "score": [0.5, float("nan"), float("inf")],
        "day": [date(2024, 2, 29), None, date(1970, 1, 1)],
        "at": pa.array([datetime(2024, 1, 2, 3, 4, 5), None, None], pa.timestamp("us")),
        "raw": [b"\x00\xff", None, b""],
        "price": [Decimal("1.50"), None, Decimal("0.00")],
        "took": pa.array([timedelta(seconds=90), None, None], pa.duration("us")),
    }
)


def written(sink: type[RowSink], *schema: pa.Schema) -> bytes:
    stream = io.BytesIO()
    made = sink(stream, *schema)
    for start in range(TABLE.num_rows):
        made.write(TABLE.slice(start, 1))
    made.close()
    return stream.getvalue()


def test_json_lines_keep_nested_values_and_have_no_nan() -> None:
    lines = [json.loads(line) for line in written(JsonlSink).decode().splitlines()]
    assert [line["text"] for line in lines] == TABLE["text"].to_pylist()
    assert [line["parsed"] for line in lines] == TABLE["parsed"].to_pylist()
    assert [line["score"] for line in lines] == [0.5, None, None]
    assert lines[0]["day"] == "2024-02-29" and lines[0]["at"] == "2024-01-02T03:04:05"
    assert (lines[0]["raw"], lines[0]["price"], lines[0]["took"]) == ("AP8=", "1.50", 90.0)


def test_csv_has_a_header_json_text_for_nested_values_and_no_formulas() -> None:
    rows = list(csv.DictReader(io.StringIO(written(CsvSink, TABLE.schema).decode(), newline="")))
    assert [row["text"] for row in rows] == ['a "quoted"\nline', "", "'=1+1"]
    assert json.loads(rows[0]["parsed"]) == {"title": "é", "tags": ["x", "y"]}
    assert rows[1]["parsed"] == "" and rows[0]["raw"] == "AP8="


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_a_csv_cell_is_never_a_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
    assert csv_cell(-1) == -1 and csv_cell(" =1") == " =1"


def test_a_csv_header_is_there_without_rows() -> None:
    stream = io.BytesIO()
    CsvSink(stream, TABLE.schema).close()
    assert stream.getvalue().decode().strip() == ",".join(TABLE.column_names)


def test_parquet_is_one_whole_file_with_page_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(written(ParquetSink, TABLE.schema))
    assert pq.read_table(path, page_checksum_verification=True).drop(["score"]).equals(TABLE.drop(["score"]))
    assert duckdb.execute(f"SELECT count(*), max(row) FROM '{path}'").fetchall() == [(3, 2)]


def test_a_line_is_one_line_whatever_is_in_it() -> None:
    line = json_line({"a": "x\ny\u2028z\r"})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == {"a": "x\ny\u2028z\r"}

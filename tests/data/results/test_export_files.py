"""The formats of an export, read back by other programs."""

from __future__ import annotations

import csv
import io
import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.results.export_files import CsvSink, JsonlSink, RowSink, csv_cell, json_line, readable_rows

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
    return stream.getvalue()


def test_json_lines_keep_nested_values_and_have_no_nan() -> None:
    lines = [json.loads(line) for line in written(JsonlSink).decode().splitlines()]
    assert [line["text"] for line in lines] == TABLE["text"].to_pylist()
    assert [line["parsed"] for line in lines] == TABLE["parsed"].to_pylist()
    assert [line["score"] for line in lines] == [0.5, None, None]
    assert json_line({"map": [("k", float("nan"))]}) == b'{"map": [["k", null]]}\n'
    assert lines[0]["day"] == "2024-02-29" and lines[0]["at"] == "2024-01-02T03:04:05"
    assert (lines[0]["raw"], lines[0]["price"], lines[0]["took"]) == ("AP8=", "1.50", 90.0)


def test_half_a_surrogate_pair_is_its_escape() -> None:
    """What a line of a batch asked is said again in its answer, and JSON's escapes can spell more than UTF-8."""
    assert json_line({"metadata": {"\ud800ü": "a\udfff"}}) == b'{"metadata": {"\\ud800\xc3\xbc": "a\\udfff"}}\n'
    assert json.loads(json_line({"a": "\ud800"})) == {"a": "\ud800"}


def test_csv_has_a_header_json_text_for_nested_values_and_no_formulas() -> None:
    rows = list(csv.DictReader(io.StringIO(written(CsvSink, TABLE.schema).decode(), newline="")))
    assert [row["text"] for row in rows] == ['a "quoted"\nline', "", "'=1+1"]
    assert json.loads(rows[0]["parsed"]) == {"title": "é", "tags": ["x", "y"]}
    assert rows[1]["parsed"] == "" and rows[0]["raw"] == "AP8="
    assert csv_cell(["é", None, 1.5]) == '["é", null, 1.5]'


def test_csv_has_times_as_json_lines_do_whatever_else_is_in_the_column() -> None:
    stamps = pa.array([0, 1, None], pa.timestamp("ns"))
    table = pa.table({"t": stamps, "d": pa.array([86_400 * 10**9, 1, None], pa.duration("ns"))})
    stream = io.BytesIO()
    CsvSink(stream, table.schema).write(table)
    cells = list(csv.reader(io.StringIO(stream.getvalue().decode())))
    assert cells[1:] == [["1970-01-01T00:00:00", "86400.0"], ["1970-01-01T00:00:00.000000001", "1e-09"], ["", ""]]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_a_csv_cell_is_never_a_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
    assert csv_cell(-1) == -1 and csv_cell(" =1") == " =1"


def test_a_csv_header_is_there_without_rows() -> None:
    stream = io.BytesIO()
    CsvSink(stream, TABLE.schema)
    assert stream.getvalue().decode().strip() == ",".join(TABLE.column_names)


def test_a_line_is_one_line_whatever_is_in_it() -> None:
    line = json_line({"a": "x\ny\u2028z\r"})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == {"a": "x\ny\u2028z\r"}


STAMP = pa.timestamp("ns")
FAR = 253402300800 * 10**6  # the first microsecond of the year 10000


@pytest.mark.parametrize(
    ("type_", "value", "want"),
    [
        (STAMP, 1_000_000_001, "1970-01-01T00:00:01.000000001"),
        (pa.timestamp("ns", "Europe/Vienna"), 1, "1970-01-01T01:00:00.000000001+0100"),
        (pa.timestamp("us"), FAR, "10000-01-01T00:00:00.000000"),
        (pa.timestamp("us", "Nowhere/Bad"), 1, "1970-01-01T00:00:00.000001Z"),
        (pa.timestamp("us"), 2**63 - 1, "infinity"),
        (pa.timestamp("s", "UTC"), -(2**63) + 1, "-infinity"),
        (pa.timestamp("us"), 2**60, "<value out of range: 1152921504606846976>"),
        (STAMP, 2**63 - 1, "2262-04-11T23:47:16.854775807"),
        (pa.date32(), -(2**31) + 1, "-infinity"),
        (pa.date32(), 3_000_000, "10183-09-21"),
        (pa.time64("ns"), 1, "00:00:00.000000001"),
        (pa.duration("ns"), 1, 1e-9),
        (pa.duration("s"), 2**62, 2.0**62),
        (
            pa.struct([("a", STAMP), ("b", pa.int64())]),
            {"a": 1, "b": 2},
            {"a": "1970-01-01T00:00:00.000000001", "b": 2},
        ),
        (pa.list_(STAMP), [1, None], ["1970-01-01T00:00:00.000000001", None]),
        (pa.map_(pa.string(), STAMP), [("k", 1)], [("k", "1970-01-01T00:00:00.000000001")]),
        (pa.list_(pa.struct([("a", pa.date32())])), [{"a": 3_000_000}], [{"a": "10183-09-21"}]),
    ],
)
def test_a_time_that_python_does_not_have_is_text_in_every_format(type_: pa.DataType, value: Any, want: Any) -> None:
    table = pa.table({"id": [7, 8], "t": pa.array([value, None], type_)})
    assert readable_rows(table) == [{"id": 7, "t": want}, {"id": 8, "t": None}]
    stream = io.BytesIO()
    JsonlSink(stream).write(table)
    assert json.loads(stream.getvalue().splitlines()[0]) == json.loads(json.dumps({"id": 7, "t": want}))
    CsvSink(stream, table.schema).write(table)


def test_a_float32_is_its_shortest_decimal() -> None:
    table = pa.table({"f": pa.array([0.1], pa.float32()), "l": pa.array([[0.2]], pa.list_(pa.float32()))})
    stream = io.BytesIO()
    JsonlSink(stream).write(table)
    assert stream.getvalue() == b'{"f": 0.1, "l": [0.2]}\n'


def test_times_that_python_has_stay_as_they_are_beside_one_that_it_has_not() -> None:
    rows = readable_rows(pa.table({"t": pa.array([0, FAR], pa.timestamp("us"))}))
    assert rows == [{"t": datetime(1970, 1, 1)}, {"t": "10000-01-01T00:00:00.000000"}]


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((14, 3, 1_500_000_000), "P14M3DT1.5S"),
        ((0, 0, 0), "PT0S"),
        ((0, -2, 0), "P-2D"),
        ((0, 0, -90 * 10**9), "PT-90S"),
        (None, None),
    ],
)
def test_an_interval_is_iso_text(interval: Any, text: str | None) -> None:
    kind = pa.month_day_nano_interval()
    table = pa.table({"i": pa.array([interval], kind), "n": pa.array([[interval]], pa.list_(kind))})
    assert readable_rows(table) == [{"i": text, "n": [text]}]
    maps = pa.array([[("k", interval)]], pa.map_(pa.string(), kind))
    assert readable_rows(pa.table({"m": maps})) == [{"m": [("k", text)]}]

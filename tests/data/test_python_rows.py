"""Arrow's values that Python cannot hold: nanoseconds are cut, all else is an error of its row and of no other."""

from __future__ import annotations

from datetime import datetime, time, timedelta
from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.python_rows import python_rows


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_nanoseconds_are_cut_to_microseconds_wherever_they_are() -> None:
    stamps = pa.array([1_001, None], pa.timestamp("ns"))
    rows, errors = python_rows(
        batch(
            stamp=stamps,
            duration=pa.array([2_001, None], pa.duration("ns")),
            time=pa.array([3_001, None], pa.time64("ns")),
            struct=pa.StructArray.from_arrays([stamps], ["inside"]),
            list=pa.ListArray.from_arrays([0, 1, 2], stamps),
            utc=stamps.cast(pa.timestamp("ns", "UTC")),
        )
    )
    stamp = datetime(1970, 1, 1, 0, 0, 0, 1)
    assert errors == {}
    assert rows[0]["utc"].replace(tzinfo=None) == stamp and rows[0]["utc"].tzinfo is not None
    assert [rows[0][name] for name in ("stamp", "duration", "time", "struct", "list")] == [
        stamp,
        timedelta(microseconds=2),
        time(0, 0, 0, 3),
        {"inside": stamp},
        [stamp],
    ]
    assert rows[1] == dict.fromkeys(rows[0]) | {"struct": {"inside": None}, "list": [None]}


@pytest.mark.parametrize(
    ("good", "bad", "type_"),
    [
        (1, 10**12, pa.timestamp("s")),
        (1, -(10**12), pa.timestamp("s")),
        (1, 2**62, pa.timestamp("us")),
        (1, 10**8, pa.date32()),
        (1, 2**62, pa.duration("s")),
        (None, 1, pa.timestamp("us", "Nowhere/Bad")),
    ],
)
def test_a_value_that_python_cannot_hold_is_an_error_of_its_row(good: Any, bad: int, type_: pa.DataType) -> None:
    rows, errors = python_rows(batch(text=["a", "b", "c"], t=pa.array([good, bad, good], type_)))
    assert [row["text"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["t"] is None and rows[0]["t"] == rows[2]["t"] == pa.scalar(good, type_).as_py()
    assert {row: error.code for row, error in errors.items()} == {1: "bad_input"}
    assert "column 't'" in errors[1].message and str(type_) in errors[1].message


def test_a_row_with_two_such_values_has_one_error_the_first() -> None:
    far = pa.array([0, 10**8], pa.date32())
    assert {row: error.message[:10] for row, error in python_rows(batch(a=far, b=far))[1].items()} == {1: "column 'a'"}

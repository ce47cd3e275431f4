"""Arrow's values that Python cannot hold: nanoseconds are cut, all else is an error of its row and of no other."""

from __future__ import annotations

from datetime import datetime, time, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.data.inputs.python_rows import python_rows, with_short_floats, with_text


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
            large=pa.LargeListArray.from_arrays([0, 1, 2], stamps),
            fixed=pa.FixedSizeListArray.from_arrays(stamps, 1),
            map=pa.MapArray.from_arrays([0, 1, 2], ["k", "k"], stamps),
            utc=stamps.cast(pa.timestamp("ns", "UTC")),
        )
    )
    stamp = datetime(1970, 1, 1, 0, 0, 0, 1)
    assert errors == {}
    assert rows[0]["utc"].replace(tzinfo=None) == stamp and rows[0]["utc"].tzinfo is not None
    assert [rows[0][name] for name in list(rows[0])[:-1]] == [
        stamp,
        timedelta(microseconds=2),
        time(0, 0, 0, 3),
        {"inside": stamp},
        [stamp],
        [stamp],
        [stamp],
        [("k", stamp)],
    ]
    lists = {"list": [None], "large": [None], "fixed": [None], "map": [("k", None)]}
    assert rows[1] == dict.fromkeys(rows[0]) | {"struct": {"inside": None}} | lists


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


def test_bytes_are_their_text_wherever_they_are_and_those_that_are_none_are_an_error_of_their_row() -> None:
    values = [b"\xc3\xa9", None, b"\xff\xff", b"ab"]
    given = batch(
        text=["a", "b", "c", "d"],
        bytes=pa.array(values),
        large=pa.array(values, pa.large_binary()),
        fixed=pa.array(values, pa.binary(2)),
        list=pa.array([[value] for value in values]),
        struct=pa.array([{"a": value} for value in values]),
    )
    rows, errors = with_text(given)
    good = ["é", None, "ab"]
    for name in ("bytes", "large", "fixed"):
        assert rows.column(name).to_pylist() == [*good[:2], None, good[2]]
    assert rows.column("list").to_pylist() == [["é"], [None], None, ["ab"]]
    assert rows.column("struct").to_pylist() == [{"a": "é"}, {"a": None}, None, {"a": "ab"}]
    assert rows.column("text").to_pylist() == ["a", "b", "c", "d"]
    assert {row: (error.code, error.message[:30]) for row, error in errors.items()} == {
        2: ("bad_input", "column 'bytes': bytes that are")
    }
    assert with_text(given.select([]))[0].num_rows == 4


def test_a_float32_is_its_shortest_decimal_wherever_it_is() -> None:
    floats = pa.array([0.1, None, 3.4028235e38], pa.float32())
    rows = batch(
        float=floats,
        double=pa.array([0.1, float(floats[0].as_py()), None], pa.float64()),
        fixed=pa.FixedSizeListArray.from_arrays(pa.array([0.2] * 3, pa.float32()), 1),
        struct=pa.StructArray.from_arrays([floats, pa.array(["a", "b", "c"])], ["inside", "beside"]),
        map=pa.MapArray.from_arrays([0, 1, 2, 3], ["k", "l", "m"], floats),
        none=pa.array([float("nan"), float("-inf"), -0.0], pa.float32()),
    )
    shown = with_short_floats(rows).to_pylist()
    assert [str(row.pop("none")) for row in shown] == ["nan", "-inf", "-0.0"]
    assert shown[0] == {
        "float": 0.1,
        "double": 0.1,
        "fixed": [0.2],
        "struct": {"inside": 0.1, "beside": "a"},
        "map": [("k", 0.1)],
    }
    assert shown[1]["float"] is None and shown[1]["double"] == 0.10000000149011612
    assert shown[2]["float"] == 3.4028235e38


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_the_shortest_decimal_is_still_the_same_float32(values: list[float]) -> None:
    floats = pa.array(values, pa.float32())
    shown = with_short_floats(batch(x=floats)).column("x")
    assert shown.cast(pa.float32()).equals(floats)
    assert shown.to_pylist() == [float(str(np.float32(value))) for value in values]

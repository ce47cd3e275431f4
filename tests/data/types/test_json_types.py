from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.types.json_types import JsonType, KeyCounts, Shape, find_mismatch, json_type


def resolved(values: list[Any], known: JsonType | None = None) -> JsonType:
    shape = Shape()
    for value in values:
        shape.add(value)
    return shape.resolve(known)


DEEP = pa.struct([("a", pa.float64()), ("b", pa.list_(pa.int64()))])
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@pytest.mark.parametrize(
    ("values", "arrow"),
    [
        ([1, 2, None], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([1.0, 2.0], pa.float64()),
        ([1, 2.0], pa.float64()),
        ([2**53 + 1, 2.0], pa.int64()),
        ([2**53 + 1] * 9 + [2.5], pa.int64()),
        ([2**53 + 1] * 8 + [2.5, 3.5], pa.float64()),
        ([True, False], pa.bool_()),
        (["a", None], pa.string()),
        ([[{"role": "user", "content": "hi"}], [], None], MESSAGES),
        ([{"a": 1}, {"b": ["x"]}], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
        ([{"a": None}], pa.struct([("a", pa.string())])),
        (["a"] * 19 + [5], pa.string()),
        ([7] * 9 + ["seven"], pa.int64()),
    ],
)
def test_a_column_whose_sample_agrees_has_that_type(values: list[Any], arrow: pa.DataType) -> None:
    want = resolved(values)
    assert want.kind != "text"
    assert want.arrow() == arrow


@pytest.mark.parametrize(
    "values",
    [
        [None, None],
        [],
        [[], []],
        [{}],
        [1, "a"],
        [True, 1],
        [[1], {"a": 1}],
        [[1, "a"]],
        [[{"content": "x"}], [{"content": ["part"]}]],
        [{f"user{i}": i} for i in range(100)],
        [2**70, 2**70],
    ],
)
def test_a_column_without_one_type_is_text(values: list[Any]) -> None:
    assert resolved(values).kind == "text"
    assert resolved(values).arrow() == pa.string()


@pytest.mark.parametrize(
    ("values", "known", "arrow"),
    [
        ([None], pa.int64(), pa.int64()),
        ([], pa.bool_(), pa.bool_()),
        ([None, []], pa.list_(pa.int64()), pa.list_(pa.int64())),
        ([[], [None]], pa.list_(pa.list_(pa.bool_())), pa.list_(pa.list_(pa.bool_()))),
        ([[]], pa.int64(), pa.string()),
        ([{"a": None, "b": []}], DEEP, DEEP),
        (
            [{"a": None, "b": None}],
            pa.struct([("a", pa.float64())]),
            pa.struct([("a", pa.float64()), ("b", pa.string())]),
        ),
        ([None], pa.timestamp("us"), pa.string()),
        ([None], pa.list_(pa.date32()), pa.string()),
        ([{}], pa.struct([("a", pa.date32()), ("b", pa.int64())]), pa.string()),
        (["a"], pa.int64(), pa.string()),
        ([1, 2], pa.string(), pa.string()),
        ([{"a": 1}], pa.string(), pa.string()),
        ([{}], pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int64())])),
        ([[]], pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int64())])),
        ([{}], pa.list_(pa.int64()), pa.list_(pa.int64())),
        (
            [{"b": {}}],
            pa.struct([("b", pa.struct([("c", pa.bool_())]))]),
            pa.struct([("b", pa.struct([("c", pa.bool_())]))]),
        ),
        ([1, 2], pa.float64(), pa.float64()),
        ([1, 2**53 + 1], pa.float64(), pa.int64()),
        ([[1]], pa.list_(pa.float64()), pa.list_(pa.float64())),
        ([{"a": [2]}], pa.struct([("a", pa.list_(pa.float64()))]), pa.struct([("a", pa.list_(pa.float64()))])),
        ([1.0, 2.0], pa.int64(), pa.int64()),
        ([1.0, 2.5], pa.int64(), pa.float64()),
    ],
)
def test_where_the_sample_tells_nothing_the_type_is_the_known_one(
    values: list[Any], known: pa.DataType, arrow: pa.DataType
) -> None:
    assert resolved(values, json_type(known)).arrow() == arrow


@pytest.mark.parametrize("values", [[None], ["a"], [1]])
def test_a_column_that_is_known_as_strings_may_still_be_one_of_text(values: list[Any]) -> None:
    assert resolved(values, json_type(pa.string())).kind == "text"


def test_a_mismatch_names_the_place_inside_the_column() -> None:
    want = resolved([[{"role": "user", "content": "hi"}]])
    value = [{"role": "user", "content": "hi"}, {"role": "user", "content": 5}]
    assert "m[1].content: integer 5" in (find_mismatch(value, want, "m", KeyCounts()) or "")
    assert find_mismatch("secret" * 9, want, "m", KeyCounts()) == (
        'column m: string "secretsecretsecrets... where the other rows have a list'
    )


def test_keys_that_the_type_lacks_are_counted() -> None:
    counts = KeyCounts()
    assert find_mismatch([{"a": 1, "b": 2}, {"b": 3}], resolved([[{"a": 1}]]), "m", counts) is None
    assert counts.counts == {"m.b": 2}


def test_the_names_that_are_remembered_are_bounded() -> None:
    counts = KeyCounts()
    for number in range(3 * KeyCounts.MAX_NAMES):
        counts.add(str(number))
    assert len(counts.counts) == KeyCounts.MAX_NAMES

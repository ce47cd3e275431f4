"""Which values have no place in the results' columns: exactly those that a cast would refuse or change."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.update.fitting import find_unfit, without

FAR = 253_402_214_400_000_000  # the last day of 9999, in microseconds


@given(st.lists(st.sampled_from([0, 5, None, 2**53, 2**53 + 1, -(2**60)]), max_size=40), st.integers(0, 5))
def test_integers_beyond_doubles_are_found_one_by_one(numbers: list[int | None], start: int) -> None:
    column = pa.array(numbers, pa.int64()).slice(start)
    unfit = find_unfit(column, pa.float64())
    assert set(unfit) == {place for place, number in enumerate(numbers[start:]) if number in (2**53 + 1, -(2**60))}
    assert without(column, unfit).cast(pa.float64()).null_count == len(unfit) + column.null_count


@pytest.mark.parametrize(
    ("column", "kind", "bad"),
    [
        (pa.array([1, FAR, None], pa.timestamp("us")), pa.timestamp("ns"), {1}),
        (pa.array([[1], [2, 2**53 + 1], None]), pa.list_(pa.float64()), {1}),
        (pa.array([[2**53 + 1], [3], [4]]).slice(2), pa.list_(pa.float64()), set()),
        (pa.array([{"a": 2**60 + 1}, {"a": 1}]), pa.struct([("a", pa.float64())]), {0}),
        (pa.chunked_array([[1, 2], [2**53 + 1], [4]]), pa.float64(), {2}),
        (pa.array(["a", None]), pa.large_string(), set()),
    ],
)
def test_values_of_many_types(column: pa.Array, kind: pa.DataType, bad: set[int]) -> None:
    unfit = find_unfit(column, kind)
    assert set(unfit) == bad
    kept = [None if place in bad else value for place, value in enumerate(column.to_pylist())]
    assert without(column, unfit).cast(kind).to_pylist() == pa.array(kept, kind).to_pylist()

"""Which values have no place in the results' columns: exactly those that a cast would refuse or change."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.data.inputs.reader import open_input
from bulkrun.job.update.fitting import find_unfit, fit_dataset, fit_table, without
from tests.job.plan.planning import write_jsonl

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


def test_a_value_that_does_not_fit_is_taken_out_of_a_row_that_has_an_error_of_its_own(tmp_path: Path) -> None:
    rows = [{"id": row, "n": row} for row in range(19)]
    path = write_jsonl(tmp_path / "in.jsonl", [*rows, {"id": 2**53 + 1, "n": [1]}])
    with open_input(str(path)) as dataset:
        [batch] = fit_dataset(dataset, ["id"], pa.schema([("id", pa.float64())])).batches()
    assert batch.rows["id"].cast(pa.float64()).to_pylist() == [*range(19), None]
    assert "column n: a list" in batch.errors[19].message, "the first thing that is wrong with it"


def test_a_result_that_does_not_fit_has_an_error_unless_it_has_one() -> None:
    schema = pa.schema([("n", pa.float64()), ("error_code", pa.string()), ("error_message", pa.string())])
    rows = {
        "n": [2**53 + 1, 2**53 + 1, 1],
        "error_code": ["timeout", None, None],
        "error_message": ["over", None, None],
    }
    fitted = fit_table(pa.table(rows), schema).to_pydict()
    assert (fitted["n"], fitted["error_code"]) == ([None, None, 1.0], ["timeout", "bad_input", None])
    assert fitted["error_message"][0] == "over" and "column 'n'" in fitted["error_message"][1]

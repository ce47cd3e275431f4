"""A sample is of rows that can run, each as likely as any other, and the same however the rows come."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.plan.row_sample import RowSample

NAMES = ["row", "row_id", "token_ids", "overrides", "error_code"]


def batch(first: int, end: int, error_every: int = 4) -> pa.RecordBatch:
    rows = range(first, end)
    codes = ["bad_input" if row % error_every == 0 else None for row in rows]
    columns = [list(rows), [f"r{row}" for row in rows], [[row] for row in rows], [None for _ in rows], codes]
    kinds = [pa.int64(), pa.string(), pa.list_(pa.int32()), pa.string(), pa.string()]
    return pa.record_batch([pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], names=NAMES)


def sampled(size: int, borders: list[int]) -> list[int]:
    sample = RowSample(size)
    for first, end in itertools.pairwise(borders):
        sample.add(batch(first, end))
    return [row["row"] for row in sample.rows()]


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 40))
def test_it_does_not_depend_on_batches(borders: list[int], size: int) -> None:
    whole = sampled(size, [0, 300])
    assert sampled(size, [0, *sorted(borders), 300]) == whole
    assert len(set(whole)) == len(whole) == size and all(row % 4 for row in whole)


def test_an_input_that_is_smaller_is_all_of_it() -> None:
    assert sorted(sampled(50, [0, 8])) == [1, 2, 3, 5, 6, 7] and sampled(50, [0, 1]) == []


def test_rows_of_every_part_of_the_input_are_in_it() -> None:
    rows = sampled(3000, list(range(0, 40_001, 1000)))
    tenths = [sum(row // 4000 == tenth for row in rows) for tenth in range(10)]
    assert min(tenths) > 240 and max(tenths) < 360 and sum(rows) / 3000 == pytest.approx(20_000, rel=0.05)

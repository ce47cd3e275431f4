from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.plan.cut import MAX_SHARD_ROWS, Limits, cut
from bulkrun.job.plan.order import RunOrder

# One entry per prompt: cost, bytes of each copy, copies.
units = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300), st.integers(1, 5)), max_size=60)


def window(units: list[tuple[int, int, int]]) -> tuple[RunOrder, np.ndarray, np.ndarray]:
    """A window whose rows are already in order: each prompt's copies one after the other."""
    first = [copy == 0 for _, _, copies in units for copy in range(copies)]
    costs = [cost for cost, _, copies in units for _ in range(copies)]
    sizes = [size for _, size, copies in units for _ in range(copies)]
    order = RunOrder(np.arange(len(first)), np.array(first, np.bool_), np.array([len(first)]))
    return order, np.array(costs, np.int64), np.array(sizes, np.int64)


@settings(max_examples=200)
@given(units, st.integers(1, 40), st.integers(1, 2000), st.integers(1, 12))
def test_shards_are_whole_within_limits_balanced_and_keep_copies_together(
    units: list[tuple[int, int, int]], rows: int, nbytes: int, shards: int
) -> None:
    order, costs, sizes = window(units)
    borders = cut(order, costs, sizes, Limits(rows, nbytes, shards))
    assert borders[0] == 0 and borders[-1] == len(order.rows) and (np.diff(borders) > 0).all()
    fresh = np.where(order.first, costs, 0)
    target = max(1, -(-int(fresh.sum()) // shards))
    for start, end in pairwise(borders):
        assert end - start <= rows
        assert sizes[start:end].sum() <= nbytes or end - start == 1
        assert fresh[start:end].sum() <= max(target * 5 // 4, fresh[start])
        if end < len(order.rows) and not order.first[end]:  # copies were parted: they did not fit into one shard
            unit = int(np.flatnonzero(order.first[: start + 1])[-1])
            stop = next((at for at in range(unit + 1, len(order.first)) if order.first[at]), len(order.first))
            assert start >= unit
            assert stop - start > rows or sizes[start:stop].sum() > nbytes


@given(st.integers(200, 3000), st.integers(0, 2**32 - 1))
def test_costs_differ_by_less_than_the_largest_prompt_but_for_the_last_shard(count: int, seed: int) -> None:
    costs = np.sort(np.random.default_rng(seed).integers(1, 1000, count))[::-1].copy()
    order = RunOrder(np.arange(count), np.ones(count, np.bool_), np.array([count]))
    limits = Limits.of(count, count, None)
    borders = cut(order, costs, np.ones(count, np.int64), limits)
    per_shard = np.add.reduceat(costs, borders[:-1])
    assert limits.shards <= len(per_shard) <= limits.shards + 2
    assert per_shard[:-1].max() - per_shard[:-1].min() <= costs.max()


@pytest.mark.parametrize(
    ("total", "rows", "shards"),
    [(100, 100, 2), (1000, 1000, 16), (65_536, 65_536, 16), (10**6, 10**6, 245), (10**6, 500, 1)],
)
def test_the_number_of_shards_follows_the_input(total: int, rows: int, shards: int) -> None:
    assert Limits.of(total, rows, None).shards == shards


@pytest.mark.parametrize(("generations", "rows"), [(1, 4096), (16, 256), (3, 1365), (100_000, 1)])
def test_rows_with_many_generations_are_fewer_in_a_shard(generations: int, rows: int) -> None:
    """A worker's memory holds all outcomes of a shard."""
    limits = Limits.of(10**6, 10**5, None, generations)
    assert (limits.rows, limits.shards) == (rows, -(-(10**5) // rows))
    assert Limits.of(10**6, 1000, 37, generations).rows == 37, "the job's own is a hard limit"


def test_the_jobs_own_shard_rows_is_a_hard_limit() -> None:
    assert Limits.of(10**6, 1000, 37) == Limits(37, Limits.of(1, 1, None).nbytes, 28)


def test_a_small_rest_of_a_partition_goes_with_the_shard_before_it() -> None:
    order = RunOrder(np.arange(20), np.ones(20, np.bool_), np.array([11, 20]))
    ones = np.ones(20, np.int64)
    assert cut(order, ones, ones, Limits(rows=1000, nbytes=10**6, shards=4)).tolist() == [0, 5, 11, 16, 20]


def test_error_rows_cost_nothing_and_still_fit_into_shards() -> None:
    count = MAX_SHARD_ROWS * 2 + 5
    order = RunOrder(np.arange(count), np.ones(count, np.bool_), np.array([count]))
    zeros = np.zeros(count, np.int64)
    assert np.diff(cut(order, zeros, zeros, Limits.of(count, count, None))).tolist() == [
        MAX_SHARD_ROWS,
        MAX_SHARD_ROWS,
        5,
    ]

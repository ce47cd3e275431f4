from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.plan.index import BLOCK_TOKENS as B
from bulkrun.job.plan.order import run_order, shared_prefix_tokens
from tests.job.plan.test_index import build, prompts


def ordered(rows: list[list[int]]) -> list[list[int]]:
    return [rows[row] for row in run_order(build(rows)).rows]


def is_together(places: list[int]) -> bool:
    return max(places) - min(places) == len(places) - 1


@settings(max_examples=60)
@given(prompts)
def test_every_row_is_in_the_order_once_and_clusters_are_together(rows: list[list[int]]) -> None:
    order = run_order(build(rows))
    assert sorted(order.rows.tolist()) == list(range(len(rows)))
    result = [rows[row] for row in order.rows]
    for depth in (B, 2 * B, 4 * B):
        for prefix in {tuple(row[:depth]) for row in result if len(row) >= depth}:
            assert is_together([place for place, row in enumerate(result) if tuple(row[:depth]) == prefix])
    for prompt in {tuple(row) for row in result if row}:
        places = [place for place, row in enumerate(result) if tuple(row) == prompt]
        assert is_together(places)
        assert order.first[places].tolist() == [True] + [False] * (len(places) - 1)


@settings(max_examples=60)
@given(prompts, st.randoms(use_true_random=False))
def test_the_order_of_prompts_does_not_depend_on_the_order_of_rows(rows: list[list[int]], rng: object) -> None:
    shuffled = list(rows)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ordered(shuffled) == ordered(rows)


def test_long_work_comes_first_short_work_last_and_errors_after_everything() -> None:
    assert [len(row) for row in ordered([[5] * 7, [], [6] * 90, [7] * 15, [8] * 40, []])] == [90, 40, 15, 7, 0, 0]


def test_a_cluster_comes_by_its_mean_and_its_rows_longest_first() -> None:
    cluster = [[1] * B + [number] * extra for number, extra in ((2, 60), (3, 2), (4, 30))]
    rows = [cluster[1], [9] * 300, cluster[0], [8] * 20, cluster[2]]
    assert ordered(rows) == [rows[1], cluster[0], cluster[2], cluster[1], rows[3]]


@settings(max_examples=60)
@given(prompts)
def test_savings_are_what_a_tree_of_the_indexed_depths_saves(rows: list[list[int]]) -> None:
    index = build(rows)
    unique = {tuple(row) for row in rows if row}
    saved = 0
    for above, depth in ((0, B), (B, 2 * B), (2 * B, 4 * B), (4 * B, 8 * B)):
        deep = [row for row in unique if len(row) >= depth]
        saved += (len(deep) - len({row[:depth] for row in deep})) * (depth - above)
    assert shared_prefix_tokens(index, run_order(index)) == saved


def test_prefixes_that_collide_only_make_the_order_worse() -> None:
    index = build([[1] * 20, [2] * 50, [3] * 30, []])
    collided = type(index)(**{**vars(index), "prefixes": np.zeros_like(index.prefixes)})
    assert sorted(run_order(collided).rows.tolist()) == [0, 1, 2, 3]

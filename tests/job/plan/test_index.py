from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.plan.index import BLOCK_TOKENS, IndexBuilder, WindowIndex


def build(prompts: list[list[int]], *, batch: int = 3, variants: list[int] | None = None) -> WindowIndex:
    """The index of prompts that came in batches; an empty prompt is an error row."""
    builder = IndexBuilder(0)
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        lengths = np.array([len(prompt) for prompt in part], np.int64)
        tokens = np.array([token for prompt in part for token in prompt], np.int32)
        chosen = np.array(variants[start : start + batch] if variants else [0] * len(part), np.uint64)
        builder.add(tokens, lengths, np.ones(len(part), np.int64), lengths, chosen, lengths > 0)
    return builder.finish()


tokens = st.lists(st.integers(0, 3), max_size=3)
block = st.sampled_from([[1] * BLOCK_TOKENS, [2] * BLOCK_TOKENS, [1, 2] * (BLOCK_TOKENS // 2)])
prompts = st.lists(
    st.builds(lambda blocks, rest: [*chain(*blocks), *rest], st.lists(block, max_size=5), tokens),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60)
@given(prompts)
def test_hashes_are_equal_exactly_where_prompts_and_prefixes_are(prompts: list[list[int]]) -> None:
    index = build(prompts)
    for a, one in enumerate(prompts):
        for b, other in enumerate(prompts):
            same = a == b or (one == other and len(one) > 0)
            assert (index.identity[a] == index.identity[b]).all() == same
            for level in range(index.prefixes.shape[1]):
                depth = BLOCK_TOKENS << level
                deep = len(one) >= depth and len(other) >= depth
                shared = one[:depth] == other[:depth] if deep else one == other
                assert (index.prefixes[a, level] == index.prefixes[b, level]) == shared


@settings(max_examples=60)
@given(prompts, st.integers(1, 5))
def test_how_rows_were_batched_does_not_matter(prompts: list[list[int]], batch: int) -> None:
    one, other = build(prompts), build(prompts, batch=batch)
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in WindowIndex.__dataclass_fields__)


def test_the_order_of_tokens_and_the_sampling_are_part_of_the_identity() -> None:
    index = build([[1, 2], [2, 1], [1, 2], [1, 2]], variants=[0, 0, 7, 0])
    assert (index.identity[0] == index.identity[3]).all()
    assert len({tuple(row) for row in index.identity[:3].tolist()}) == 3


def test_no_two_of_many_random_prompts_collide() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 50_000)
    builder = IndexBuilder(0)
    flat = rng.integers(0, 4096, lengths.sum()).astype(np.int32)
    zeros, true = np.zeros(len(lengths), np.int64), np.ones(len(lengths), np.bool_)
    builder.add(flat, lengths, zeros, zeros, zeros.astype(np.uint64), true)
    distinct = {tuple(part) for part in np.split(flat, np.cumsum(lengths)[:-1])}
    assert len(np.unique(builder.finish().identity, axis=0)) == len(distinct)


def test_a_windows_index_is_bounded_per_row() -> None:
    index = build([[1] * 40_000, [2]])
    assert sum(getattr(index, name)[0].nbytes for name in WindowIndex.__dataclass_fields__) <= 3 * 8 + 2 * 8 + 13 * 8

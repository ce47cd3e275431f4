"""Pooling over packed hidden states equals a loop over the texts; bits do not depend on the neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.pooling import finished, kept_tokens, mean_pooled

LENS = st.lists(st.integers(1, 40), min_size=1, max_size=20).map(sorted)


def packed(lens: list[int]) -> PackedTexts:
    return PackedTexts.of([list(range(length)) for length in lens], torch.device("cpu"))


@given(LENS)
def test_each_token_knows_its_text_and_place(lens: list[int]) -> None:
    texts = packed(lens)
    text_T = texts.text_of_token()
    assert text_T.tolist() == [number for number, length in enumerate(lens) for _ in range(length)]
    assert texts.positions(text_T).tolist() == texts.token_ids_T.tolist()
    first, end = len(lens) // 3, len(lens)
    assert texts.slice(first, end).token_ids_T.tolist() == [p for length in lens[first:end] for p in range(length)]


@given(LENS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_vectors_are_those_of_a_loop(lens: list[int], dtype: torch.dtype) -> None:
    texts = packed(lens)
    hidden_TE = torch.randn(sum(lens), 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    states = hidden_TE.split(lens)
    first, last = kept_tokens(texts, "cls"), kept_tokens(texts, "last")
    assert first is not None
    assert last is not None
    assert kept_tokens(texts, "mean") is None
    assert torch.equal(hidden_TE[first], torch.stack([own[0] for own in states]))
    assert torch.equal(hidden_TE[last], torch.stack([own[-1] for own in states]))
    means = mean_pooled(hidden_TE, texts.lens_S)
    # sums of at most 40 numbers, in float32 whatever they were stored in
    torch.testing.assert_close(means, torch.stack([own.double().mean(0) for own in states]).float())
    alone = torch.cat([mean_pooled(own, torch.tensor([len(own)])) for own in states])
    assert torch.equal(means, alone)


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_cut_before_they_are_normalized(normalize: bool) -> None:
    vectors = torch.tensor([[3.0, 4.0, 12.0], [0.0, 0.0, 5.0]])
    cut = finished(vectors, 2, normalize=normalize)
    assert cut.is_contiguous()
    expected = [[0.6, 0.8], [0.0, 0.0]] if normalize else [[3.0, 4.0], [0.0, 0.0]]
    torch.testing.assert_close(cut, torch.tensor(expected))


def test_numbers_that_are_not_finite_stay_so() -> None:
    vectors = finished(torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0], [1.0, 0.0]]), 2, normalize=True)
    assert vectors.isfinite().all(1).tolist() == [False, False, True]

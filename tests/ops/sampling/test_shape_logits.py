"""Masks bit by bit, penalties beside transformers' and by hand: reference, Triton and compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from bulkrun import ops
from bulkrun.ops.cpu import shape_logits as compiled
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.sampling import shape_logits as reference
from bulkrun.ops.triton import shape_logits as in_triton

needs_compiled = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
MASKS = pytest.mark.parametrize(
    "op",
    [
        pytest.param(reference.apply_token_masks, id="reference"),
        pytest.param(in_triton.apply_token_masks, id="triton"),
        pytest.param(compiled.apply_token_masks, id="compiled", marks=needs_compiled),
    ],
)
PENALTY_TWINS = [
    pytest.param(in_triton.apply_penalties, id="triton"),
    pytest.param(compiled.apply_penalties, id="compiled", marks=needs_compiled),
]
PENALTIES = pytest.mark.parametrize("op", [pytest.param(reference.apply_penalties, id="reference"), *PENALTY_TWINS])


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 2


def penalize(op: Any, logits: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> None:
    """In place, wherever the op works."""
    device = "cuda" if op is in_triton.apply_penalties and torch.cuda.is_available() else "cpu"
    changed = logits.to(device)
    op(changed, *(one.to(device) for one in args), **{name: one.to(device) for name, one in kwargs.items()})
    logits.copy_(changed)


@MASKS
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 130, 256, 5000])
@pytest.mark.parametrize("num_words", [1, 4, 5, 9, 157])
def test_masks_keep_their_tokens_and_forbid_those_beyond_them(op: Any, vocab: int, num_words: int) -> None:
    """A model's logits may be padded beyond the tokenizer's tokens, or the other way round."""
    device = "cuda" if op is in_triton.apply_token_masks and torch.cuda.is_available() else "cpu"
    before = random_logits(7, vocab)
    words = torch.randint(-(2**31), 2**31, (3, num_words), generator=torch.Generator().manual_seed(1))
    rows = [5, 0, 3]
    got = before.clone().to(device)
    op(got, words.int().to(device), torch.tensor(rows, device=device))
    for row in range(7):
        if row not in rows:
            assert torch.equal(got[row].cpu(), before[row])
            continue
        bits = [int(word) >> bit & 1 for word in words[rows.index(row)] for bit in range(32)]
        allowed = torch.tensor((bits + [0] * vocab)[:vocab], dtype=torch.bool)
        assert torch.equal(got[row].cpu(), torch.where(allowed, before[row], -math.inf))


@PENALTIES
def test_repetition_penalty_counts_prompt_and_output_as_transformers(op: Any) -> None:
    logits, ids = random_logits(5, 61), torch.randint(0, 61, (3, 12), generator=torch.Generator().manual_seed(4))
    rows = torch.tensor([4, 0, 2])
    expected = logits.clone()
    expected[rows] = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[rows])
    penalize(
        op, logits, rows, ids, torch.full((3,), 7), torch.full((3,), 12),
        presence_A=torch.zeros(3), frequency_A=torch.zeros(3), repetition_A=torch.full((3,), 1.7),
    )  # fmt: skip
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@PENALTIES
def test_presence_and_frequency_penalties_count_output_only(op: Any) -> None:
    logits = torch.zeros(2, 8)
    ids = torch.tensor([[5, 5, 1, 1, 2, 7], [3, 3, 3, 0, 0, 0]])  # row 0: prompt 5 5, output 1 1 2, then leftovers
    penalize(
        op, logits, torch.arange(2), ids, torch.tensor([2, 3]), torch.tensor([5, 3]),
        presence_A=torch.tensor([0.5, 0.5]), frequency_A=torch.tensor([0.25, 0.25]), repetition_A=torch.ones(2),
    )  # fmt: skip
    assert logits.tolist() == [[0.0, -1.0, -0.75, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 8]


@PENALTIES
def test_neutral_penalties_change_nothing(op: Any) -> None:
    logits, ids = random_logits(2, 31), torch.randint(0, 31, (2, 9))
    penalize(
        op, logits, torch.arange(2), ids, torch.tensor([4, 9]), torch.tensor([9, 9]),
        presence_A=torch.zeros(2), frequency_A=torch.zeros(2), repetition_A=torch.ones(2),
    )  # fmt: skip
    assert torch.equal(logits, random_logits(2, 31))


@pytest.mark.parametrize("op", PENALTY_TWINS)
@settings(max_examples=40)
@given(
    vocab=st.integers(1, 300),
    width=st.integers(1, 600),
    num_rows=st.integers(1, 9),
    seed=st.integers(0, 999),
)
def test_any_penalties_are_the_reference_s(op: Any, vocab: int, width: int, num_rows: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows + 3, vocab, generator=rng)
    total = torch.randint(1, width + 1, (num_rows,), generator=rng)
    args = (
        torch.randperm(num_rows + 3, generator=rng)[:num_rows],
        torch.randint(0, vocab, (num_rows, width), generator=rng, dtype=torch.int32),
        (total * torch.rand(num_rows, generator=rng)).long(),
        total,
    )
    kwargs = {name: torch.rand(num_rows, generator=rng) * 2 for name in ("presence_A", "frequency_A", "repetition_A")}
    kwargs["repetition_A"] += 0.1
    ours, expected = logits.clone(), logits.clone()
    penalize(op, ours, *args, **kwargs)
    reference.apply_penalties(expected, *args, **kwargs)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_more_rows_than_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "_MAX_COUNTS", 4 * 50)
    logits, ids = random_logits(10, 50), torch.randint(0, 50, (10, 25), dtype=torch.int32)[:, :20]
    ours, expected = logits.clone(), logits.clone()
    args = (torch.randperm(10), ids, torch.full((10,), 4), torch.arange(10, 20))
    kwargs = {name: torch.rand(10) + 0.5 for name in ("presence_A", "frequency_A", "repetition_A")}
    penalize(in_triton.apply_penalties, ours, *args, **kwargs)
    reference.apply_penalties(expected, *args, **kwargs)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@needs_compiled
def test_rows_that_lie_apart_go_to_the_reference() -> None:
    wide, mask = random_logits(3, 80), torch.tensor([[0b1011]], dtype=torch.int32)
    expected = wide[:, ::2].clone()
    reference.apply_token_masks(expected, mask, torch.tensor([1]))
    compiled.apply_token_masks(wide[:, ::2], mask, torch.tensor([1]))
    assert torch.equal(wide[:, ::2], expected)


@needs_compiled
def test_masks_and_the_numbers_of_their_rows_may_lie_apart() -> None:
    logits, masks = random_logits(3, 64), torch.tensor([[0b1011, 0, 0b1], [0b110, 0, 0b1]], dtype=torch.int32)[:, ::2]
    ours, rows = logits.clone(), torch.tensor([2, 7, 0])[::2]
    reference.apply_token_masks(logits, masks, rows)
    compiled.apply_token_masks(ours, masks, rows)
    assert torch.equal(ours, logits)


def test_masked_tokens_stay_masked_behind_penalties_filters_and_noise() -> None:
    logits = random_logits(64, 70)
    mask = torch.zeros(64, 3, dtype=torch.int32)
    mask[:, 1] = 0b1011  # tokens 32, 33 and 35
    everyone = torch.arange(64)
    ops.apply_token_masks(logits, mask, everyone)
    ops.apply_penalties(
        logits,
        everyone,
        torch.tensor([[1, 33, 40]]).expand(64, -1),
        torch.ones(64, dtype=torch.int64),
        torch.full((64,), 3),
        presence_A=torch.full((64,), -2.0),
        frequency_A=torch.full((64,), -2.0),
        repetition_A=torch.full((64,), 0.1),
    )
    token_S, _ = ops.draw_tokens(
        logits,
        torch.full((64,), 50.0),
        everyone,
        everyone,
        min_p_S=torch.full((64,), 0.01),
        top_k_S=torch.full((64,), 20),
        top_p_S=torch.full((64,), 0.99),
    )
    assert set(token_S.tolist()) == {32, 33, 35}

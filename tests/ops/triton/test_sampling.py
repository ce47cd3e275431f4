"""Draws and masks in Triton beside the references, whose statistics tests/ops/test_sampling.py checks."""

from __future__ import annotations

import math

import pytest
import torch

from bulkrun.ops import sampling as reference
from bulkrun.ops.triton.sampling import apply_token_masks, apply_top_k_top_p, gumbel_sample

LARGE = pytest.param(128_256, marks=pytest.mark.gpu)


def seeds_and_positions(rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(3))
    return seeds.to(device), torch.arange(rows, device=device) * 1_000_003


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numpy says so; it wraps as it should
@pytest.mark.parametrize("vocab_size", [5, 4096, 9001, LARGE])
def test_draws_the_reference_s_tokens_and_the_maximum_where_greedy(device: str, vocab_size: int) -> None:
    logits_SV = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1)).to(device)
    logits_SV[:, ::3] = -math.inf
    logits_SV[3] = 0.0  # noise alone decides
    temperature_S = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.0], device=device)
    seed_S, position_S = seeds_and_positions(6, device)
    ours = gumbel_sample(logits_SV, temperature_S, seed_S, position_S)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, reference.gumbel_sample(logits_SV, temperature_S, seed_S, position_S))
    assert torch.equal(ours[[1, 4]], logits_SV[[1, 4]].argmax(-1))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_row_draws_the_same_token_alone(device: str) -> None:
    logits_SV, temperature_S = torch.randn(4, 5000, device=device), torch.ones(4, device=device)
    seed_S, position_S = seeds_and_positions(4, device)
    together = gumbel_sample(logits_SV, temperature_S, seed_S, position_S)
    alone = gumbel_sample(logits_SV[2:3], temperature_S[2:3], seed_S[2:3], position_S[2:3])
    assert torch.equal(alone, together[2:3])


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_logits_that_are_not_numbers_still_give_a_token_of_the_vocabulary(device: str) -> None:
    logits_SV = torch.full((2, 4099), math.nan, device=device)
    logits_SV[1] = -math.inf
    tokens = gumbel_sample(logits_SV, torch.tensor([1.0, 0.0], device=device), *seeds_and_positions(2, device))
    assert ((tokens >= 0) & (tokens < 4099)).all()


def test_no_rows(device: str) -> None:
    empty = torch.empty(0, device=device)
    assert gumbel_sample(torch.empty(0, 7, device=device), empty, empty.long(), empty.long()).shape == (0,)


@pytest.mark.parametrize(("vocab_size", "num_words"), [(70, 3), (70, 2), (5000, 157), (64, 4)])
def test_masks_forbid_what_the_reference_s_do(device: str, vocab_size: int, num_words: int) -> None:
    """Masks narrower and wider than the vocabulary too; rows without a mask stay as they are."""
    logits_SV = torch.randn(5, vocab_size, device=device)
    before = logits_SV.clone()
    mask_CW = torch.randint(-(2**31), 2**31 - 1, (3, num_words), dtype=torch.int32, device=device)
    row_C = torch.tensor([4, 0, 2], device=device)
    ours = apply_token_masks(logits_SV, mask_CW, row_C)
    assert torch.equal(ours, reference.apply_token_masks(logits_SV, mask_CW, row_C))
    assert torch.equal(logits_SV, before)


@pytest.mark.parametrize("vocab_size", [7, 3000, LARGE])
def test_top_k_and_top_p_keep_what_a_full_sort_keeps(device: str, vocab_size: int) -> None:
    settings = [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.9), (0, 0.01), (5, 0.5), (3, 0.99), (vocab_size + 5, 0.7)]
    logits_SV = (torch.randn(len(settings), vocab_size, generator=torch.Generator().manual_seed(2)) * 3).to(device)
    logits_SV[:, 1] = -math.inf
    top_k_S = torch.tensor([k for k, _ in settings], device=device)
    top_p_S = torch.tensor([p for _, p in settings], device=device)
    ours = apply_top_k_top_p(logits_SV, top_k_S, top_p_S)
    sorted_out = reference.apply_top_k_top_p(logits_SV, top_k_S, top_p_S)
    num_kept, num_sorted = ((x > -math.inf).sum(-1) for x in (ours, sorted_out))
    assert ((num_kept - num_sorted).abs() <= 1e-3 * num_sorted).all()  # their sums of a nucleus round differently
    highest_cut = torch.where(ours > -math.inf, -math.inf, logits_SV).amax(-1)
    assert (torch.where(ours > -math.inf, ours, math.inf).amin(-1) > highest_cut).all()
    assert torch.equal(ours[ours > -math.inf], logits_SV[ours > -math.inf])


def test_tokens_that_tie_with_the_last_one_kept_stay(device: str) -> None:
    logits_SV = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -0.0, -5.0]] * 4, device=device)
    top_k_S, top_p_S = torch.tensor([2, 5, 0, 4], device=device), torch.tensor([1.0, 1.0, 0.5, 0.6], device=device)
    ours = apply_top_k_top_p(logits_SV, top_k_S, top_p_S)
    assert (ours > -math.inf).sum(-1).tolist() == [4, 6, 4, 4]
    assert torch.equal(ours, reference.apply_top_k_top_p(logits_SV, top_k_S, top_p_S))


def test_the_likeliest_token_survives_any_cut(device: str) -> None:
    logits_SV = torch.tensor([[0.0, -math.inf, 9.0, 8.9]] * 2, device=device)
    ours = apply_top_k_top_p(logits_SV, torch.tensor([0, 1], device=device), torch.tensor([1e-9, 0.0], device=device))
    assert (ours > -math.inf).tolist() == [[False, False, True, False]] * 2

"""Draws and masks in Triton beside the references, whose statistics tests/ops/test_sampling.py checks."""

from __future__ import annotations

import math

import pytest
import torch

from bulkrun.ops import sampling as reference
from bulkrun.ops.triton.sampling import apply_token_masks, gumbel_sample

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

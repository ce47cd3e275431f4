"""Cuts in Triton beside the references, whose statistics tests/ops/test_sampling.py checks."""

from __future__ import annotations

import math

import pytest
import torch

from bulkrun.ops import sampling as reference
from bulkrun.ops.triton.sampling import apply_top_k_top_p

LARGE = pytest.param(128_256, marks=pytest.mark.gpu)


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

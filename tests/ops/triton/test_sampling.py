"""Cuts in Triton beside the references, whose statistics tests/ops/sampling checks, and beside float64."""

from __future__ import annotations

import math

import pytest
import torch

from bulkrun.ops.sampling import sampling as reference
from bulkrun.ops.sampling.draw_tokens import filtered
from bulkrun.ops.triton import sampling
from bulkrun.ops.triton.sampling import least_kept

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered")  # numpy's
LARGE = pytest.param(128_256, marks=pytest.mark.gpu)


def cut_logits(logits_SV: torch.Tensor, top_k_S: torch.Tensor, top_p_S: torch.Tensor) -> torch.Tensor:
    """The reference's result, by the threshold."""
    threshold_S = least_kept(logits_SV, torch.ones_like(top_p_S), None, top_k_S, top_p_S)
    return logits_SV.masked_fill(logits_SV < threshold_S[:, None], -math.inf)


@pytest.mark.parametrize("vocab_size", [7, 3000, LARGE])
def test_top_k_and_top_p_keep_what_a_full_sort_keeps(device: str, vocab_size: int) -> None:
    settings = [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.9), (0, 0.01), (5, 0.5), (3, 0.99), (vocab_size + 5, 0.7)]
    logits_SV = (torch.randn(len(settings), vocab_size, generator=torch.Generator().manual_seed(2)) * 3).to(device)
    logits_SV[:, 1] = -math.inf
    top_k_S = torch.tensor([k for k, _ in settings], device=device)
    top_p_S = torch.tensor([p for _, p in settings], device=device)
    ours = cut_logits(logits_SV, top_k_S, top_p_S)
    sorted_out = reference.apply_top_k_top_p(logits_SV, top_k_S, top_p_S)
    num_kept, num_sorted = ((x > -math.inf).sum(-1) for x in (ours, sorted_out))
    assert ((num_kept - num_sorted).abs() <= 1e-3 * num_sorted).all()  # their sums of a nucleus round differently
    highest_cut = torch.where(ours > -math.inf, -math.inf, logits_SV).amax(-1)
    assert (torch.where(ours > -math.inf, ours, math.inf).amin(-1) > highest_cut).all()
    assert torch.equal(ours[ours > -math.inf], logits_SV[ours > -math.inf])


def test_tokens_that_tie_with_the_last_one_kept_stay(device: str) -> None:
    logits_SV = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -0.0, -5.0]] * 4, device=device)
    top_k_S, top_p_S = torch.tensor([2, 5, 0, 4], device=device), torch.tensor([1.0, 1.0, 0.5, 0.6], device=device)
    ours = cut_logits(logits_SV, top_k_S, top_p_S)
    assert (ours > -math.inf).sum(-1).tolist() == [4, 6, 4, 4]
    assert torch.equal(ours, reference.apply_top_k_top_p(logits_SV, top_k_S, top_p_S))


def test_the_likeliest_token_survives_any_cut(device: str) -> None:
    logits_SV = torch.tensor([[0.0, -math.inf, 9.0, 8.9]] * 2, device=device)
    ours = cut_logits(logits_SV, torch.tensor([0, 1], device=device), torch.tensor([1e-9, 0.0], device=device))
    assert (ours > -math.inf).tolist() == [[False, False, True, False]] * 2


SPREADS = torch.tensor([0.01, 1.0, 4.0, 30.0, 0.0])
SIGNS = torch.tensor([1.0, -0.0, 0.0])
ROWS = {
    "random": lambda logits_SV: logits_SV,
    "ties": lambda logits_SV: logits_SV.round(),
    "one stands out": lambda logits_SV: logits_SV.index_fill(1, torch.tensor([logits_SV.shape[1] // 2]), 25.0),
    "few are left": lambda logits_SV: logits_SV.index_fill(1, torch.arange(logits_SV.shape[1])[3:], -math.inf),
    "one is left": lambda logits_SV: logits_SV.index_fill(1, torch.arange(logits_SV.shape[1])[1:], -math.inf),
    "ones and zeros": lambda logits_SV: SIGNS[(logits_SV.abs() * 10).long() % 3],
}
CASES = [(kind, torch.float32, 64) for kind in ROWS]
CASES += [(kind, torch.float16, 64) for kind in ("random", "ties")]
CASES += [(kind, torch.float32, 4) for kind in ("random", "ties")]  # little room: the whole row is searched


def filters_of(vocab_size: int) -> list[tuple[int, float, float, float]]:
    """top_k, top_p, min_p, temperature: each at its ends, alone and together."""
    top_ks = (1, 2, 50, 1_500, vocab_size - 1, vocab_size, vocab_size + 5)
    alone = [(k, 1.0, 0.0, 1.0) for k in top_ks] + [(0, p, 0.0, 0.7) for p in (0.0, 1e-9, 0.3, 0.9, 0.999, 0.999999)]
    alone += [(-1, 1.0, min_p, 1.3) for min_p in (0.0, 0.05, 1.0)] + [(0, p, 0.0, 1.0) for p in (0.8, 0.9, 0.95, 0.99)]
    return [*alone, (50, 0.9, 0.0, 0.6), (20, 0.8, 0.02, 1e-4), (0, 0.95, 0.1, 90.0), (5, 0.999999, 1.0, 1.0)]


def kept_in_float64(scaled_V: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """What the contract keeps of logits that are scaled and cut by min_p."""
    sorted_V = scaled_V.sort(descending=True).values
    top_k = min(top_k, len(sorted_V)) if top_k > 0 else len(sorted_V)
    weight_V = (sorted_V[:top_k].double() - sorted_V[0].double()).exp()
    mass_V = weight_V.cumsum(0)
    num_kept = int((mass_V - weight_V < mass_V[-1] * top_p).sum()) if top_p < 1 else top_k
    return (scaled_V >= sorted_V[max(num_kept, 1) - 1]) & (scaled_V > -math.inf)


@pytest.mark.parametrize(("kind", "dtype", "depth"), CASES)
@pytest.mark.parametrize("vocab_size", [1, 255, 1_500])
def test_keeps_what_sorting_in_float64_keeps(
    vocab_size: int, kind: str, dtype: torch.dtype, depth: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, up to the rounding of sums: between what a slightly smaller and a slightly larger top_p keep."""
    monkeypatch.setattr(sampling, "_DEPTH", depth)
    settings = filters_of(vocab_size)
    top_k_S, top_p_S, min_p_S, temperature_S = (torch.tensor(values) for values in zip(*settings, strict=True))
    noise_SV = torch.randn(len(settings), vocab_size, generator=torch.Generator().manual_seed(4))
    logits_SV = ROWS[kind](noise_SV * SPREADS.repeat(len(settings))[: len(settings), None]).to(dtype)
    inputs = (logits_SV, temperature_S, min_p_S, top_k_S, top_p_S)
    threshold_S = least_kept(*(tensor.to(device) for tensor in inputs)).cpu()
    lowest_S1 = (threshold_S / temperature_S)[:, None]
    ours_SV = (logits_SV.float() / temperature_S[:, None] >= lowest_S1) & (logits_SV > -math.inf)
    scaled_SV = filtered(logits_SV, temperature_S, min_p_S, None, None)
    for setting, ours_V, scaled_V in zip(settings, ours_SV, scaled_SV, strict=True):
        top_k, top_p, *_ = setting
        fewest_V, most_V = (kept_in_float64(scaled_V, top_k, p) for p in (top_p * (1 - 2e-6), top_p * (1 + 2e-6)))
        if top_p == 1.0:
            fewest_V = most_V
        assert (fewest_V <= ours_V).all() and (ours_V <= most_V).all(), setting


@pytest.mark.parametrize("depth", [4, pytest.param(64, marks=pytest.mark.gpu)])
def test_more_ties_than_there_is_room_for(depth: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_DEPTH", depth)
    logits_SV = torch.zeros(4, 256 * depth + 600, device=device)
    logits_SV[:, 5:300] = 1.0
    logits_SV[:, 400:500] = -1.0
    top_k_S, top_p_S = torch.tensor([0, 296, 0, 400], device=device), torch.tensor([0.9, 1.0, 0.01, 0.9], device=device)
    ours = cut_logits(logits_SV, top_k_S, top_p_S)
    ones_and_zeros = 256 * depth + 500
    assert (ours > -math.inf).sum(-1).tolist() == [ones_and_zeros, ones_and_zeros, 295, ones_and_zeros]


def test_what_equals_the_last_one_kept_once_scaled_stays(device: str) -> None:
    """Neighbouring floats fall together when they are divided by 3."""
    logits_V = (torch.tensor(1.6).view(torch.int32) + torch.arange(40, dtype=torch.int32)).view(torch.float32)
    top_k_S = torch.arange(1, 40, 4)
    temperature_S = torch.full((len(top_k_S),), 3.0)
    expected_SV = filtered(logits_V.expand(len(top_k_S), -1), temperature_S, None, top_k_S, None) > -math.inf
    assert (expected_SV.sum(-1) > top_k_S).any()
    logits_SV = logits_V.repeat(len(top_k_S), 1).to(device)
    threshold_S = least_kept(logits_SV, temperature_S.to(device), None, top_k_S.to(device), None).cpu()
    assert torch.equal(logits_V / 3.0 >= (threshold_S / 3.0)[:, None], expected_SV)


def test_a_row_has_the_same_threshold_alone_and_greedy_rows_have_none(device: str) -> None:
    logits_SV = torch.randn(6, 3_000, generator=torch.Generator().manual_seed(7)).to(device) * 3
    filters = {
        "temperature_S": torch.tensor([1.0, 0.0, 0.7, 1.0, 2.0, 0.9], device=device),
        "min_p_S": torch.tensor([0.0, 0.5, 0.01, 0.0, 0.2, 0.0], device=device),
        "top_k_S": torch.tensor([0, 3, 20, 2_000, 0, 0], device=device),
        "top_p_S": torch.tensor([0.9, 0.5, 0.8, 0.99, 1.0, 0.999999], device=device),
    }
    together_S = least_kept(logits_SV, **filters)
    for row in range(6):
        one = slice(row, row + 1)
        alone = least_kept(logits_SV[one], **{name: values[one] for name, values in filters.items()})
        assert torch.equal(alone, together_S[one])
    assert together_S[1] == -math.inf and together_S.isfinite().sum() == 5

"""Draws beside the reference, whose parts test_sampling.py checks, and by statistics: Triton and compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.ops.cpu.draw_tokens import draw_tokens as compiled
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.sampling.draw_tokens import draw_tokens
from bulkrun.ops.sampling.sampling import gumbel_noise
from bulkrun.ops.triton.draw_tokens import draw_tokens as in_triton

pytestmark = pytest.mark.filterwarnings(  # the interpreter's numpy says so; it wraps as it should
    "ignore:overflow encountered", "ignore:invalid value encountered", "ignore:divide by zero encountered"
)
needs_compiled = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
COMPILED = pytest.param(compiled, marks=needs_compiled, id="compiled")
TWINS = pytest.mark.parametrize("op", [pytest.param(in_triton, id="triton"), COMPILED])
OPS = pytest.mark.parametrize("op", [pytest.param(draw_tokens, id="reference"), COMPILED])
FILTERS = {
    "none": {},
    "min_p": {"min_p_S": [0.0, 0.05, 0.5, 1.0]},
    "top_k": {"top_k_S": [0, 1, 50, 10_000]},
    "top_p": {"top_p_S": [1.0, 0.9, 1e-9, 0.999]},
    "top_k, top_p": {"top_k_S": [20, 3, 0, 700], "top_p_S": [0.8, 0.5, 0.95, 0.999]},
    "min_p, top_p": {"min_p_S": [0.05, 0.2, 0.3, 0.01], "top_p_S": [0.6, 0.8, 0.7, 0.9]},
    "all": {"min_p_S": [0.1, 0.0, 0.01, 0.3], "top_k_S": [5, 0, 40, -1], "top_p_S": [0.9, 0.3, 1.0, 0.7]},
}


def device_of(op: object) -> str:
    return "cuda" if op is in_triton and torch.cuda.is_available() else "cpu"


def on(device: str, filters: dict[str, list[Any]], rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values, device=device).repeat(-(-rows // 4))[:rows] for name, values in filters.items()}


def seeds_and_positions(rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(3))
    return seeds.to(device), torch.arange(rows, device=device) * 1_000_003


@TWINS
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 17, 4096, 9001])
@pytest.mark.pairs("filters", "dtype", "vocab_size")
def test_draws_the_reference_s_tokens(
    op: Any, filters: dict[str, list[Any]], dtype: torch.dtype, vocab_size: int
) -> None:
    device = device_of(op)
    logits_SV = (torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1)) * 4).to(dtype).to(device)
    logits_SV[:, 1::3] = -math.inf
    logits_SV[3, 2:] = 0.5  # equals, and noise alone decides
    temperature_S = torch.tensor([1.0, 0.7, 2.0, 0.9, 0.0, 1e-4, 0.3, 90.0], device=device)
    args, kwargs = (logits_SV, temperature_S, *seeds_and_positions(8, device)), on(device, filters, 8)
    before = logits_SV.clone()
    token_S, is_valid_S = op(*args, **kwargs)
    expected_S, _ = draw_tokens(*args, **kwargs)
    assert token_S.dtype == torch.int64 and is_valid_S.dtype == torch.bool
    assert token_S.tolist() == expected_S.tolist()
    assert token_S[4] == logits_SV[4].argmax()
    assert is_valid_S.all()
    assert torch.equal(logits_SV, before)


@OPS
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_draws_follow_what_the_filters_leave(op: Any, filters: dict[str, list[Any]]) -> None:
    """A chi-squared test of 40,000 draws for each of four settings; the probabilities come from sorting in Python."""
    draws, temperature = 40_000, 0.8
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    for setting in range(4):
        kwargs = {name: torch.tensor(values[setting : setting + 1]).repeat(draws) for name, values in filters.items()}
        seed_S, position_S = torch.arange(draws), torch.arange(draws) % 7
        token_S, _ = op(logits_V.repeat(draws, 1), torch.full((draws,), temperature), seed_S, position_S, **kwargs)
        share_V = _by_hand(logits_V, temperature, {name: values[setting] for name, values in filters.items()})
        seen_V = torch.bincount(token_S, minlength=40).double()
        assert (seen_V[share_V == 0] == 0).all()
        expected_V = share_V[share_V > 0] * draws
        chi2 = ((seen_V[share_V > 0] - expected_V) ** 2 / expected_V).sum()
        num_free = max(len(expected_V) - 1, 1)
        assert chi2 < num_free + 5 * math.sqrt(2 * num_free) + 5


def _by_hand(logits_V: torch.Tensor, temperature: float, filters: dict[str, float]) -> torch.Tensor:
    """Probabilities, float64: tokens from the likeliest on, as long as no filter stops them."""
    weight_V = torch.softmax(logits_V.double() / temperature, -1)
    order = weight_V.argsort(descending=True).tolist()
    order = [token for token in order if weight_V[token] >= filters.get("min_p_S", 0) * weight_V.max()]
    top_k = int(filters.get("top_k_S", 0))
    order = order[:top_k] if top_k > 0 else order
    total, mass, kept = sum(weight_V[token] for token in order), 0.0, []
    for token in order:
        if kept and mass >= filters.get("top_p_S", 1.0) * total:
            break
        kept.append(token)
        mass += weight_V[token]
    share_V = torch.zeros_like(weight_V)
    share_V[kept] = weight_V[kept] / weight_V[kept].sum()
    return share_V


@pytest.mark.parametrize("op", [pytest.param(draw_tokens, id="reference"), *TWINS.args[1]])
def test_a_token_without_rivals_is_drawn_whatever_its_noise(op: Any) -> None:
    """Token 3 gets a uniform number that float32 would round to 1, whose noise were -inf, as what no filter leaves."""
    seed_S, zeros = torch.tensor([271343, 271343]), torch.zeros(2, dtype=torch.int64)
    assert gumbel_noise(seed_S, zeros, 4)[0, 3].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-4)
    logits_SV = torch.full((2, 200), -math.inf)
    logits_SV[:, 3] = 1.0
    given = [one.to(device_of(op)) for one in (logits_SV, torch.ones(2), seed_S, zeros)]
    token_S, is_valid_S = op(*given, top_k_S=torch.tensor([0, 5], device=device_of(op)))
    assert token_S.tolist() == [3, 3] and is_valid_S.all()


@TWINS
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_a_row_draws_the_same_token_alone(op: Any, filters: dict[str, list[Any]]) -> None:
    device, rows = device_of(op), 6 if op is in_triton else 70
    logits_SV, temperature_S = torch.randn(rows, 5000, device=device), torch.full((rows,), 0.9, device=device)
    seed_S, position_S = seeds_and_positions(rows, device)
    kwargs = on(device, filters, rows)
    together, _ = op(logits_SV, temperature_S, seed_S, position_S, **kwargs)
    for row in (0, 2, rows - 1):
        one = slice(row, row + 1)
        mine = {name: values[one] for name, values in kwargs.items()}
        alone, _ = op(logits_SV[one], temperature_S[one], seed_S[one], position_S[one], **mine)
        assert torch.equal(alone, together[one])


@TWINS
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_numbers_are_flagged_and_have_a_token_of_the_vocabulary(
    op: Any, filters: dict[str, list[Any]], number: float
) -> None:
    device = device_of(op)
    logits_SV = torch.randn(8, 4099, device=device)
    for row, place in enumerate((0, 15, 16, 4000, 4098)):
        logits_SV[row, place] = number
    logits_SV[5:7] = number
    temperature_S = torch.tensor([1.0, 0.0] * 4, device=device)
    token_S, is_valid_S = op(logits_SV, temperature_S, *seeds_and_positions(8, device), **on(device, filters, 8))
    assert ((token_S >= 0) & (token_S < 4099)).all()
    has_other = [number == -math.inf] * 5 + [False, False, True]
    assert is_valid_S.tolist() == has_other


@needs_compiled
@settings(max_examples=150)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    temperature=st.sampled_from([0.05, 0.8, 1.0, 5.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.9]),
    top_k=st.sampled_from([0, 1, 2, 16, 17, 64, 300]),
    top_p=st.sampled_from([1.0, 0.999999, 0.9, 0.4]),
)
def test_any_filters_leave_the_reference_s_tokens(
    size: int, seed: int, spread: float, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Many draws of one row: each token that only one of the two leaves would show."""
    rows = 200
    logits_V = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread).round(decimals=1)
    args = (logits_V.repeat(rows, 1), torch.full((rows,), temperature), torch.arange(rows), torch.full((rows,), seed))
    kwargs = {
        "min_p_S": torch.full((rows,), min_p),
        "top_k_S": torch.full((rows,), top_k),
        "top_p_S": torch.full((rows,), top_p),
    }
    assert torch.equal(compiled(*args, **kwargs)[0], draw_tokens(*args, **kwargs)[0])


@TWINS
def test_no_rows(op: Any) -> None:
    device = device_of(op)
    empty = torch.empty(0, device=device)
    token_S, is_valid_S = op(torch.empty(0, 7, device=device), empty, empty.long(), empty.long())
    assert token_S.shape == is_valid_S.shape == (0,)


@needs_compiled
def test_rows_that_lie_apart_go_to_the_reference() -> None:
    logits_SV = torch.randn(4, 90)[:, ::3]
    args = (torch.ones(4), *seeds_and_positions(4, "cpu"))
    assert torch.equal(compiled(logits_SV, *args)[0], draw_tokens(logits_SV, *args)[0])

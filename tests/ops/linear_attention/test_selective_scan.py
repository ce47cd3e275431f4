"""Mamba's selective state space: the reference beside transformers' own, compiled code and kernel beside it.

Triton's interpreter runs the kernels where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from transformers.models.jamba.modeling_jamba import mamba_selective_scan, mamba_selective_state_update

from bulkrun import ops
from bulkrun.ops.cpu import selective_scan as cpu_scan
from bulkrun.ops.cpu.library import library
from bulkrun.ops.linear_attention import selective_scan
from bulkrun.ops.triton import selective_scan as triton_scan
from tests.ops.linear_attention.steps import NUM_ROWS, Part, make_meta, num_tokens
from tests.ops.linear_attention.twins import (
    BESIDE,
    DTYPES,
    FORGETS,
    IN_PIECES,
    NUM_PADDING,
    RATE,
    STEPS,
    assert_as_reference,
    assert_forgets,
    assert_same_bits_in_pieces,
    device_of,
    twins,
)


class Heads(NamedTuple):
    heads: int
    size: int
    head_dim: int

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim


SHAPES = [Heads(3, 16, 32), Heads(2, 16, 64), Heads(1, 13, 48), Heads(2, 5, 16), Heads(1, 128, 32)]


def scan_inputs(heads: Heads, parts: list[Part], dtype: torch.dtype, num_padding: int = 0) -> list[torch.Tensor]:
    """x, dt, b, c, gate, rate, dt_bias, d and states; those of tokens are cut out of ever wider ones."""
    torch.manual_seed(0)
    total, channels, size = num_tokens(parts) + num_padding, heads.channels, heads.size
    widths = (channels, channels, size, size, channels)
    of_tokens = [torch.randn(total, sum(widths) + n).to(dtype)[:, :width] for n, width in enumerate(widths)]
    rate_NC = -torch.randn(size, channels).exp()
    state = torch.randn(NUM_ROWS, heads.heads, size, heads.head_dim)
    return [*of_tokens, rate_NC, *torch.randn(2, channels), state]


def test_the_scan_is_that_of_transformers() -> None:
    heads, part, after = SHAPES[0], Part(2, 0, 21), Part(2, 21, 1)
    *of_tokens, rate_NC, dt_bias_C, d_C, state = scan_inputs(heads, [part, after], torch.float32)
    whole, last = [one[:21] for one in of_tokens], [one[21:] for one in of_tokens]
    x_CT, dt_CT, b_NT, c_NT, gate_CT = (one.t()[None] for one in whole)

    expected, final = mamba_selective_scan(
        x_CT, dt_CT, rate_NC.t(), b_NT, c_NT, D=d_C, z=gate_CT, delta_bias=dt_bias_C, delta_softplus=True,
        return_last_state=True, use_mambapy=False, use_associative_scan=False,
    )  # fmt: skip
    out_TC = selective_scan.selective_scan(*whole, rate_NC, dt_bias_C, d_C, state, make_meta([part]))
    torch.testing.assert_close(out_TC, expected[0].t(), atol=2e-5, rtol=2e-5)
    ours_CN = state[part.row].transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(ours_CN, final[0], atol=2e-5, rtol=2e-5)

    x, dt, b, c, gate = last
    expected = mamba_selective_state_update(
        final, x, dt, rate_NC.t(), b, c, d_C, z=gate, dt_bias=dt_bias_C, dt_softplus=True
    )
    out_TC = selective_scan.selective_scan(*last, rate_NC, dt_bias_C, d_C, state, make_meta([after]))
    torch.testing.assert_close(out_TC, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", twins((cpu_scan, triton_scan), "selective_scan"))
@pytest.mark.pairs("heads", "step")
def test_scans_equal_their_reference(
    op: Callable[..., torch.Tensor], dtype: torch.dtype, heads: Heads, step: str
) -> None:
    parts = STEPS[step]
    inputs = [one.to(device_of(op, dtype)) for one in scan_inputs(heads, parts, dtype, NUM_PADDING)]
    assert_as_reference(op, selective_scan.selective_scan, inputs, parts)


@pytest.mark.parametrize("dt", [-9.3, -15.5])
@pytest.mark.parametrize("op", twins((cpu_scan, triton_scan), "selective_scan"))
def test_channels_that_forget_little_forget_as_much_as_they_should(op: Callable[..., torch.Tensor], dt: float) -> None:
    """A thousandth of 1 in as many tokens as a book has is nothing that a sum with 1 in float32 knows."""
    device = device_of(op, torch.float32)
    inputs = [one.to(device) for one in scan_inputs(SHAPES[0], [FORGETS], torch.float32)]
    x_TC, dt_TC, _, _, _, rate_NC, dt_bias_C, *_ = inputs
    x_TC.zero_(), dt_TC.fill_(dt), rate_NC.fill_(-RATE), dt_bias_C.zero_()
    assert_forgets(op, inputs, dt)


@pytest.mark.parametrize("dt", [-200.0, -88.0, -0.3, 0.0, 0.3, 19.9, 20.1, 300.0])
@pytest.mark.parametrize("op", twins((cpu_scan, triton_scan), "selective_scan"))
def test_steps_of_any_size_are_those_of_softplus(op: Callable[..., torch.Tensor], dt: float) -> None:
    device, part = device_of(op, torch.float32), Part(2, 0, 1)
    inputs = [one.to(device) for one in scan_inputs(SHAPES[0], [part], torch.float32)]
    x_TC, dt_TC, b_TN, _, _, _, dt_bias_C, _, state = inputs
    x_TC.fill_(1.0), dt_TC.fill_(dt), b_TN.fill_(1.0), dt_bias_C.zero_()
    op(*inputs, make_meta([part], device))
    expected = math.log1p(math.exp(dt)) if dt < 30 else dt
    torch.testing.assert_close(state[2], torch.full_like(state[2], expected), rtol=4e-7, atol=1e-37)


@pytest.mark.parametrize("heads", [Heads(3, 16, 32), Heads(1, 24, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_tokens_are_spread_over_steps(dtype: torch.dtype, heads: Heads) -> None:
    if library() is None:
        pytest.skip("the reference has the same bits in steps of whole tiles alone")
    assert_same_bits_in_pieces(ops.selective_scan, scan_inputs(heads, [BESIDE, IN_PIECES], dtype), 5)

"""Mamba 2's state space: the reference beside transformers' own, compiled code and kernel beside it.

Triton's interpreter runs the kernels where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from bulkrun import ops
from bulkrun.ops.cpu import state_space as cpu_space
from bulkrun.ops.cpu.library import library
from bulkrun.ops.linear_attention import state_space
from bulkrun.ops.triton import state_space as triton_space
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
    assert_is_reference,
    assert_same_bits_in_pieces,
    device_of,
    twins,
)


class Heads(NamedTuple):
    groups: int
    heads: int
    size: int
    head_dim: int

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.size


SHAPES = [Heads(2, 4, 16, 32), Heads(1, 3, 24, 80), Heads(3, 6, 13, 48), Heads(1, 2, 128, 64), Heads(1, 1, 256, 32)]
NOT_COMPILED = [Heads(1, 2, 16, 24), Heads(1, 1, 257, 16)]


def space_inputs(heads: Heads, parts: list[Part], dtype: torch.dtype, num_padding: int = 0) -> list[torch.Tensor]:
    """xbc, dt, a_log, dt_bias, d and states; the first two are cut out of wider ones."""
    torch.manual_seed(0)
    total = num_tokens(parts) + num_padding
    xbc_TC = torch.randn(total, heads.channels + 5).to(dtype)[:, : heads.channels]
    dt_TH = torch.randn(total, heads.heads + 3).to(dtype)[:, : heads.heads]
    state = torch.randn(NUM_ROWS, heads.heads, heads.size, heads.head_dim)
    return [xbc_TC, dt_TH, *torch.randn(3, heads.heads), state]


def test_the_space_is_that_of_transformers() -> None:
    heads, part, after = SHAPES[0], Part(2, 0, 21), Part(2, 21, 1)
    xbc_TC, dt_TH, a_log_H, dt_bias_H, d_H, state = space_inputs(heads, [part, after], torch.float32)
    x_TA, b_TA, c_TA = xbc_TC.split([heads.heads * heads.head_dim, *[heads.groups * heads.size] * 2], dim=1)
    x_THP = x_TA.unflatten(1, (-1, heads.head_dim))
    b_TGN, c_TGN = (part_TA.unflatten(1, (-1, heads.size)) for part_TA in (b_TA, c_TA))
    rates = {"A": -a_log_H.exp(), "D": d_H, "dt_bias": dt_bias_H, "dt_softplus": True}

    expected, last = mamba2_chunk_scan(
        x_THP[None, :21], dt_TH[None, :21], B=b_TGN[None, :21], C=c_TGN[None, :21],
        chunk_size=8, return_final_states=True, **rates,
    )  # fmt: skip
    out_THP = state_space.state_space(xbc_TC[:21], dt_TH[:21], a_log_H, dt_bias_H, d_H, state, make_meta([part]))
    torch.testing.assert_close(out_THP, expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state[part.row], last[0].transpose(1, 2), atol=2e-5, rtol=2e-5)

    rates |= {"A": rates["A"][:, None, None], "D": d_H[:, None], "dt_bias": dt_bias_H[:, None]}
    dt_THP = dt_TH[21:, :, None].expand(-1, -1, heads.head_dim)
    expected = mamba2_selective_state_update(last, x_THP[21:], dt_THP, B=b_TGN[21:], C=c_TGN[21:], **rates)
    out_THP = state_space.state_space(xbc_TC[21:], dt_TH[21:], a_log_H, dt_bias_H, d_H, state, make_meta([after]))
    torch.testing.assert_close(out_THP, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state[after.row], last[0].transpose(1, 2), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", twins((cpu_space, triton_space), "state_space"))
@pytest.mark.pairs("heads", "step")
def test_spaces_equal_their_reference(
    op: Callable[..., torch.Tensor], dtype: torch.dtype, heads: Heads, step: str
) -> None:
    parts = STEPS[step]
    inputs = [one.to(device_of(op, dtype)) for one in space_inputs(heads, parts, dtype, NUM_PADDING)]
    assert_as_reference(op, state_space.state_space, inputs, parts)


@pytest.mark.parametrize("heads", [SHAPES[0], *NOT_COMPILED], ids=str)
def test_other_sizes_and_steps_of_another_dtype_go_to_the_reference(heads: Heads) -> None:
    inputs = list(space_inputs(heads, STEPS["mixed"], torch.bfloat16))
    if heads is SHAPES[0]:
        inputs[1] = inputs[1].float()
    assert_is_reference(cpu_space.state_space, state_space.state_space, inputs)


@pytest.mark.parametrize("dt", [-9.3, -15.5])
@pytest.mark.parametrize("op", twins((cpu_space, triton_space), "state_space"))
def test_heads_that_forget_little_forget_as_much_as_they_should(op: Callable[..., torch.Tensor], dt: float) -> None:
    """A thousandth of 1 in as many tokens as a book has is nothing that a sum with 1 in float32 knows."""
    device = device_of(op, torch.float32)
    inputs = [one.to(device) for one in space_inputs(SHAPES[0], [FORGETS], torch.float32)]
    xbc_TC, dt_TH, a_log_H, dt_bias_H, *_ = inputs
    xbc_TC.zero_(), dt_TH.fill_(dt), a_log_H.fill_(math.log(RATE)), dt_bias_H.zero_()
    assert_forgets(op, inputs, dt)


@pytest.mark.parametrize("heads", [Heads(2, 4, 16, 32), Heads(1, 3, 24, 80)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_tokens_are_spread_over_steps(dtype: torch.dtype, heads: Heads) -> None:
    if library() is None:
        pytest.skip("the reference has the same bits in steps of whole tiles alone")
    assert_same_bits_in_pieces(ops.state_space, space_inputs(heads, [BESIDE, IN_PIECES], dtype), 2)

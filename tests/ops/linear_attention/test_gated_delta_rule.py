"""The gated delta rule: the reference beside transformers' own, compiled code and kernel beside it.

Triton's interpreter runs the kernels where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers.models.glm5_next.modeling_glm5_next import recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from bulkrun import ops
from bulkrun.ops.cpu import gated_delta_rule as cpu_rule
from bulkrun.ops.cpu.library import library
from bulkrun.ops.linear_attention import gated_delta_rule
from bulkrun.ops.triton import gated_delta_rule as triton_rule
from tests.ops.linear_attention.steps import NUM_ROWS, Part, make_meta, num_tokens
from tests.ops.linear_attention.twins import (
    DTYPES,
    FORGETS,
    NUM_PADDING,
    RATE,
    STEPS,
    assert_as_reference,
    assert_forgets,
    assert_is_reference,
    device_of,
    twins,
)


class Heads(NamedTuple):
    key_heads: int
    heads: int
    size: int
    value_size: int
    has_channels: bool = False  # each channel of keys has a decay of its own

    @property
    def num_decays(self) -> int:
        return self.heads * (self.size if self.has_channels else 1)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.size + self.heads * self.value_size


CHANNELS = Heads(3, 3, 24, 48, has_channels=True)
SHAPES = [Heads(2, 4, 16, 32), Heads(1, 3, 24, 80), Heads(1, 1, 128, 64), CHANNELS]
NOT_COMPILED = [Heads(1, 2, 15, 16), Heads(1, 2, 16, 24), Heads(1, 1, 258, 16)]


def rule_inputs(heads: Heads, parts: list[Part], dtype: torch.dtype, num_padding: int = 0) -> list[torch.Tensor]:
    """qkv, ba, a_log, dt_bias and states; the projections are cut out of wider ones."""
    torch.manual_seed(0)
    total = num_tokens(parts) + num_padding
    qkv_TC = torch.randn(total, heads.channels).to(dtype)
    qkv_TC[total // 2] = 0.0  # keys and queries without a length
    ba_TG = torch.randn(total, heads.heads + heads.num_decays + 3).to(dtype)[:, :-3]
    state = torch.randn(NUM_ROWS, heads.heads, heads.size, heads.value_size)
    return [qkv_TC, ba_TG, torch.randn(heads.heads), torch.randn(heads.num_decays), state]


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_the_rule_is_that_of_transformers(beta_scale: float) -> None:
    heads, part = SHAPES[0], Part(2, 0, 21)
    qkv_TC, ba_TG, a_log_H, dt_bias_H, state = rule_inputs(heads, [part], torch.float32)
    key_dim = heads.key_heads * heads.size
    q, k, v = qkv_TC[None].split([key_dim, key_dim, heads.heads * heads.value_size], dim=2)
    b, a = ba_TG[None].chunk(2, dim=2)
    expected, last = torch_recurrent_gated_delta_rule(
        q.unflatten(2, (-1, heads.size)), k.unflatten(2, (-1, heads.size)), v.unflatten(2, (-1, heads.value_size)),
        g=-a_log_H.exp() * F.softplus(a + dt_bias_H), beta=beta_scale * b.sigmoid(),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    meta = make_meta([part])
    out_THV = gated_delta_rule.gated_delta_rule(qkv_TC, ba_TG, a_log_H, dt_bias_H, state, meta, beta_scale=beta_scale)
    torch.testing.assert_close(out_THV, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[part.row], last[0], atol=1e-5, rtol=1e-5)


def test_a_rule_with_a_decay_for_each_channel_is_that_of_transformers() -> None:
    heads, part = CHANNELS, Part(2, 0, 21)
    qkv_TC, ba_TG, a_log_H, dt_bias, state = rule_inputs(heads, [part], torch.float32)
    key_dim = heads.key_heads * heads.size
    q, k, v = qkv_TC[None].split([key_dim, key_dim, heads.heads * heads.value_size], dim=2)
    b, a = ba_TG[None].tensor_split((heads.heads,), dim=2)
    steps = F.softplus(a + dt_bias).unflatten(2, (heads.heads, -1))
    expected, last = recurrent_kimi_delta_attention(
        q.unflatten(2, (-1, heads.size)), k.unflatten(2, (-1, heads.size)), v.unflatten(2, (-1, heads.value_size)),
        g=-a_log_H.exp()[:, None] * steps, beta=b.sigmoid(),
        initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out_THV = gated_delta_rule.gated_delta_rule(qkv_TC, ba_TG, a_log_H, dt_bias, state, make_meta([part]))
    torch.testing.assert_close(out_THV, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[part.row], last[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", twins((cpu_rule, triton_rule), "gated_delta_rule"))
@pytest.mark.pairs("heads", "step")
def test_rules_equal_their_reference(
    op: Callable[..., torch.Tensor], dtype: torch.dtype, heads: Heads, step: str
) -> None:
    parts = STEPS[step]
    inputs = [one.to(device_of(op, dtype)) for one in rule_inputs(heads, parts, dtype, NUM_PADDING)]
    assert_as_reference(op, gated_delta_rule.gated_delta_rule, inputs, parts)


@pytest.mark.parametrize("heads", [SHAPES[0], *NOT_COMPILED], ids=str)
def test_other_sizes_and_dtypes_go_to_the_reference(heads: Heads) -> None:
    inputs = list(rule_inputs(heads, STEPS["mixed"], torch.bfloat16))
    if heads is SHAPES[0]:
        inputs[1] = inputs[1].float()
    assert_is_reference(cpu_rule.gated_delta_rule, gated_delta_rule.gated_delta_rule, inputs)


@pytest.mark.parametrize("op", twins((cpu_rule, triton_rule), "gated_delta_rule"))
def test_states_may_be_turned_around(op: Callable[..., torch.Tensor]) -> None:
    device, part = device_of(op, torch.float32), Part(2, 3, 19)
    inputs = [one.to(device) for one in rule_inputs(SHAPES[0], [part], torch.float32)]
    meta, state = make_meta([part], device), inputs[-1].clone()
    expected = gated_delta_rule.gated_delta_rule(*inputs[:-1], state, meta, beta_scale=2.0)
    torch.testing.assert_close(op(*inputs, meta, beta_scale=2.0), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inputs[-1], state, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("a", [-9.3, -15.5])
@pytest.mark.parametrize("op", twins((cpu_rule, triton_rule), "gated_delta_rule"))
def test_heads_that_forget_little_forget_as_much_as_they_should(op: Callable[..., torch.Tensor], a: float) -> None:
    """A thousandth of 1 in as many tokens as a book has is nothing that a sum with 1 in float32 knows."""
    device = device_of(op, torch.float32)
    inputs = [one.to(device) for one in rule_inputs(SHAPES[0], [FORGETS], torch.float32)]
    _, ba_TG, a_log_H, dt_bias_H, _ = inputs
    ba_TG[:, :4], ba_TG[:, 4:] = -40.0, a  # b: nothing is corrected
    a_log_H.fill_(math.log(RATE)), dt_bias_H.zero_()
    assert_forgets(op, inputs, a)


@pytest.mark.parametrize("heads", [SHAPES[0], CHANNELS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_how_tokens_are_spread_over_steps(dtype: torch.dtype, heads: Heads) -> None:
    count = 37
    qkv_TC, ba_TG, a_log_H, dt_bias_H, state = rule_inputs(heads, [Part(2, 0, count)], dtype)
    weight_WC, bias_C = torch.randn(4, heads.channels).to(dtype), torch.randn(heads.channels).to(dtype)

    def run(pieces: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        states, conv_states = state.clone(), torch.zeros(NUM_ROWS, 3, heads.channels, dtype=dtype)
        outs, first = [], 0
        for piece in pieces:
            rows, meta = slice(first, first + piece), make_meta([Part(2, first, piece)])
            mixed = ops.causal_conv(qkv_TC[rows], weight_WC, bias_C, conv_states, meta, silu=True)
            outs.append(ops.gated_delta_rule(mixed, ba_TG[rows], a_log_H, dt_bias_H, states, meta))
            first += piece
        return torch.cat(outs), states[2]

    if library() is None:
        pytest.skip("the reference has the same bits in steps of whole tiles alone")
    whole, pieces = run([count]), run([1, 1, 16, 1, 7, 11])
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])

"""The convolution over a sequence's last tokens: the reference beside torch's, compiled code and kernel beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bulkrun.ops.cpu import causal_conv as cpu_conv
from bulkrun.ops.linear_attention import causal_conv
from bulkrun.ops.triton import causal_conv as triton_conv
from tests.ops.linear_attention.steps import NUM_ROWS, Part, make_meta, num_tokens
from tests.ops.linear_attention.twins import DTYPES, ERRORS, STEPS, assert_is_reference, device_of, twins


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_the_convolution_is_that_of_torch(silu: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    x_TC, weight_WC, state = torch.randn(9, 5), torch.randn(4, 5), torch.full((NUM_ROWS, 3, 5), float("nan"))
    bias_C = torch.randn(5) if has_bias else None
    expected = F.conv1d(x_TC.T, weight_WC.T[:, None], bias_C, padding=3, groups=5)[:, :9].T
    out = causal_conv.causal_conv(x_TC, weight_WC, bias_C, state, make_meta([Part(4, 0, 9)]), silu=silu)
    torch.testing.assert_close(out, F.silu(expected) if silu else expected)
    assert torch.equal(state[4], x_TC[-3:]), "the inputs that the next token sees"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", twins((cpu_conv, triton_conv), "causal_conv"))
def test_convolutions_equal_their_reference(op: Callable[..., torch.Tensor], dtype: torch.dtype, step: str) -> None:
    torch.manual_seed(0)
    device, parts, num_padding = device_of(op, dtype), STEPS[step], 3
    for num_channels, num_taps, has_bias, silu in (
        (70, 4, False, True), (16, 2, True, True), (300, 5, True, False), (64, 3, False, False),
    ):  # fmt: skip
        x_TC = torch.randn(num_tokens(parts) + num_padding, num_channels + 9).to(device, dtype)[:, :num_channels]
        weight_WC = torch.randn(num_taps, num_channels).to(device, dtype)
        bias_C = torch.randn(num_channels).to(device, dtype) if has_bias else None
        state = torch.randn(NUM_ROWS, num_taps - 1, num_channels).to(device, dtype)
        for part in (part for part in parts if part.count):
            if part.before:
                state[part.row, : max(0, num_taps - 1 - part.before)] = 0.0
            else:
                state[part.row] = float("nan")  # another's
        meta, expected_state = make_meta(parts, device, num_padding=num_padding), state.clone()
        out = op(x_TC, weight_WC, bias_C, state, meta, silu=silu)
        expected = causal_conv.causal_conv(x_TC, weight_WC, bias_C, expected_state, meta, silu=silu)
        torch.testing.assert_close(out, expected, atol=ERRORS[dtype], rtol=ERRORS[dtype])
        torch.testing.assert_close(state, expected_state, atol=0, rtol=0, equal_nan=True)


def test_other_dtypes_and_biases_apart_go_to_the_reference() -> None:
    parts = STEPS["mixed"]
    x_TC, weight_WC, state = torch.randn(num_tokens(parts), 16), torch.randn(3, 16), torch.randn(NUM_ROWS, 2, 16)
    narrow = (x_TC.bfloat16(), weight_WC.bfloat16())
    for x, weight, bias_C, held in (
        (narrow[0], weight_WC, None, state),
        (*narrow, torch.randn(16), state.bfloat16()),
        (x_TC, weight_WC, torch.randn(16, 2)[:, 0], state),
    ):
        ops = (partial(one.causal_conv, silu=True) for one in (cpu_conv, causal_conv))
        assert_is_reference(*ops, [x, weight, bias_C, held])

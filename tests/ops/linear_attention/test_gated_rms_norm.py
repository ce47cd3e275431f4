"""Norms with a gate: the reference beside transformers' own, compiled code and kernel beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from bulkrun.ops.cpu import gated_rms_norm as cpu_norm
from bulkrun.ops.linear_attention import gated_rms_norm
from bulkrun.ops.triton import gated_rms_norm as triton_norm
from tests.ops.linear_attention.twins import DTYPES, ERRORS, device_of, twins

SHAPES = [(3, 24, False), (5, 128, False), (1, 16, True), (5, 40, True), (1, 3072, True), (2, 8200, True)]


def test_the_norm_before_a_gate_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    norm = Qwen3_5RMSNormGated(24, eps=1e-6)
    norm.weight.data.uniform_(0.5, 1.5)
    x, gate = torch.randn(2, 7, 3, 24)
    out = gated_rms_norm.gated_rms_norm(x, gate, norm.weight.data, 1e-6)
    torch.testing.assert_close(out, norm(x, gate).detach(), atol=1e-6, rtol=1e-6)


def test_the_norm_before_a_sigmoid_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    norm = KimiLinearRMSNormGated(24, eps=1e-6)
    norm.weight.data.uniform_(0.5, 1.5)
    x, gate = torch.randn(2, 7, 3, 24)
    out = gated_rms_norm.gated_rms_norm(x, gate, norm.weight.data, 1e-6, silu=False)
    torch.testing.assert_close(out, norm(x, gate).detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_norm_behind_a_gate_is_that_of_transformers(num_groups: int) -> None:
    """Zamba 2's, which is that of Nemotron-H by the name that older versions have too."""
    torch.manual_seed(0)
    norm = Zamba2RMSNormGated(24, group_size=24 // num_groups, eps=1e-5)
    norm.weight.data.uniform_(0.5, 1.5)
    x, gate = torch.randn(2, 7, num_groups, 24 // num_groups)
    weight = norm.weight.data.unflatten(0, (num_groups, -1))
    out = gated_rms_norm.gated_rms_norm(x, gate, weight, 1e-5, norm_before_gate=False)
    torch.testing.assert_close(out.flatten(1), norm(x.flatten(1), gate.flatten(1)).detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", [{}, {"norm_before_gate": False}, {"silu": False}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", twins((cpu_norm, triton_norm), "gated_rms_norm"))
def test_norms_equal_their_reference(
    op: Callable[..., torch.Tensor], dtype: torch.dtype, kind: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    device = device_of(op, dtype)
    for num_heads, size, has_weights_of_heads in SHAPES:
        x = torch.randn(6, num_heads, size).to(device, dtype)
        x[-1] *= 1e-3  # what is added to its mean square matters
        gate = torch.randn(6, num_heads * size + 5).to(device, dtype)[:, 5:].unflatten(1, (num_heads, size))
        weight = torch.rand((num_heads, size) if has_weights_of_heads else (size,)).to(device, dtype)
        out = op(x, gate, weight, 1e-6, **kind)
        expected = gated_rms_norm.gated_rms_norm(x, gate, weight, 1e-6, **kind)
        torch.testing.assert_close(out, expected, atol=ERRORS[dtype], rtol=ERRORS[dtype])

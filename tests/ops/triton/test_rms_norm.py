"""Norms in Triton beside their reference, whose own oracle is transformers (tests/ops/test_elementwise_ops.py)."""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops.rms_norm import add_rms_norm as reference_add_rms_norm
from bulkrun.ops.rms_norm import rms_norm as reference_rms_norm
from bulkrun.ops.triton.rms_norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SIZES = [1, 33, 64, pytest.param(4096, marks=pytest.mark.gpu), pytest.param(18432, marks=pytest.mark.gpu)]


def error_of(dtype: torch.dtype) -> float:
    """Two roundings, each of which may fall to either side."""
    return 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scale", [None, 0.37])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_equals_the_reference(device: str, dtype: torch.dtype, size: int, scale: float | None) -> None:
    x, residual = (torch.randn(2, 5, size) * 4).to(device, dtype)
    weight = torch.rand(size).to(device, dtype)
    factor = None if scale is None else torch.tensor([scale]).to(device, dtype)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5, factor)
    expected_normed, expected_total = reference_add_rms_norm(x, residual, weight, 1e-5, factor)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected_normed, atol=1e-5, rtol=error_of(dtype))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_strided_rows_and_a_weight_per_head(device: str, dtype: torch.dtype) -> None:
    x_TND = torch.randn(3, 5, 24).to(device, dtype)[:, :4]
    weight = torch.rand(4, 24).to(device, dtype)
    error = {"atol": 1e-5, "rtol": error_of(dtype)}
    torch.testing.assert_close(rms_norm(x_TND, weight, 1e-6), reference_rms_norm(x_TND, weight, 1e-6), **error)
    one_head = rms_norm(x_TND[:, 1], weight[0], 1e-6)
    torch.testing.assert_close(one_head, reference_rms_norm(x_TND[:, 1], weight[0], 1e-6), **error)


def test_a_sum_is_of_rows_that_may_lie_apart(device: str) -> None:
    x, residual = torch.randn(5, 48).to(device)[:, :40], torch.randn(5, 43).to(device)[:, 3:]
    ours, expected = (op(x, residual, x[0].clone(), 1e-6) for op in (add_rms_norm, reference_add_rms_norm))
    torch.testing.assert_close(ours, expected)


def test_a_float32_weight_rounds_half_precision_only_once(device: str) -> None:
    x, weight = torch.randn(4, 40).to(device, torch.float16), torch.rand(40).to(device)
    normed = rms_norm(x, weight, 1e-6)
    assert normed.dtype == torch.float16
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(normed.double(), exact, atol=0, rtol=2**-11 * 1.01)  # half a unit in the last place


def test_no_rows(device: str) -> None:
    assert rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-6).shape == (0, 8)

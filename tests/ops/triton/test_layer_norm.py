"""The layer norm of a sum in Triton beside its reference, which is torch's."""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops.layer_norm import add_layer_norm as reference
from bulkrun.ops.triton.layer_norm import add_layer_norm
from tests.ops.triton.test_rms_norm import DTYPES, SIZES, error_of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_layer_norm_equals_the_reference(device: str, dtype: torch.dtype, size: int) -> None:
    x, residual = (torch.randn(2, 7, size) * 4 + 3).to(device, dtype)
    weight, bias = torch.randn(2, size).to(device, dtype)
    before = x.clone(), residual.clone()
    normed = add_layer_norm(x, residual, weight, bias, 1e-5)
    assert normed.dtype == dtype
    expected = reference(x, residual, weight, bias, 1e-5)
    torch.testing.assert_close(normed, expected, atol=4 * error_of(dtype), rtol=error_of(dtype))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rows_may_be_part_of_wider_ones(device: str) -> None:
    x, residual = torch.randn(5, 48).to(device)[:, :40], torch.randn(5, 43).to(device)[:, 3:]
    weight, bias = torch.randn(2, 40).to(device)
    torch.testing.assert_close(
        add_layer_norm(x, residual, weight, bias, 1e-12), reference(x, residual, weight, bias, 1e-12)
    )


def test_no_rows(device: str) -> None:
    nothing = torch.empty(0, 8, device=device)
    assert add_layer_norm(nothing, nothing, nothing.new_ones(8), nothing.new_ones(8), 1e-6).shape == (0, 8)

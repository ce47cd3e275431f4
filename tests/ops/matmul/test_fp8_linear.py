"""The quantizer's bounds on anything, and the product beside float64 over the quantized numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.matmul.fp8_linear import fp8_linear, quantize_rows
from tests.ops.fp8_oracle import LARGEST, fake_quantized

# half of the last place: 2^-4 of a number of three fraction bits, and of the smallest numbers 2^-10 of 448
RELATIVE, OF_LARGEST = 2.0**-4, 2.0**-10 / LARGEST
ROUNDING = 1 + 1e-6  # of the division and the product in float32


@settings(max_examples=100)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 33),
    exponents=st.tuples(st.integers(-120, 120), st.integers(-120, 120)),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
def test_every_error_is_within_half_a_last_place(
    rows: int, columns: int, exponents: tuple[int, int], zeros: float, seed: int
) -> None:
    """Over channels of any size, from 2^-120 to 2^120, with any share of zeros."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.randint(min(exponents), max(exponents) + 1, (rows, columns), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * 2.0**power
    x[torch.rand(rows, columns, generator=generator) < zeros] = 0.0
    quantized, scale_R1 = quantize_rows(x)
    assert quantized.dtype == FP8
    assert scale_R1.shape == (rows, 1)
    assert (scale_R1 > 0).all()
    error = (quantized.double() * scale_R1.double() - x.double()).abs()
    largest = x.double().abs().amax(-1, keepdim=True)
    bound = torch.maximum(x.double().abs() * RELATIVE, largest * OF_LARGEST) * ROUNDING
    assert (error <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_zeros_of_huge_and_of_tiny_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([[0.0, 0.0, -0.0], [info.max, -info.max, 1.0], [info.tiny, 0.0, -info.tiny]], dtype=dtype)
    quantized, scale_R1 = quantize_rows(x)
    assert quantized.float().isfinite().all()
    assert scale_R1.isfinite().all()
    assert not quantized[0].float().any()
    back = quantized.double() * scale_R1.double()
    torch.testing.assert_close(back[1, :2], x[1, :2].double(), rtol=1e-6, atol=0)
    assert (back[2].sign() == x[2].double().sign()).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_numbers_stays_so_and_others_do_not_notice(broken: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = broken
    quantized, scale_R1 = quantize_rows(x)
    back = quantized.float() * scale_R1
    assert back[1].isnan().all()
    torch.testing.assert_close(back[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_the_quantized_numbers(dtype: torch.dtype, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 37, generator=generator).to(dtype)
    weight = torch.randn(11, 37, generator=generator) * torch.logspace(-3, 3, 11)[:, None]
    bias = torch.randn(11, generator=generator).to(dtype) if has_bias else None
    ours = fp8_linear(x, *quantize_rows(weight), bias)
    exact = fake_quantized(x.float()).double() @ fake_quantized(weight).double().T
    exact = exact if bias is None else exact + bias.double()
    assert ours.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-8
    scale = exact.abs().amax(0)  # of each channel
    assert ((ours.double() - exact).abs() <= tolerance * (scale + 1e-6)).all()


def test_no_tokens() -> None:
    weight, scale = quantize_rows(torch.ones(4, 8))
    assert fp8_linear(torch.empty(0, 8), weight, scale, None).shape == (0, 4)

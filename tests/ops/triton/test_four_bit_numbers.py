"""Numbers of four bits as a kernel finds them, bit by bit, beside the reference: bfloat16 too, whose bits the
interpreter has right as long as it computes nothing with it.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from bulkrun.ops.matmul.four_bit_weight import E2M1, WHOLE_NUMBERS, FourBitWeight, in_bits, unpack
from bulkrun.ops.triton.four_bit_numbers import four_bit_numbers, multiply_add

NUM_INPUTS = 128
PAIRED = [torch.float16, torch.bfloat16]


@triton.jit
def _numbers_kernel(
    word_ptr,
    scale_ptr,
    out_ptr,
    dtype: tl.constexpr,
    ARE_WHOLE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
):
    row_N = tl.program_id(0) * N + tl.arange(0, N)
    word_NW = tl.load(word_ptr + row_N[:, None] * (K // 8) + tl.arange(0, K // 8)[None, :])
    scale_NG = tl.load(scale_ptr + row_N[:, None] * G + tl.arange(0, G)[None, :])
    number_NK = four_bit_numbers(word_NW, scale_NG, dtype, ARE_WHOLE, IN_PAIRS, N, K, G)
    tl.store(out_ptr + row_N[:, None] * K + tl.arange(0, K)[None, :], number_NK.to(tl.int16, bitcast=True))


def numbers(weight: FourBitWeight, dtype: torch.dtype, *, in_pairs: bool) -> torch.Tensor:
    """Of 16 outputs for each program."""
    assert weight.form != "table" and weight.codes.shape[1] == NUM_INPUTS // 2
    outputs = len(weight.codes)
    out = torch.empty(outputs, NUM_INPUTS, dtype=torch.int16, device=weight.codes.device)
    _numbers_kernel[(outputs // 16,)](
        weight.codes.view(torch.int32), weight.scale, out, getattr(tl, str(dtype).removeprefix("torch.")),
        weight.form == "whole", in_pairs, N=16, K=NUM_INPUTS, G=weight.scale.shape[1],
    )  # fmt: skip
    return out.view(dtype)


def made(scale: torch.Tensor, zero: torch.Tensor | None, codebook: tuple[float, ...], device: str) -> FourBitWeight:
    """Every code, with each scale of a group."""
    codes = torch.arange(NUM_INPUTS // 2, dtype=torch.int64).mul(17 * 5).to(torch.uint8).expand(len(scale), -1)
    parts = codes.contiguous().to(device), scale.to(device), None if zero is None else zero.to(device)
    return in_bits(FourBitWeight(*parts, torch.tensor(codebook, device=device)))


def assert_same_bits(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """But for the sign of zeros."""
    assert torch.equal((ours + 0).view(torch.int16), (exact + 0).view(torch.int16))


@pytest.mark.parametrize("num_groups", [1, 4, 64])
@pytest.mark.parametrize("dtype", PAIRED, ids=str)
def test_whole_numbers_have_the_bits_of_the_reference(dtype: torch.dtype, num_groups: int, device: str) -> None:
    """Every zero point, and scales of every size that such a dtype has: negative, tiny, zero."""
    generator = torch.Generator().manual_seed(num_groups)
    scale = torch.randint(-(2**15), 2**15, (256, num_groups), generator=generator).to(torch.int16).view(dtype).float()
    scale = torch.where(scale.isfinite() & (scale.abs() < (2.0**120 if dtype == torch.bfloat16 else 127)), scale, 0.0)
    zero = torch.arange(256 * num_groups).view(256, num_groups).remainder(16).to(torch.uint8)
    for zeros in (zero, None):
        weight = made(scale, zeros, WHOLE_NUMBERS, device)
        assert dtype in weight.exact_in
        exact = unpack(weight, dtype)
        assert_same_bits(numbers(weight, dtype, in_pairs=True), exact)
        if dtype == torch.float16:
            assert_same_bits(numbers(weight, dtype, in_pairs=False), exact)


@pytest.mark.parametrize("num_groups", [1, 4])
def test_e2m1_has_the_bits_of_the_reference(num_groups: int, device: str) -> None:
    exponents = torch.arange(144 * num_groups).remainder(129).view(144, num_groups) - 127
    weight = made(torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16(), None, E2M1, device)
    assert weight.exact_in == (torch.bfloat16,)
    assert_same_bits(numbers(weight, torch.bfloat16, in_pairs=True), unpack(weight, torch.bfloat16))
    assert_same_bits(numbers(weight, torch.float16, in_pairs=False), unpack(weight, torch.float16))


@pytest.mark.parametrize(
    ("scale", "exact_in"),
    [
        (2.0**-3, (torch.bfloat16, torch.float16)),
        (1.0 + 2**-10, (torch.float16,)),
        (2.0**-40, (torch.bfloat16,)),
        (128.0, (torch.bfloat16,)),  # times 2 ** 9 it is no float16
        (1.0 + 2**-15, ()),
        (2.0**123, ()),  # times 2 ** 6 no float at all
        (float("nan"), ()),
    ],
)
def test_pairs_are_for_scales_that_their_dtype_holds(scale: float, exact_in: tuple[torch.dtype, ...]) -> None:
    scales = torch.full((16, 2), 0.5)
    scales[3, 1] = scale
    weight = made(scales, None, WHOLE_NUMBERS, "cpu")
    assert weight.form == "whole" and weight.exact_in == exact_in


@triton.jit
def _multiply_add_kernel(a_ptr, b_ptr, c_ptr, out_ptr, dtype: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    sums = multiply_add(tl.load(a_ptr + index), tl.load(b_ptr + index), tl.load(c_ptr + index), dtype)
    tl.store(out_ptr + index, sums)


@pytest.mark.parametrize("dtype", PAIRED, ids=str)
def test_halves_are_multiplied_and_added_apart(dtype: torch.dtype, device: str) -> None:
    """Of numbers whose sums a float64 holds: the assembly rounds once."""
    a, b, c = (torch.randn(512, device=device).to(dtype) for _ in range(3))
    out = torch.empty(256, dtype=torch.int32, device=device)
    _multiply_add_kernel[(1,)](
        *(part.view(torch.int32) for part in (a, b, c)), out, getattr(tl, str(dtype).removeprefix("torch.")), SIZE=256
    )
    assert torch.equal(out.view(dtype), (a.double() * b.double() + c.double()).to(dtype))

"""Products with weights of four bits beside exact ones; in panels beside those of weights dequantized beforehand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.cpu.four_bit_linear import can_pack_four_bits, pack_four_bits_
from bulkrun.ops.cpu.int8_linear import can_pack_int8, pack_int8_
from bulkrun.ops.cpu.panel_linear import compiles_panels, pack_panels, panel_linear
from bulkrun.ops.matmul.four_bit_linear import with_int8
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight, unpack
from bulkrun.ops.matmul.int8_linear import Int8Weight, quantize_int8
from tests.ops import int8_oracle

MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
WHOLE = [float(code) for code in range(16)]
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
ROWS = [0, 1, 2, 5, 16, 17, 33, 64, 129, 300]


class Form(NamedTuple):
    """A kind of weights: what codes stand for, the zero points of groups, and what scales are held in."""

    codebook: list[float]
    zeros: range
    scale_dtype: torch.dtype = torch.float32


FORMS = {
    "zeros": Form(WHOLE, range(16)),
    "one_zero": Form(WHOLE, range(8, 9)),
    "mxfp4": Form(MXFP4, range(0), torch.bfloat16),
    "no_zeros": Form(MXFP4, range(0)),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SIZES = [
    ((32, 32), 32),
    ((96, 64), 8),
    ((64, 160), 160),
    ((160, 384), 128),
    ((320, 96), 24),
]  # [O, I], a group's inputs


def random_weight(form: Form, size: tuple[int, ...], group_size: int) -> tuple[FourBitWeight, torch.Tensor]:
    """A weight, and the numbers that it stands for in float64, found one by one."""
    generator = torch.Generator().manual_seed(size[-1] + group_size)
    codes = torch.randint(16, size, generator=generator, dtype=torch.uint8)
    grid = (*size[:-1], size[-1] // group_size)
    scale = torch.rand(grid, generator=generator).add_(0.1).mul_(0.1).to(form.scale_dtype)
    ends = form.zeros.start, form.zeros.stop
    zero = torch.randint(*ends, grid, generator=generator, dtype=torch.uint8) if form.zeros else None
    numbers = torch.tensor(form.codebook).double()[codes.long()]
    if zero is not None:
        numbers -= zero.double().repeat_interleave(group_size, -1)
    numbers *= scale.double().repeat_interleave(group_size, -1)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return FourBitWeight(packed, scale, zero, torch.tensor(form.codebook)), numbers


@each_form
@pytest.mark.parametrize(("size", "group_size"), SIZES, ids=str)
def test_numbers_are_those_that_codes_stand_for(form: Form, size: tuple[int, int], group_size: int) -> None:
    weight, numbers = random_weight(form, size, group_size)
    assert torch.equal(unpack(weight), numbers.float())
    assert torch.equal(unpack(with_int8(weight)), numbers.float())


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_equals_the_exact_product(form: Form, dtype: torch.dtype) -> None:
    weight, numbers = random_weight(form, (40, 48), 16)
    x, bias = torch.randn(7, 48).to(dtype), torch.randn(40).to(dtype)
    exact = x.double() @ numbers.to(dtype).double().T + bias.double()
    out = ops.four_bit_linear(x, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=EXACT.get(dtype, 2**-10))


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "group_size"), SIZES, ids=str)
def test_panels_give_the_bits_of_a_weight_dequantized_beforehand(
    form: Form, size: tuple[int, int], group_size: int, dtype: torch.dtype
) -> None:
    weight, numbers = random_weight(form, size, group_size)
    needs(dtype)
    plain, bias = pack_panels(numbers.float().to(dtype)), torch.randn(size[0]).to(dtype)
    packed = pack_four_bits_(weight)
    for rows in ROWS:
        x = torch.randn(rows, size[1]).to(dtype)
        assert torch.equal(ops.four_bit_linear(x, packed, bias), panel_linear(x, plain, bias))
        assert torch.equal(ops.four_bit_linear(x, packed, None), panel_linear(x, plain, None))


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "group_size"), [((32, 64), 8), ((96, 128), 128), ((320, 192), 24)], ids=str)
def test_in_int8_panels_give_the_bits_of_a_weight_quantized_anew(
    form: Form, size: tuple[int, int], group_size: int, dtype: torch.dtype
) -> None:
    weight, numbers = random_weight(form, size, group_size)
    if not can_pack_int8(*size):
        pytest.skip("panels of int8 need a compiler and AVX2")
    int8, bias = pack_int8_(Int8Weight(*quantize_int8(numbers.float()))), torch.randn(size[0]).to(dtype)
    packed = pack_four_bits_(with_int8(weight))
    for rows in ROWS:
        x = torch.randn(rows, size[1]).to(dtype)
        assert torch.equal(ops.four_bit_linear(x, packed, bias), ops.int8_linear(x, int8, bias))


@each_form
def test_panels_of_many_inputs_have_those_bits_too(form: Form) -> None:
    """On the tile unit they are unpacked in slices that end within a group."""
    weight, numbers = random_weight(form, (608, 4224), 24)
    needs(torch.bfloat16)
    x = torch.randn(300, 4224).bfloat16()
    plain, int8 = pack_panels(numbers.bfloat16()), pack_int8_(Int8Weight(*quantize_int8(numbers.float())))
    in_int8, packed = pack_four_bits_(with_int8(weight)), pack_four_bits_(random_weight(form, (608, 4224), 24)[0])
    assert torch.equal(ops.four_bit_linear(x, packed, None), panel_linear(x, plain, None))
    assert torch.equal(ops.four_bit_linear(x, in_int8, None), ops.int8_linear(x, int8, None))


@each_form
def test_the_reference_in_int8_equals_sums_of_whole_numbers(form: Form) -> None:
    weight, numbers = random_weight(form, (40, 48), 16)
    x = torch.randn(9, 48)
    exact = int8_oracle.product(x, numbers.float())
    torch.testing.assert_close(ops.four_bit_linear(x, with_int8(weight), None).double(), exact, atol=1e-5, rtol=1e-5)


def test_rows_of_no_numbers_and_of_zeros_are_told_as_a_weight_quantized_anew_tells_them() -> None:
    weight, _ = random_weight(FORMS["mxfp4"], (32, 64), 32)
    weight.scale[3], weight.scale[5, 1], weight.scale[7, 0] = 0.0, float("nan"), float("inf")
    if not can_pack_int8(32, 64):
        pytest.skip("panels of int8 need a compiler and AVX2")
    int8, x = pack_int8_(Int8Weight(*quantize_int8(unpack(weight)))), torch.randn(3, 64)
    ours, theirs = ops.four_bit_linear(x, pack_four_bits_(with_int8(weight)), None), ops.int8_linear(x, int8, None)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
    assert ours[:, 5].isnan().all() and not ours[:, 3].any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 352), (torch.float32, 2080)], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_have_the_same_bits_alone_and_among_others(num_threads: int, dtype: torch.dtype, size: int) -> None:
    needs(dtype)
    packed, before = pack_four_bits_(random_weight(FORMS["zeros"], (160, size), 32)[0]), torch.get_num_threads()
    x = torch.randn(700, size).to(dtype)
    together = ops.four_bit_linear(x, packed, None)
    torch.set_num_threads(num_threads)
    try:
        for first, end in ((0, 1), (3, 20), (5, 12), (100, 140), (650, 700)):
            assert torch.equal(ops.four_bit_linear(x[first:end], packed, None), together[first:end])
    finally:
        torch.set_num_threads(before)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_experts_give_the_bits_of_weights_laid_out_beforehand(
    form: Form, in_int8: bool, has_biases: bool, dtype: torch.dtype
) -> None:
    needs(dtype)
    if in_int8 and not can_pack_int8(64, 64):
        pytest.skip("panels of int8 need a compiler and AVX2")
    sizes = ops.ExpertSizes(64, 128)
    weights = [random_weight(form, (5, *shape), 16) for shape in sizes.shapes]
    codes = [ops.pack_experts(with_int8(one) if in_int8 else one, sizes) for one, _ in weights]
    plain = [numbers.float() for _, numbers in weights]
    beforehand = [Int8Weight(*quantize_int8(one)) for one in plain] if in_int8 else [one.to(dtype) for one in plain]
    others = [ops.pack_experts(one, sizes) for one in beforehand]
    biases = (torch.randn(5, 256).to(dtype), torch.randn(5, 64).to(dtype)) if has_biases else None
    for num_tokens in (1, 3, 40, 300):
        x, logits = torch.randn(num_tokens, 64).to(dtype), torch.randn(num_tokens, 5)
        routed = ops.route_top_k(logits, 2, renormalize=True)
        ours = ops.fused_experts(x, *codes, *routed, biases)
        assert torch.equal(ours, ops.fused_experts(x, *others, *routed, biases))


@each_form
@pytest.mark.parametrize("in_int8", [False, True])
def test_plain_experts_equal_those_dequantized(form: Form, in_int8: bool) -> None:
    weights = [random_weight(form, shape, 8) for shape in ((3, 2 * 24, 40), (3, 40, 24))]
    x, routed = torch.randn(7, 40), ops.route_top_k(torch.randn(7, 3), 2, renormalize=True)
    plain = [numbers.float() for _, numbers in weights]
    expected = ops.fused_experts(
        x, *([Int8Weight(*quantize_int8(one)) for one in plain] if in_int8 else plain), *routed
    )
    ours = ops.fused_experts(x, *[with_int8(one) if in_int8 else one for one, _ in weights], *routed)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_only_whole_panels_of_whole_groups_are_packed() -> None:
    needs(torch.float32)
    assert can_pack_four_bits(32, 96, 48, torch.float32, int8=False)
    for columns, size, group_size in ((40, 96, 48), (32, 80, 40), (32, 96, 36), (32, 96, 64), (32, 96, 12)):
        assert not can_pack_four_bits(columns, size, group_size, torch.float32, int8=False)
    assert not can_pack_four_bits(32, 96, 48, torch.float16, int8=False)
    assert not can_pack_four_bits(32, 96, 48, torch.float32, int8=True), "rows of bytes are whole tiles"


def needs(dtype: torch.dtype) -> None:
    if not compiles_panels(dtype):
        pytest.skip("panels of it need a compiler and AVX2, of bf16 AVX-512's own")

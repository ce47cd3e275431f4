"""int8 products, plain and in panels, beside whole numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bulkrun import ops
from bulkrun.ops.cpu.int8_linear import pack_int8_
from bulkrun.ops.matmul.int8_linear import INT8_MAX, Int8Weight, int8_linear, quantize_int8
from tests.ops import int8_oracle

ROWS = [0, 1, 2, 15, 16, 17, 31, 33, 64, 127, 129, 255, 256, 257, 300, 513]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_weight(size: tuple[int, int]) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)) / size[1] ** 0.5


def packed(weight: torch.Tensor) -> Int8Weight:
    found = pack_int8_(Int8Weight(*quantize_int8(weight)))
    if found.zeros is None:
        pytest.skip("panels of int8 need a compiler and AVX2")
    return found


@given(
    st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_a_number_is_its_scale_times_its_integer_to_half_a_step(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    values, scale = quantize_int8(x)
    assert values.dtype == torch.int8 and scale.dtype == torch.float32
    assert values.abs().max() <= INT8_MAX
    error = (values.double() * scale.double() - x.double()).abs()
    assert (error <= scale.double() * (0.5 + 1e-4)).all()


def test_the_largest_of_a_row_is_127_and_zeros_stay() -> None:
    values, scale = quantize_int8(torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert values.tolist() == [[32, -127, 64], [0, 0, 0]]
    assert scale[0].item() == pytest.approx(2 / 127)


@each_dtype
@pytest.mark.parametrize("size", [(3, 5), (40, 64), (32, 72)], ids=str)
def test_plain_weights_of_any_size_equal_whole_numbers(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = random_weight(size), torch.randn(size[0]).to(dtype)
    x = torch.randn(7, size[1]).to(dtype)
    exact = int8_oracle.product(x, weight) + bias.double()
    for op in (int8_linear, ops.int8_linear):
        out = op(x, pack_int8_(Int8Weight(*quantize_int8(weight))), bias)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=LOOSE[dtype])


@each_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [(32, 64), (96, 128), (416, 384)], ids=str)
def test_panels_have_the_bits_of_the_reference_whatever_the_rows(
    size: tuple[int, int], num_threads: int, dtype: torch.dtype
) -> None:
    weight, bias, before = random_weight(size), torch.randn(size[0]).to(dtype), torch.get_num_threads()
    panels, plain = packed(weight), Int8Weight(*quantize_int8(weight))
    torch.set_num_threads(num_threads)
    try:
        for rows in ROWS:
            x = torch.randn(rows, size[1]).to(dtype)
            assert torch.equal(ops.int8_linear(x, panels, None), int8_linear(x, plain, None))
            with_bias = ops.int8_linear(x, panels, bias)
            torch.testing.assert_close(with_bias, int8_linear(x, plain, bias), atol=1e-6, rtol=LOOSE[dtype])
    finally:
        torch.set_num_threads(before)


def test_panels_of_many_numbers_have_the_bits_of_the_reference() -> None:
    weight = random_weight((96, 8320))
    panels, plain = packed(weight), Int8Weight(*quantize_int8(weight))
    for rows in (32, 33, 129):
        x = torch.randn(rows, weight.shape[1])
        assert torch.equal(ops.int8_linear(x, panels, None), int8_linear(x, plain, None))


def test_panels_hold_the_largest_sums() -> None:
    """Bytes of 255 times 127, as many as a large model has in a row."""
    size = 32768
    x, weight = torch.ones(3, size), torch.ones(32, size)
    x[1], weight[5] = -1.0, -1.0
    assert torch.equal(
        ops.int8_linear(x, packed(weight), None), int8_linear(x, Int8Weight(*quantize_int8(weight)), None)
    )


def test_panels_hold_the_least_integer_which_checkpoints_of_others_have() -> None:
    values = torch.full((32, 32768), -128, dtype=torch.int8)
    plain = Int8Weight(values, torch.ones(32, 1))
    x = torch.stack([torch.ones(32768), -torch.ones(32768)])
    assert torch.equal(
        ops.int8_linear(x, pack_int8_(plain._replace(values=values.clone())), None), int8_linear(x, plain, None)
    )


def test_rows_have_the_same_bits_alone_and_among_others_and_apart() -> None:
    panels, wide = packed(random_weight((96, 320))), torch.randn(700, 640)
    x = wide[:, :320]
    together = ops.int8_linear(x, panels, None)
    for first, end in ((0, 1), (3, 20), (5, 12), (100, 140), (650, 700)):
        assert torch.equal(ops.int8_linear(x[first:end], panels, None), together[first:end])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("in_panels", [False, True])
def test_a_row_that_is_no_numbers_gives_none_and_leaves_others_alone(broken: float, in_panels: bool) -> None:
    weight = random_weight((32, 64))
    plain, x = Int8Weight(*quantize_int8(weight)), torch.randn(20, 64)
    whole = int8_linear(x, plain, None)
    x[7, 3] = broken
    out = ops.int8_linear(x, packed(weight) if in_panels else plain, None)
    assert not out[7].isfinite().any()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(out[others], whole[others])


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e30])
def test_rows_of_very_small_and_large_numbers_stay_finite(size: float) -> None:
    weight = random_weight((32, 64))
    x = torch.randn(4, 64) * size
    out = ops.int8_linear(x, packed(weight), None)
    assert torch.equal(out, int8_linear(x, Int8Weight(*quantize_int8(weight)), None))
    assert out.isfinite().all()

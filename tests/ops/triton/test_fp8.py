"""fp8 in the kernels. The interpreter reads fp8 right (but NaN as 480) and rounds it wrong where a carry reaches the
exponent: there only numbers of the format are written; a GPU is asked for everything, in bfloat16 and to the bit."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.norm_rotary_store import norm_rotary_store as reference_store
from bulkrun.ops.attention.rotary import rotary_cos_sin
from bulkrun.ops.matmul.fp8 import FP8, to_fp8
from bulkrun.ops.matmul.fp8_linear import fp8_linear as reference_linear
from bulkrun.ops.matmul.fp8_linear import quantize_rows as reference_rows
from bulkrun.ops.triton import partial_results
from bulkrun.ops.triton.attention_pairs import both
from bulkrun.ops.triton.fp8_linear import fp8_linear, quantize_rows
from bulkrun.ops.triton.norm_rotary_store import norm_rotary_store
from bulkrun.ops.triton.paged_attention import paged_attention
from bulkrun.windows import Chunks, Window
from tests.ops.prefix_groups import prefixes_of
from tests.ops.triton.attention_cases import Case, exact_attention, make_case

ERROR = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # a few roundings of values near one


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def with_fp8_cache(case: Case) -> Case:
    return dataclasses.replace(case, k_cache=case.k_cache.to(FP8), v_cache=case.v_cache.to(FP8))


def check(case: Case, window: Window | None = None, soft_cap: float | None = None) -> None:
    scale, error = case.q_THD.shape[-1] ** -0.5, ERROR[case.q_THD.dtype]
    ours = paged_attention(
        case.q_THD, case.k_cache, case.v_cache, case.meta, scale=scale, sliding_window=window, soft_cap=soft_cap
    )
    assert ours.dtype == case.q_THD.dtype
    exact = exact_attention(case, scale, window, soft_cap)
    torch.testing.assert_close(ours.double().cpu(), exact, atol=error, rtol=error)


@triton.jit
def _both_kernel(pair_ptr, even_ptr, odd_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    even, odd = both(tl.load(pair_ptr + index))
    tl.store(even_ptr + index, even)
    tl.store(odd_ptr + index, odd)


def test_two_numbers_of_a_pair_are_those_of_its_bytes(device: str) -> None:
    """Each number of the format in either place; NaN too, where it is not the interpreter that reads it."""
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack((codes, codes.flip(0)), 1).to(device)
    even, odd = torch.empty(2, 256, dtype=torch.float16, device=device)
    _both_kernel[(1,)](pairs.view(torch.int16)[:, 0].contiguous(), even, odd, SIZE=256)
    expected = pairs.view(FP8).to(torch.float16)
    places = torch.arange(256, device=device) if device == "cuda" else expected.isfinite().all(1).nonzero()[:, 0]
    for number, ours in enumerate((even, odd)):
        torch.testing.assert_close(ours[places], expected[places, number], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [(6, 2, 32), (5, 1, 80), (40, 2, 16)], ids=str)
def test_decode_reads_fp8_two_dimensions_at_a_time(device: str, heads: tuple[int, int, int]) -> None:
    """Heads that are no power of two wide, and more of them than one tile of 16 rows has."""
    check(with_fp8_cache(make_case([1, 1, 1], [700, 33, 1], heads, dtype=torch.float16, device=device)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (70, 0.7), (Chunks(60), None)])
def test_attention_reads_an_fp8_cache_in_decode_and_in_prompt_chunks(
    device: str, dtype: torch.dtype, window: Window | None, soft_cap: float | None
) -> None:
    case = make_case([1, 1, 40, 3], [130, 17, 90, 9], (6, 2, 32), window=window, dtype=dtype, device=device)
    check(with_fp8_cache(case), window, soft_cap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_shared_prefix_in_fp8_is_read_once(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_results, "CHUNK", 64)
    lens, heads = ([1, 1, 1], [150, 140, 70]), (4, 2, 16)
    case = with_fp8_cache(make_case(*lens, heads, dtype=dtype, device=device, shared_blocks=32))
    shared = prefixes_of([([0, 1], 128)], 3, device)
    check(dataclasses.replace(case, meta=dataclasses.replace(case.meta, shared_prefixes=shared)))


def test_keys_and_values_are_stored_as_fp8_and_saturate(device: str) -> None:
    x = to_fp8(torch.randn(5, 8, 32, device=device) * 30).float()
    x[2, 7, 3], x[3, 6, 1] = 1e4, -1e9
    ours, expected = torch.zeros(2, 2, 4, 4, 2, 32, device=device).to(FP8)
    slots = torch.tensor([3, 8, -1, 15, 4], device=device)
    q_THD = norm_rotary_store(x, None, 1e-6, None, None, ours[0], ours[1], slots)
    assert torch.equal(q_THD, reference_store(x, None, 1e-6, None, None, expected[0], expected[1], slots))
    assert torch.equal(bits(ours), bits(expected))
    assert ours.float().max() == 448.0
    keys = torch.zeros_like(ours[0])
    norm_rotary_store(x[:, :-2], None, 1e-6, None, None, keys, None, slots)
    assert torch.equal(bits(keys), bits(ours[0]))  # no values are beside them


def test_rows_are_quantized_as_by_the_reference(device: str) -> None:
    """Rows whose scale is a power of two, of numbers of the format: the interpreter rounds none of them."""
    x = to_fp8(torch.randn(4, 40, device=device) * 20).float()
    x[:, 0] = 448.0
    x *= torch.tensor([1.0, 2.0**-20, 2.0**90, 0.0], device=device)[:, None]
    for ours, expected in zip(quantize_rows(x), reference_rows(x), strict=True):
        assert torch.equal(ours.float(), expected.float())


def test_a_row_that_is_not_numbers_is_told_by_its_scale(device: str) -> None:
    x = torch.ones(3, 20, device=device)
    x[1, 7], x[2, 0] = math.nan, math.inf
    _, scale_R1 = quantize_rows(x)
    assert scale_R1.flatten().tolist()[0] == pytest.approx(1 / 448)
    assert not scale_R1[1:].isfinite().any()


def test_sizes_that_the_scaled_product_does_not_take_go_by_the_reference(device: str) -> None:
    x, bias = torch.randn(3, 24, device=device), torch.randn(5, device=device)
    weight, scale = reference_rows(torch.randn(5, 24, device=device))
    assert torch.equal(fp8_linear(x, weight, scale, bias), reference_linear(x, weight, scale, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300, Chunks(512)], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 2, 64), (8, 8, 80), (12, 4, 96), (16, 8, 256)], ids=str)
def test_large_bfloat16_steps_over_fp8(heads: tuple[int, int, int], window: Window | None) -> None:
    query_lens, context_lens = [1] * 6 + [700, 129, 5], [1, 2011, 523, 37, 512, 4000, 700, 463, 1328]
    case = make_case(query_lens, context_lens, heads, block_size=16, window=window, dtype=torch.bfloat16, device="cuda")
    check(with_fp8_cache(case), window)
    check(with_fp8_cache(case), window, soft_cap=30.0)


@pytest.mark.gpu
def test_every_number_is_stored_to_the_bit() -> None:
    """All bfloat16 numbers, NaN and infinities among them, as values: nothing is done to them but rounding."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    qkv_TND = torch.zeros(256, 3, 256, dtype=torch.bfloat16, device="cuda")
    qkv_TND[:, 2] = numbers.view(256, 256).cuda()
    ours, expected = torch.zeros(2, 2, 16, 16, 1, 256, device="cuda").to(FP8)
    slots = torch.randperm(256, device="cuda")
    norm_rotary_store(qkv_TND, None, 1e-6, None, None, ours[0], ours[1], slots)
    reference_store(qkv_TND, None, 1e-6, None, None, expected[0], expected[1], slots)
    assert torch.equal(ours.float().nan_to_num(nan=1e6), expected.float().nan_to_num(nan=1e6))


@pytest.mark.gpu
def test_turned_keys_are_within_a_step_of_the_references() -> None:
    qkv_TND = torch.randn(300, 12, 128, dtype=torch.bfloat16, device="cuda")
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 128, 2, device="cuda") / 128)
    cos, sin = rotary_cos_sin(torch.arange(300, device="cuda"), inv_freq, 1.0, torch.bfloat16)
    weight = torch.rand(10, 128, device="cuda").to(torch.bfloat16)
    ours, expected = torch.zeros(2, 2, 20, 16, 2, 128, device="cuda").to(FP8)
    slots = torch.randperm(320, device="cuda")[:300]
    norm_rotary_store(qkv_TND, weight, 1e-6, cos, sin, ours[0], ours[1], slots)
    reference_store(qkv_TND, weight, 1e-6, cos, sin, expected[0], expected[1], slots)
    torch.testing.assert_close(ours.float(), expected.float(), rtol=0.13, atol=0.01)  # 2^-3: two numbers side by side
    assert (bits(ours) == bits(expected)).float().mean() > 0.97


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
def test_the_scaled_product_is_the_references(dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 4096, device="cuda").to(dtype)
    weight, scale = quantize_rows(torch.randn(1536, 4096, device="cuda"))
    bias = torch.randn(1536, device="cuda").to(dtype)
    for ours, expected in zip(quantize_rows(x), reference_rows(x), strict=True):
        assert torch.equal(ours.float(), expected.float())
    ours, exact = fp8_linear(x, weight, scale, bias), reference_linear(x, weight, scale, bias)
    torch.testing.assert_close(ours, exact, rtol=2.0**-7, atol=2.0**-7 * float(exact.abs().max()))

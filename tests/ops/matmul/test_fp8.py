"""Conversion to fp8 beside a table of its numbers, and a paged cache that holds them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.ops import copy_kv, norm_rotary_store, paged_attention, store_kv
from bulkrun.ops.matmul.fp8 import FP8, to_fp8
from tests.ops.attention.test_paged_attention import make_step, naive_attention
from tests.ops.fp8_oracle import all_numbers, rounded


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == FP8
    torch.testing.assert_close(ours.double(), expected, atol=0, rtol=0, equal_nan=True)


@settings(max_examples=150)
@given(st.lists(st.floats(width=32) | st.floats(-500, 500, width=32), min_size=1, max_size=20))
def test_every_number_goes_to_the_nearest_one_and_saturates(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert_same(to_fp8(x), rounded(x))


def test_the_formats_own_numbers_their_neighbours_and_the_points_between_them() -> None:
    numbers = all_numbers().float()
    between = (numbers[1:] + numbers[:-1]) / 2  # ties: exact in float32
    for x in (numbers, between, torch.nextafter(between, torch.tensor(0.0)), torch.nextafter(between, between + 1)):
        assert_same(to_fp8(x), rounded(x))
        assert_same(to_fp8(-x), rounded(-x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 449.0, -5e4, 0.3], dtype=dtype)
    assert_same(to_fp8(x), rounded(x))


def test_stored_keys_and_values_are_rounded_once_and_lie_in_their_slots() -> None:
    generator = torch.Generator().manual_seed(0)
    k_TKD, v_TKD = 300 * torch.randn(2, 5, 2, 8, generator=generator)
    caches = [torch.full((4, 3, 2, 8), math.nan).to(FP8) for _ in range(2)]
    slots = torch.tensor([4, -1, 11, 5, 7])
    store_kv(k_TKD, v_TKD, *caches, slots)
    for cache, x_TKD in zip(caches, (k_TKD, v_TKD), strict=True):
        by_slot = cache.flatten(0, 1).float()
        written = slots.clamp_min(0)
        assert_same(cache.flatten(0, 1)[written], rounded(x_TKD))
        untouched = torch.ones(12, dtype=torch.bool).index_fill(0, written, False)
        assert by_slot[untouched].isnan().all()


def test_copied_slots_hold_the_same_bytes() -> None:
    k_cache, v_cache = torch.randn(2, 4, 3, 1, 8).to(FP8)
    before = k_cache.view(torch.uint8).flatten(0, 1).clone()
    copy_kv(k_cache, v_cache, torch.tensor([[3, 4], [9, 6]]))
    after = k_cache.view(torch.uint8).flatten(0, 1)
    assert torch.equal(after[[9, 6]], before[[3, 4]])
    assert torch.equal(after[:6], before[:6])


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 80), (8, 1, 96), (10, 2, 128), (4, 1, 256), (6, 1, 64)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (None, 0.7)])
def test_attention_is_that_over_the_rounded_keys_and_values(
    heads: tuple[int, int, int], dtype: torch.dtype, tolerance: float, window: int | None, soft_cap: float | None
) -> None:
    """Scores up to 10, which float32 holds to 5e-7, times values up to 8."""
    num_heads, num_kv_heads, head_dim = heads
    query_lens, generator = [1, 1, 1, 9, 3, 17], torch.Generator().manual_seed(1)
    meta, slots = make_step(query_lens, [1, 130, 7, 9, 20, 75], block_size=4, seed=0)
    shape = (int(meta.block_tables_SM.max()) + 1, 4, num_kv_heads, head_dim)
    exact = [torch.full(shape, math.nan) for _ in range(2)]  # slots of nobody stay NaN: reading one would show
    for own in slots:
        for cache in exact:
            cache.flatten(0, 1)[own] = 2 * torch.randn(len(own), num_kv_heads, head_dim, generator=generator)
    q_THD = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    scale = head_dim**-0.5
    k_cache, v_cache = (cache.to(FP8) for cache in exact)
    ours = paged_attention(q_THD, k_cache, v_cache, meta, scale=scale, sliding_window=window, soft_cap=soft_cap)
    oracle = naive_attention(q_THD, *(rounded(cache) for cache in exact), query_lens, slots, scale, window, soft_cap)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), oracle, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("cpu_ops")
def test_the_fused_op_stores_what_the_parts_would() -> None:
    generator = torch.Generator().manual_seed(2)
    qkv_TND = 40 * torch.randn(3, 6, 16, generator=generator)
    caches = [torch.zeros(2, 4, 1, 16).to(FP8) for _ in range(2)]
    slots = torch.tensor([4, 6, 1])
    q_THD = norm_rotary_store(qkv_TND, None, 1e-6, None, None, *caches, slots)
    assert torch.equal(q_THD, qkv_TND[:, :4])
    assert_same(caches[0].flatten(0, 1)[slots], rounded(qkv_TND[:, 4:5]))
    assert_same(caches[1].flatten(0, 1)[slots], rounded(qkv_TND[:, 5:]))

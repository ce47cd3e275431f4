"""QK-norm, rotary and KV write in one kernel beside the ops it replaces; slots that are nobody's stay as they are."""

from __future__ import annotations

import math

import pytest
import torch

from bulkrun.ops import rotary_cos_sin
from bulkrun.ops.attention.norm_rotary_store import norm_rotary_store as reference
from bulkrun.ops.triton.norm_rotary_store import norm_rotary_store

ERROR = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # the reference rounds once more in between


def check(
    heads: tuple[int, int, int],
    *,
    device: str,
    rotary_dim: int | None = None,
    norm: bool,
    dtype: torch.dtype,
    num_tokens: int = 3,
    norms_values: bool = False,
    keys_are_values: bool = False,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    num_own = num_kv_heads * (1 if keys_are_values else 2)
    qkv_TND = torch.randn(num_tokens, num_heads + num_own, head_dim).to(device, dtype)
    qkv_TND[-1] *= 1e-3  # so small that what is added to its mean square matters
    num_normed = num_heads + num_kv_heads * (2 if norms_values else 1)
    weight = torch.rand(num_normed, head_dim).to(device, dtype) if norm else None
    positions = torch.randint(0, 9000, (num_tokens,), device=device)
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, rotary_dim, 2, device=device) / max(rotary_dim, 1))
    cos, sin = rotary_cos_sin(positions, inv_freq, 1.1, dtype) if rotary_dim else (None, None)
    slots = torch.randperm(4 * num_tokens + 2)[:num_tokens].to(device) + 3
    slots[1] = -1
    caches = [
        torch.full((2 * num_tokens + 2, 3, num_kv_heads, head_dim), math.nan, device=device, dtype=dtype)
        for _ in range(4)
    ]
    ours = norm_rotary_store(
        qkv_TND, weight, 1e-6, cos, sin, caches[0], caches[1], slots, keys_are_values=keys_are_values
    )
    expected = reference(qkv_TND, weight, 1e-6, cos, sin, caches[2], caches[3], slots, keys_are_values=keys_are_values)
    error = ERROR[dtype]
    torch.testing.assert_close(ours, expected, atol=error, rtol=error)
    torch.testing.assert_close(caches[0], caches[2], atol=error, rtol=error, equal_nan=True)
    if norms_values:
        torch.testing.assert_close(caches[1], caches[3], atol=error, rtol=error, equal_nan=True)
    else:
        assert torch.equal(caches[1].nan_to_num(nan=7.0), caches[3].nan_to_num(nan=7.0))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(6, 2, 16), (4, 4, 80), (5, 1, 96)], ids=str)
def test_equals_its_parts(device: str, heads: tuple[int, int, int], norm: bool) -> None:
    check(heads, device=device, norm=norm, dtype=torch.float32)


@pytest.mark.parametrize("rotary_dim", [0, 12])
def test_turns_only_the_first_dimensions_or_none(device: str, rotary_dim: int) -> None:
    check((3, 1, 32), device=device, rotary_dim=rotary_dim, norm=True, dtype=torch.float32)


def test_half_precision(device: str) -> None:
    check((3, 1, 32), device=device, norm=True, dtype=torch.float16)


@pytest.mark.parametrize(("heads", "rotary_dim"), [((6, 2, 16), 16), ((3, 1, 80), 12), ((2, 1, 512), 512)], ids=str)
def test_values_are_normalized_too(device: str, heads: tuple[int, int, int], rotary_dim: int) -> None:
    check(heads, device=device, rotary_dim=rotary_dim, norm=True, norms_values=True, dtype=torch.float32)


@pytest.mark.parametrize("norms_values", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 4])
def test_keys_are_values(device: str, rotary_dim: int, norms_values: bool) -> None:
    values = {"norms_values": norms_values, "keys_are_values": True}
    check((5, 2, 16), device=device, rotary_dim=rotary_dim, norm=True, dtype=torch.float32, **values)


@pytest.mark.parametrize("norm", [False, True])
def test_queries_alone(device: str, norm: bool) -> None:
    q_THD = torch.randn(3, 5, 32).to(device)
    weight = torch.rand(5, 32).to(device) if norm else None
    cos, sin = rotary_cos_sin(torch.arange(3, device=device), torch.rand(16, device=device), 1.0, torch.float32)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    results = [op(q_THD, weight, 1e-6, cos, sin, None, None, slots) for op in (norm_rotary_store, reference)]
    torch.testing.assert_close(*results, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("heads", "rotary_dim"), [((5, 1, 24), 8), ((20, 1, 576), 64)], ids=str)
def test_values_are_within_keys(device: str, heads: tuple[int, int, int], rotary_dim: int) -> None:
    """Latents, normalized before, and in front of them the part of a key that turns: keys alone are written."""
    num_heads, num_kv_heads, head_dim = heads
    qk_TND = torch.randn(3, num_heads + num_kv_heads, head_dim).to(device)
    inv_freq = torch.rand(rotary_dim // 2, device=device)
    cos, sin = rotary_cos_sin(torch.arange(3, device=device) + 7, inv_freq, 1.0, torch.float32)
    slots = torch.tensor([4, -1, 7], device=device)
    caches = torch.full((2, 3, 3, num_kv_heads, head_dim), math.nan, device=device)
    results = [
        op(qk_TND, None, 1e-6, cos, sin, cache, None, slots)
        for op, cache in zip((norm_rotary_store, reference), caches, strict=True)
    ]
    torch.testing.assert_close(*results, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(*caches, atol=2e-6, rtol=2e-6, equal_nan=True)


def test_no_tokens(device: str) -> None:
    cache, angles = torch.zeros(2, 4, 1, 8, device=device), torch.zeros(0, 1, 8, device=device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    q_THD = norm_rotary_store(torch.empty(0, 4, 8, device=device), None, 1e-6, angles, angles, cache, cache, slots)
    assert q_THD.shape == (0, 2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 2, 64), (8, 8, 80), (16, 8, 256)], ids=str)
def test_large_bfloat16_steps(heads: tuple[int, int, int], norm: bool) -> None:
    check(heads, device="cuda", norm=norm, dtype=torch.bfloat16, num_tokens=2048)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 1, 256), (32, 4, 512)], ids=str)
def test_large_bfloat16_steps_with_normalized_values(heads: tuple[int, int, int]) -> None:
    check(heads, device="cuda", norm=True, norms_values=True, dtype=torch.bfloat16, num_tokens=2048)

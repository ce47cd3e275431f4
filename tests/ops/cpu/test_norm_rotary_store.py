"""The compiled pass over a projection beside the three ops that are its reference."""

from __future__ import annotations

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.attention.norm_rotary_store import norm_rotary_store as reference
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.cpu.norm_rotary_store import norm_rotary_store
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
TOKENS, HEADS, KV_HEADS = 5, 3, 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}  # the reference rounds products of bf16 before it adds them


@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (20, 12), (256, 256), (96, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, weight_dtype: torch.dtype | None
) -> None:
    if dtype == torch.float32 and weight_dtype == torch.bfloat16:
        pytest.skip("no model has weights narrower than its activations")
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(TOKENS, HEADS + 2 * KV_HEADS + 1, head_dim, generator=generator).to(dtype)
    qkv_TND = wide[:, :-1]  # rows further apart than they are long
    weight = None
    if weight_dtype is not None:
        weight = (torch.rand(HEADS + KV_HEADS, head_dim, generator=generator) + 0.5).to(weight_dtype)
    cos, sin = None, None
    if rotary_dim:
        frequencies = torch.rand(rotary_dim // 2, generator=generator)
        cos, sin = ops.rotary_cos_sin(torch.tensor([0, 7, 3, 900, 12]), frequencies, 1.0, dtype)
    slots = torch.tensor([9, -1, 4, 13, 5])
    results = []
    for op in (reference, norm_rotary_store):
        caches = torch.zeros(2, 4, 4, KV_HEADS, head_dim, dtype=dtype)
        q_THD = op(qkv_TND.clone(), weight, 1e-6, cos, sin, caches[0], caches[1], slots)
        results.append((q_THD, caches[0, 1:], caches[1, 1:]))  # padding may write to the null block
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("keys_are_values", [False, True])
@pytest.mark.parametrize("head_dim", [20, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_normalized_too_and_not_turned(dtype: torch.dtype, head_dim: int, keys_are_values: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    num_own = KV_HEADS if keys_are_values else 2 * KV_HEADS
    qkv_TND = torch.randn(TOKENS, HEADS + num_own, head_dim, generator=generator).to(dtype)
    weight = torch.rand(HEADS + 2 * KV_HEADS, head_dim, generator=generator) + 0.5
    cos, sin = ops.rotary_cos_sin(torch.arange(TOKENS), torch.rand(head_dim // 2, generator=generator), 1.0, dtype)
    slots, results = torch.tensor([9, -1, 4, 13, 5]), []
    for op in (reference, norm_rotary_store):
        caches = torch.zeros(2, 4, 4, KV_HEADS, head_dim, dtype=dtype)
        q_THD = op(
            qkv_TND.clone(), weight, 1e-6, cos, sin, caches[0], caches[1], slots, keys_are_values=keys_are_values
        )
        results.append((q_THD, caches[0, 1:], caches[1, 1:]))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    values = rms_norm(qkv_TND[:, -KV_HEADS:], weight[-KV_HEADS:], 1e-6)
    torch.testing.assert_close(results[1][2].flatten(0, 1)[9 - 4], values[0], atol=1e-5, rtol=8e-3)


@pytest.mark.parametrize("kind", ["long heads", "turns of another dtype", "numbers apart"])
def test_what_is_not_compiled_goes_to_the_reference(kind: str) -> None:
    head_dim = 1032 if kind == "long heads" else 16
    qkv_TND = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, head_dim)
    if kind == "numbers apart":
        qkv_TND = qkv_TND.repeat_interleave(2, -1)[..., ::2]
    if kind == "turns of another dtype":
        qkv_TND = qkv_TND.bfloat16()
    turns = ops.rotary_cos_sin(torch.arange(TOKENS), torch.rand(8), 1.0, torch.float32)
    weight, slots, results = torch.rand(HEADS + KV_HEADS, head_dim), torch.tensor([9, 7, 4, 13, 5]), []
    for op, given in ((reference, qkv_TND.clone()), (norm_rotary_store, qkv_TND)):
        caches = torch.zeros(2, 4, 4, KV_HEADS, head_dim, dtype=qkv_TND.dtype)
        results.append((op(given, weight, 1e-6, *turns, *caches, slots), caches))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_alone(dtype: torch.dtype) -> None:
    q_THD, weight = torch.randn(TOKENS, HEADS, 64).to(dtype), torch.rand(HEADS, 64)
    cos, sin = ops.rotary_cos_sin(torch.arange(TOKENS), torch.rand(32), 1.0, dtype)
    slots = torch.zeros(TOKENS, dtype=torch.int64)
    expected = reference(q_THD.clone(), weight, 1e-6, cos, sin, None, None, slots)
    ours = norm_rotary_store(q_THD, weight, 1e-6, cos, sin, None, None, slots)
    assert ours.shape == (TOKENS, HEADS, 64)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(24, 8), (576, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_alone(dtype: torch.dtype, head_dim: int, rotary_dim: int, cache_dtype: torch.dtype | None) -> None:
    """Of latent attention, whose values are within them."""
    generator = torch.Generator().manual_seed(0)
    qk_TND = torch.randn(TOKENS, HEADS + 1, head_dim, generator=generator).to(dtype)
    cos, sin = ops.rotary_cos_sin(torch.arange(TOKENS), torch.rand(rotary_dim // 2, generator=generator), 1.0, dtype)
    slots, results = torch.tensor([9, -1, 4, 13, 5]), []
    for op in (reference, norm_rotary_store):
        k_cache = torch.zeros(4, 4, 1, head_dim, dtype=dtype).to(cache_dtype or dtype)
        q_THD = op(qk_TND.clone(), None, 0.0, cos, sin, k_cache, None, slots)
        results.append((q_THD, k_cache[1:].to(dtype)))
    (expected_q, expected_k), (q_THD, keys) = results
    torch.testing.assert_close(q_THD, expected_q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if cache_dtype == FP8:  # one of its steps, of the smallest numbers 2**-9
        torch.testing.assert_close(keys, expected_k, atol=2**-9, rtol=0.125)
    else:
        torch.testing.assert_close(keys, expected_k, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert keys.flatten(0, 1)[[5, 0, 9, 1]].ne(0).any(-1).all()  # slots 9, 4, 13 and 5

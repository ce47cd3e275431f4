"""A KV cache in bfloat16 under float32 activations: half the bytes, read exactly, written as torch rounds."""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops.attention.norm_rotary_store import norm_rotary_store as reference
from bulkrun.ops.attention.rotary import rotary_cos_sin
from bulkrun.ops.cpu.dtypes import cache_format
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.cpu.norm_rotary_store import norm_rotary_store
from bulkrun.ops.cpu.paged_attention import can_attend, paged_attention
from bulkrun.windows import Chunks, Window
from tests.ops.attention.test_paged_attention import make_step

pytestmark = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")


def test_it_is_compiled_for_float32_alone() -> None:
    cache = torch.zeros(2, 16, 1, 64, dtype=torch.bfloat16)
    assert can_attend(torch.zeros(1, 4, 64), cache)
    assert cache_format(torch.float32, torch.bfloat16) is None
    assert cache_format(torch.float16, torch.float32) is None


@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("window", [None, 50, Chunks(64)])
@pytest.mark.parametrize(
    "heads", [(4, 4, 64), (6, 3, 80), (6, 2, 90), (5, 1, 256), (14, 2, 64), (8, 1, 20), (40, 2, 128)], ids=str
)
def test_it_gives_the_bits_of_a_cache_that_holds_the_same_numbers(
    heads: tuple[int, int, int], window: Window | None, block_size: int
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    meta, slots = make_step([1, 1, 1, 2, 70, 130], [1, 90, 300, 64, 70, 200], block_size, seed=0)
    generator = torch.Generator().manual_seed(0)
    shape = (2, int(meta.block_tables_SM.max()) + 1, block_size, num_kv_heads, head_dim)
    caches = torch.full(shape, torch.nan, dtype=torch.bfloat16)  # what nobody owns stays so
    for own in slots:
        drawn = torch.randn(2, len(own), *shape[3:], generator=generator)
        caches.flatten(1, 2)[:, own] = drawn.bfloat16()
    q_THD = torch.randn(205, num_heads, head_dim, generator=generator)
    ours, expected = (
        paged_attention(q_THD, *held, meta, scale=head_dim**-0.5, sliding_window=window)
        for held in (caches, caches.float())
    )
    assert torch.equal(ours, expected) and not ours.isnan().any()


def test_every_number_is_written_as_torch_rounds_it() -> None:
    """All numbers of bfloat16, the ties between two, and what is beside these. Subnormal ones may become zeros: the
    instruction that AVX-512 BF16 has for it flushes them."""
    numbers = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16).float()
    ties = (numbers.view(torch.int32) + 2**15).view(torch.float32)
    x = torch.cat((numbers, ties, ties.nextafter(ties - 1), ties.nextafter(ties + 1)))
    caches = torch.zeros(2, len(x) // 64 + 1, 1, 1, 64, dtype=torch.bfloat16)
    qkv_TND = x.view(-1, 1, 64).expand(-1, 3, -1).contiguous()
    norm_rotary_store(qkv_TND, None, 1e-6, None, None, *caches, torch.arange(1, len(caches[0])))
    expected, is_subnormal = x.bfloat16(), x.abs() < torch.finfo(torch.float32).tiny
    for written in caches[:, 1:].flatten(1):
        flushed = is_subnormal & (written == 0)
        torch.testing.assert_close(written, expected.where(~flushed, 0.0), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (20, 12), (96, 0)])
def test_what_is_written_is_what_a_cache_of_float32_gets_rounded(
    head_dim: int, rotary_dim: int, is_normed: bool
) -> None:
    """Queries are the same bits; values, which nothing turns, those of the reference too."""
    generator = torch.Generator().manual_seed(0)
    qkv_TND = 9 * torch.randn(7, 7, head_dim, generator=generator)
    weight = torch.rand(5, head_dim, generator=generator) + 0.5 if is_normed else None
    turns = (None, None)
    if rotary_dim:
        frequencies = torch.rand(rotary_dim // 2, generator=generator)
        turns = rotary_cos_sin(torch.tensor([0, 7, 3, 900, 12, 1, 2]), frequencies, 1.0, torch.float32)
    slots = torch.tensor([9, -1, 4, 13, 5, 6, 15])
    own, ours, theirs = (
        torch.zeros(2, 4, 4, 2, head_dim, dtype=kind) for kind in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    queries = [norm_rotary_store(qkv_TND, weight, 1e-6, *turns, *caches, slots) for caches in (own, ours)]
    reference(qkv_TND, weight, 1e-6, *turns, *theirs, slots)
    assert torch.equal(*queries)
    assert torch.equal(ours[:, 1:], own[:, 1:].bfloat16())  # padding may write to the null block
    assert torch.equal(ours[1, 1:], theirs[1, 1:])

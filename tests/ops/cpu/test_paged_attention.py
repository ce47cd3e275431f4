"""What compiled attention promises beyond the reference; that it equals the oracle stands in tests/ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bulkrun.ops import AttentionMetadata
from bulkrun.ops.attention.paged_attention import paged_attention as reference
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.cpu.paged_attention import paged_attention
from bulkrun.ops.matmul.fp8 import FP8, raw_bytes
from bulkrun.windows import Chunks, Window
from tests.ops.attention.test_paged_attention import check_against_oracle, make_step

pytestmark = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
BLOCK_SIZE = 16


@pytest.mark.parametrize(
    "heads",
    [
        (4, 4, 64),
        (6, 2, 80),
        (8, 1, 96),
        (16, 2, 128),
        (4, 2, 256),
        (71, 1, 64),
        (128, 1, 64),
        (200, 2, 64),
        (130, 1, 16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (70, None), (Chunks(100), None), (None, 5.0)])
def test_every_head_dim_in_bfloat16(heads: tuple[int, int, int], window: Window | None, soft_cap: float | None) -> None:
    check_against_oracle(
        [1, 1, 1, 40, 3, 130],
        [1, 200, 65, 40, 64, 300],
        heads=heads,
        block_size=BLOCK_SIZE,
        window=window,
        soft_cap=soft_cap,
        dtype=torch.bfloat16,
        tolerance=2e-2,
    )


def part(meta: AttentionMetadata, seq: int) -> tuple[AttentionMetadata, slice]:
    """One sequence of a step by itself, and its tokens in the step."""
    start, end = meta.cu_seqlens_q[seq : seq + 2].tolist()
    alone = replace(
        meta,
        slot_mapping_T=meta.slot_mapping_T[start:end],
        block_tables_SM=meta.block_tables_SM[seq : seq + 1],
        context_lens_S=meta.context_lens_S[seq : seq + 1],
        cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
        num_decode_seqs=int(end - start == 1),
    )
    return alone, slice(start, end)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["own", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 50, Chunks(64)])
@pytest.mark.parametrize(
    "heads",
    [(6, 2, 64), (2, 2, 128), (8, 1, 32), (16, 1, 64), (17, 1, 64), (4, 2, 80), (14, 2, 96), (5, 1, 48)],
    ids=str,
)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_step(
    dtype: torch.dtype, window: Window | None, heads: tuple[int, int, int], block_size: int, is_fp8: bool
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    meta, slots = make_step([1, 1, 70, 130], [90, 300, 70, 200], block_size, seed=0)
    generator = torch.Generator().manual_seed(0)
    num_blocks = int(meta.block_tables_SM.max()) + 1
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, generator=generator)
    caches = caches.to(FP8 if is_fp8 else dtype)
    q_THD = torch.randn(202, num_heads, head_dim, generator=generator).to(dtype)
    together = paged_attention(q_THD, *caches, meta, scale=0.125, sliding_window=window)
    for seq in range(4):
        alone, tokens = part(meta, seq)
        ours = paged_attention(q_THD[tokens], *caches, alone, scale=0.125, sliding_window=window)
        assert torch.equal(ours, together[tokens])
    # the last prompt token computed by itself, as a step of decoding
    last = AttentionMetadata(
        slot_mapping_T=torch.tensor(slots[3][-1:]),
        block_tables_SM=meta.block_tables_SM[3:],
        context_lens_S=meta.context_lens_S[3:],
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        num_decode_seqs=1,
        max_query_len=1,
        max_context_len=200,
    )
    decoded = paged_attention(q_THD[-1:], *caches, last, scale=0.125, sliding_window=window)
    assert torch.equal(decoded, together[-1:])


@pytest.mark.parametrize("is_fp8", [False, True], ids=["own", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "value_dim"), [((16, 1, 80), 64), ((20, 1, 576), 512)], ids=str)
def test_rows_whose_values_are_within_keys_have_the_same_bits_alone(
    heads: tuple[int, int, int], value_dim: int, dtype: torch.dtype, is_fp8: bool
) -> None:
    meta, _ = make_step([1, 1, 70, 130], [90, 300, 70, 200], BLOCK_SIZE, seed=0)
    generator = torch.Generator().manual_seed(0)
    k_cache = torch.randn(int(meta.block_tables_SM.max()) + 1, BLOCK_SIZE, 1, heads[2], generator=generator)
    k_cache = k_cache.to(FP8 if is_fp8 else dtype)
    v_cache = k_cache[..., -value_dim:]
    q_THD = torch.randn(202, heads[0], heads[2], generator=generator).to(dtype)
    together = paged_attention(q_THD, k_cache, v_cache, meta, scale=0.05, sliding_window=None)
    expected = reference(q_THD, k_cache, v_cache, meta, scale=0.05, sliding_window=None)
    error = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(together, expected, atol=error, rtol=error)
    for seq in range(4):
        alone, tokens = part(meta, seq)
        ours = paged_attention(q_THD[tokens], k_cache, v_cache, alone, scale=0.05, sliding_window=None)
        assert torch.equal(ours, together[tokens])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("window", [21, Chunks(24)])
@pytest.mark.parametrize("context_len", [17, 31, 33, 64, 100, 129])
def test_what_a_decoding_token_does_not_see_may_be_anything(
    context_len: int, window: Window | None, cache_dtype: torch.dtype
) -> None:
    meta, slots = make_step([1], [context_len], BLOCK_SIZE, seed=0)
    caches = torch.randn(2, int(meta.block_tables_SM.max()) + 2, BLOCK_SIZE, 2, 64).to(cache_dtype)
    q_THD = torch.randn(1, 4, 64).bfloat16()
    clean = paged_attention(q_THD, *caches, meta, scale=0.2, sliding_window=window)
    first = (context_len - 1) // 24 * 24 if isinstance(window, Chunks) else context_len - 21
    seen = set(slots[0][max(first, 0) :])
    unseen = [slot for slot in range(caches.shape[1] * BLOCK_SIZE) if slot not in seen]
    nan = torch.full((), torch.nan).to(cache_dtype)
    raw_bytes(caches).flatten(1, 2)[:, unseen] = raw_bytes(nan)
    assert torch.equal(paged_attention(q_THD, *caches, meta, scale=0.2, sliding_window=window), clean)


def test_numbers_that_are_none_stay_in_their_sequence() -> None:
    meta, slots = make_step([1, 1], [20, 20], BLOCK_SIZE, seed=0)
    caches = torch.randn(2, int(meta.block_tables_SM.max()) + 1, BLOCK_SIZE, 1, 32)
    caches[0].flatten(0, 1)[slots[0][3]] = float("nan")
    out = paged_attention(torch.randn(2, 2, 32), *caches, meta, scale=0.2, sliding_window=None)
    assert out[0].isnan().all() and out[1].isfinite().all()

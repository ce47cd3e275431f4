"""Attention of one query token per sequence over a paged cache: long contexts are cut into chunks of a fixed size.

One program takes all query heads of one key head over one chunk, so keys and values are read once; partial results are
merged by their log-sum-exp, in order. The cuts lie at multiples of `CHUNK` positions, so a sequence's result does not
depend on the rest of the batch. Knows no prefill; a shared prefix's partial results may be there already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention_metadata import AttentionMetadata
from bulkrun.ops.triton.attention_tile import attend_tile, padded_dim

CHUNK = 512  # keys: partial results of 4 heads add about 2% to the bytes read


@dataclass(frozen=True, slots=True)
class PartialResults:
    """Normalized attention over each chunk [S, C, H, D] and base-2 log-sum-exp [S, C, H], float32; C chunks at most.

    Chunk 0 of a sequence is the first with a key in the sliding window. Chunks without keys are not written.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(cls, q_SHD: torch.Tensor, num_chunks: int) -> PartialResults:
        """Room, uninitialized."""
        num_seqs, num_heads, head_dim = q_SHD.shape
        shape = (num_seqs, num_chunks, num_heads)
        new = q_SHD.new_empty
        return cls(new(*shape, head_dim, dtype=torch.float32), new(*shape, dtype=torch.float32))


def max_chunks(max_context_len: int, sliding_window: int | None) -> int:
    """Chunks that any sequence can touch, at least one."""
    chunks = triton.cdiv(max_context_len, CHUNK)
    if sliding_window is not None:
        chunks = min(chunks, triton.cdiv(sliding_window - 1, CHUNK) + 1)
    return max(chunks, 1)


def decode_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out_THD: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    partial: PartialResults,
    prefix_lens_S: torch.Tensor | None = None,
) -> None:
    """Write the rows of the step's decode sequences, the first of `out_THD`; sequences without context get zeros.

    prefix_lens_S: int32; chunks that lie wholly in a sequence's shared prefix are in `partial` already.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    num_chunks = partial.out.shape[1]
    group, dim = num_heads // num_kv_heads, padded_dim(head_dim)
    window = sliding_window or 0
    _decode_kernel[(meta.num_decode_seqs, num_kv_heads, num_chunks)](
        q_THD,
        k_cache,
        v_cache,
        meta.block_tables_SM,
        meta.context_lens_S,
        prefix_lens_S,
        out_THD,
        partial.out,
        partial.lse,
        scale,
        q_THD.stride(0),
        meta.block_tables_SM.stride(0),
        num_chunks,
        NUM_HEADS=num_heads,
        GROUP=group,
        PADDED_GROUP=max(triton.next_power_of_2(group), 16),
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=dim,
        BLOCK_N=64 if dim * q_THD.element_size() <= 256 else 32,
        CHUNK=CHUNK,
        SLIDING_WINDOW=window,
        SOFT_CAP=soft_cap or 0.0,
        HAS_PREFIX=prefix_lens_S is not None,
        IN_ONE=num_chunks == 1,
        num_warps=4,
        num_stages=5,  # half of them for the block ids, which keys wait for: keys and values are two tiles deep
    )
    if num_chunks > 1:
        _merge_kernel[(meta.num_decode_seqs, num_heads)](
            partial.out,
            partial.lse,
            meta.context_lens_S,
            out_THD,
            num_chunks,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=dim,
            CHUNK=CHUNK,
            SLIDING_WINDOW=window,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["table_stride", "num_chunks"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    context_lens_ptr,
    prefix_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    q_stride,
    table_stride,
    num_chunks,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    IN_ONE: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    index = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + seq)
    first_key = _first_key(context_len, SLIDING_WINDOW)
    chunk = first_key // CHUNK + index
    begin = tl.maximum(chunk * CHUNK, first_key)
    end = tl.minimum(chunk * CHUNK + CHUNK, context_len)
    if HAS_PREFIX and chunk < tl.load(prefix_lens_ptr + seq) // CHUNK:
        return
    if begin >= end and not IN_ONE:
        return

    head_M = tl.arange(0, PADDED_GROUP)
    dim_D = tl.arange(0, PADDED_DIM)
    is_real_MD = (head_M < GROUP)[:, None] & (dim_D < HEAD_DIM)[None, :]
    offset_MD = (kv_head * GROUP + head_M)[:, None] * HEAD_DIM + dim_D[None, :]
    q_MD = tl.load(q_ptr + seq * q_stride + offset_MD, mask=is_real_MD, other=0.0)
    acc_MD = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    max_M = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    sum_M = tl.zeros([PADDED_GROUP], tl.float32)
    position_M = tl.zeros([PADDED_GROUP], tl.int32) + (context_len - 1)
    for tile_start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        acc_MD, max_M, sum_M = attend_tile(
            q_MD,
            acc_MD,
            max_M,
            sum_M,
            k_ptr + kv_head * HEAD_DIM,
            v_ptr + kv_head * HEAD_DIM,
            block_tables_ptr + seq * table_stride,
            tile_start,
            begin,
            end,
            position_M,
            scale,
            SLOT_STRIDE,
            BLOCK_SIZE,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_N,
            SLIDING_WINDOW,
            SOFT_CAP,
            True,
        )
    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    if IN_ONE:
        tl.store(out_ptr + seq * NUM_HEADS * HEAD_DIM + offset_MD, out_MD, mask=is_real_MD)
    else:
        row = seq * num_chunks + index
        tl.store(partial_ptr + row * NUM_HEADS * HEAD_DIM + offset_MD, out_MD, mask=is_real_MD)
        lse_M = max_M + tl.log2(sum_M)
        tl.store(lse_ptr + row * NUM_HEADS + kv_head * GROUP + head_M, lse_M, mask=head_M < GROUP)


@triton.jit(do_not_specialize=["num_chunks"])
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    out_ptr,
    num_chunks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context_len = tl.load(context_lens_ptr + seq)
    first_chunk = _first_key(context_len, SLIDING_WINDOW) // CHUNK
    dim_D = tl.arange(0, PADDED_DIM)
    acc_D = tl.zeros([PADDED_DIM], tl.float32)
    highest = -float("inf")
    total = 0.0
    for index in range(0, tl.cdiv(context_len, CHUNK) - first_chunk):
        row = (seq * num_chunks + index) * NUM_HEADS + head
        lse = tl.load(lse_ptr + row)
        part_D = tl.load(partial_ptr + row * HEAD_DIM + dim_D, mask=dim_D < HEAD_DIM, other=0.0)
        new_highest = tl.maximum(highest, lse)
        decay = tl.exp2(highest - new_highest)
        weight = tl.exp2(lse - new_highest)
        acc_D = acc_D * decay + part_D * weight
        total = total * decay + weight
        highest = new_highest
    out_D = acc_D / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (seq * NUM_HEADS + head) * HEAD_DIM + dim_D, out_D, mask=dim_D < HEAD_DIM)


@triton.jit
def _first_key(context_len, SLIDING_WINDOW: tl.constexpr):
    """The first key that the last position sees."""
    if SLIDING_WINDOW > 0:
        return tl.maximum(context_len - SLIDING_WINDOW, 0)
    else:
        return context_len * 0

"""Attention of one query token per sequence over a paged cache: long contexts are cut into chunks of a fixed size.

One program takes all query heads of one key head over one chunk, so keys and values are read once; partial results are
merged by their log-sum-exp, in order. The cuts lie at multiples of `CHUNK` positions, so a sequence's result does not
depend on the rest of the batch. How many programs there are depends on bounds that the host knows, what they do on
lengths that the device knows, so that a CUDA graph can hold them. Knows no prefill; a shared prefix's partial results
may be there already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention_metadata import AttentionMetadata
from bulkrun.ops.triton.attention_tile import attend_tile, padded_dim

CHUNK = 512  # keys: partial results of 4 heads add about 2% to the bytes read
_ENOUGH_PROGRAMS = 2048  # a few for each place on a large GPU: more only have to be started
_MERGED_HEADS = 8  # per program: most sequences may have nothing to merge, and a program for each head costs then


@dataclass(frozen=True, slots=True)
class PartialResults:
    """Normalized attention over parts of the context [S, C, H, D] and base-2 log-sum-exp [S, C, H], float32.

    A sequence's parts, in order: the chunks of its shared prefix, the last of which may be cut short, then the chunks
    behind it, the first of which may begin late (under a sliding window too). A sequence with one part has none here.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(cls, q_SHD: torch.Tensor, num_parts: int) -> PartialResults:
        """Room, uninitialized."""
        num_seqs, num_heads, head_dim = q_SHD.shape
        shape = (num_seqs, num_parts, num_heads)
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

    prefix_lens_S: int32; the parts of a sequence's shared prefix are in `partial` already.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    num_parts = partial.out.shape[1]
    group, dim = num_heads // num_kv_heads, padded_dim(head_dim)
    window = sliding_window or 0
    workers = programs_per_sequence(num_parts, meta.num_decode_seqs * num_kv_heads)
    _decode_kernel[(meta.num_decode_seqs, num_kv_heads, workers)](
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
        num_parts,
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
        num_warps=4,
        num_stages=5,  # half of them for the block ids, which keys wait for: keys and values are two tiles deep
    )
    if num_parts > 1:
        _merge_kernel[(meta.num_decode_seqs, triton.cdiv(num_heads, _MERGED_HEADS))](
            partial.out,
            partial.lse,
            meta.context_lens_S,
            prefix_lens_S,
            out_THD,
            num_parts,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=dim,
            CHUNK=CHUNK,
            SLIDING_WINDOW=window,
            HAS_PREFIX=prefix_lens_S is not None,
            HEADS=_MERGED_HEADS,
            num_warps=4,
        )


def programs_per_sequence(num_parts: int, num_rows: int) -> int:
    """Among how many programs the parts of a sequence (or group) are dealt out, `num_rows` of such being there.

    At least two, so that one long context among short ones is not alone at the end.
    """
    return min(num_parts, max(2, triton.next_power_of_2(triton.cdiv(_ENOUGH_PROGRAMS, num_rows))))


@triton.jit(do_not_specialize=["table_stride", "num_parts"])
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
    num_parts,
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
):
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    context_len = tl.load(context_lens_ptr + seq)
    first_key, num_shared, num_own = _parts(context_len, prefix_lens_ptr, seq, CHUNK, SLIDING_WINDOW, HAS_PREFIX)
    if tl.program_id(2) >= tl.maximum(num_own, 1):  # the first one writes the zeros of sequences without context
        return

    head_M = tl.arange(0, PADDED_GROUP)
    dim_D = tl.arange(0, PADDED_DIM)
    is_real_MD = (head_M < GROUP)[:, None] & (dim_D < HEAD_DIM)[None, :]
    offset_MD = (kv_head * GROUP + head_M)[:, None] * HEAD_DIM + dim_D[None, :]
    q_MD = tl.load(q_ptr + seq * q_stride + offset_MD, mask=is_real_MD, other=0.0)
    position_M = tl.zeros([PADDED_GROUP], tl.int32) + (context_len - 1)
    for index in range(tl.program_id(2), tl.maximum(num_own, 1), tl.num_programs(2)):
        chunk = first_key // CHUNK + index
        begin = tl.maximum(chunk * CHUNK, first_key)
        end = tl.minimum(chunk * CHUNK + CHUNK, context_len)
        acc_MD = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
        max_M = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        sum_M = tl.zeros([PADDED_GROUP], tl.float32)
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
        if (num_shared == 0) & (num_own <= 1):
            tl.store(out_ptr + seq * NUM_HEADS * HEAD_DIM + offset_MD, out_MD, mask=is_real_MD)
        else:
            row = seq * num_parts + num_shared + index
            tl.store(partial_ptr + row * NUM_HEADS * HEAD_DIM + offset_MD, out_MD, mask=is_real_MD)
            lse_M = max_M + tl.log2(sum_M)
            tl.store(lse_ptr + row * NUM_HEADS + kv_head * GROUP + head_M, lse_M, mask=head_M < GROUP)


@triton.jit(do_not_specialize=["num_parts"])
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    prefix_lens_ptr,
    out_ptr,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HEADS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    _, num_shared, num_own = _parts(context_len, prefix_lens_ptr, seq, CHUNK, SLIDING_WINDOW, HAS_PREFIX)
    if (num_shared == 0) & (num_own <= 1):
        return
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim_D = tl.arange(0, PADDED_DIM)
    is_real_ND = (head_N < NUM_HEADS)[:, None] & (dim_D < HEAD_DIM)[None, :]
    acc_ND = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    highest_N = tl.full([HEADS], float("-inf"), tl.float32)
    total_N = tl.zeros([HEADS], tl.float32)
    for index in range(0, num_shared + num_own):
        row_N = (seq * num_parts + index) * NUM_HEADS + head_N
        lse_N = tl.load(lse_ptr + row_N, mask=head_N < NUM_HEADS, other=0.0)
        part_ND = tl.load(partial_ptr + row_N[:, None] * HEAD_DIM + dim_D[None, :], mask=is_real_ND, other=0.0)
        new_highest_N = tl.maximum(highest_N, lse_N)
        decay_N = tl.exp2(highest_N - new_highest_N)
        weight_N = tl.exp2(lse_N - new_highest_N)
        acc_ND = acc_ND * decay_N[:, None] + part_ND * weight_N[:, None]
        total_N = total_N * decay_N + weight_N
        highest_N = new_highest_N
    out_ND = acc_ND / tl.where(total_N == 0.0, 1.0, total_N)[:, None]
    out_row_N = (seq * NUM_HEADS + head_N) * HEAD_DIM
    tl.store(out_ptr + out_row_N[:, None] + dim_D[None, :], out_ND, mask=is_real_ND)


@triton.jit
def _parts(
    context_len, prefix_lens_ptr, seq, CHUNK: tl.constexpr, SLIDING_WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr
):
    """The first key that the last position sees and nobody else reads for it; parts before that key, and from it on.

    A context that is nothing but a shared prefix has one part of its own, without a key, or none.
    """
    first_key = context_len * 0
    num_shared = context_len * 0
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(context_len - SLIDING_WINDOW, 0)
    if HAS_PREFIX:
        first_key = tl.load(prefix_lens_ptr + seq)
        num_shared = tl.cdiv(first_key, CHUNK)
    return first_key, num_shared, tl.cdiv(context_len, CHUNK) - first_key // CHUNK

"""Attention of prompt chunks over a paged cache: large tiles of (query tokens x query heads of one key head).

Large enough for the wide matrix instructions of current GPUs, which take 64 rows. Tiles of keys lie at multiples of
their size and a tile that a row does not see leaves it exactly as it is, so how a prompt is cut into chunks does not
change a row's sums; that tiles without a mask are compiled apart may still round them otherwise. Knows no decode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.triton.attention_tile import (
    add_sink,
    attend_tile,
    dims_of_tile,
    find_owner,
    first_seen,
    heads_of_program,
    load_rest,
    num_stages,
    num_tiles,
    num_warps,
    packed_rows,
    paged_tile_shape,
)
from bulkrun.windows import Window, kernel_window


def prefill_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out_THV: torch.Tensor,
    *,
    scale: float,
    sliding_window: Window | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None = None,
    is_invariant: bool = False,
) -> None:
    """Write the rows of the step's prompt chunks, which come after its decode sequences, into `out_THV`.

    is_invariant: with a mask on every tile and in tiles that are small enough for decoding too, so that no bit of a row
    depends on its chunk.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    value_dim = v_cache.shape[3]
    group = num_heads // num_kv_heads
    rows, keys = paged_tile_shape(head_dim, value_dim, q_THD)
    rows = min(rows, 64) if is_invariant else rows
    heads = heads_of_program(group, value_dim, q_THD)
    block_m, block_q = packed_rows(rows, heads)
    num_seqs = meta.context_lens_S.numel() - meta.num_decode_seqs
    tiles = num_tiles(num_tokens, num_seqs, block_q)  # a padded step has fewer decode tokens than decode sequences
    _prefill_kernel[(tiles, num_heads // heads)](
        q_THD,
        k_cache,
        v_cache,
        meta.block_tables_SM,
        meta.context_lens_S,
        meta.cu_seqlens_q,
        sinks_H,
        out_THV,
        scale,
        q_THD.stride(0),
        meta.block_tables_SM.stride(0),
        meta.num_decode_seqs,
        num_seqs,
        NUM_HEADS=num_heads,
        GROUP=heads,
        HEAD_BLOCKS=group // heads,
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        **dims_of_tile(head_dim, value_dim),
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=keys,
        SLIDING_WINDOW=kernel_window(sliding_window),
        SOFT_CAP=soft_cap or 0.0,
        MASK_ALL=is_invariant,
        HAS_SINKS=sinks_H is not None,
        num_warps=num_warps(block_m, value_dim),
        num_stages=num_stages(value_dim, q_THD),
    )


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    context_lens_ptr,
    cu_seqlens_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    q_stride,
    table_stride,
    first_seq,
    num_seqs,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a program
    HEAD_BLOCKS: tl.constexpr,  # programs that share a key head's query heads
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASK_ALL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    REST: tl.constexpr = HEAD_DIM - VALUE_DIM
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tiles see the most keys: they start first
    first_head = tl.program_id(1) * GROUP
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    index, first_tile = find_owner(tile, cu_seqlens_ptr + first_seq, num_seqs, BLOCK_Q)
    seq = (first_seq + index).to(tl.int64)
    first_token = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - first_token
    first_query = (tile - first_tile) * BLOCK_Q
    if first_query >= query_len:
        return

    row_M = tl.arange(0, BLOCK_M)
    query_M = first_query + row_M // GROUP
    query_end = query_len
    if BLOCK_M % GROUP:  # the rows left over would be the next tile's
        query_end = tl.minimum(first_query + BLOCK_Q, query_len)
    dim_D = tl.arange(0, PADDED_DIM)
    is_real_MD = (query_M < query_end)[:, None] & (dim_D < VALUE_DIM)[None, :]
    token_M = (first_token + query_M).to(tl.int64)
    head_M = first_head + row_M % GROUP
    q_offset_MD = head_M[:, None] * HEAD_DIM + dim_D[None, :]
    q_MD = tl.load(q_ptr + REST + token_M[:, None] * q_stride + q_offset_MD, mask=is_real_MD, other=0.0)
    q_rest_MR = load_rest(q_ptr, token_M * q_stride + head_M * HEAD_DIM, q_MD, query_M < query_end, REST, PADDED_REST)
    offset_MD = head_M[:, None] * VALUE_DIM + dim_D[None, :]
    acc_MD = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)

    context_len = tl.load(context_lens_ptr + seq)
    first_position = context_len - query_len + first_query
    position_M = context_len - query_len + query_M
    end = tl.minimum(first_position + BLOCK_Q, context_len)
    first_key = 0
    masked_start = (first_position + 1) // BLOCK_N * BLOCK_N  # every row sees every key before
    if SLIDING_WINDOW != 0:
        first_key = tl.maximum(first_seen(first_position, SLIDING_WINDOW), 0)
        masked_start = first_key // BLOCK_N * BLOCK_N
    elif MASK_ALL:
        masked_start = 0
    else:
        for tile_start in range(0, masked_start, BLOCK_N):
            acc_MD, max_M, sum_M = attend_tile(
                q_MD,
                q_rest_MR,
                acc_MD,
                max_M,
                sum_M,
                k_ptr + kv_head * HEAD_DIM,
                v_ptr + kv_head * HEAD_DIM,
                block_tables_ptr + seq * table_stride,
                tile_start,
                first_key,
                end,
                position_M,
                scale,
                SLOT_STRIDE,
                BLOCK_SIZE,
                VALUE_DIM,
                PADDED_DIM,
                REST,
                PADDED_REST,
                BLOCK_N,
                SLIDING_WINDOW,
                SOFT_CAP,
                False,
            )
    for tile_start in range(masked_start, end, BLOCK_N):
        acc_MD, max_M, sum_M = attend_tile(
            q_MD,
            q_rest_MR,
            acc_MD,
            max_M,
            sum_M,
            k_ptr + kv_head * HEAD_DIM,
            v_ptr + kv_head * HEAD_DIM,
            block_tables_ptr + seq * table_stride,
            tile_start,
            first_key,
            end,
            position_M,
            scale,
            SLOT_STRIDE,
            BLOCK_SIZE,
            VALUE_DIM,
            PADDED_DIM,
            REST,
            PADDED_REST,
            BLOCK_N,
            SLIDING_WINDOW,
            SOFT_CAP,
            True,
        )
    if HAS_SINKS:
        sum_M = add_sink(sum_M, max_M, sinks_ptr, head_M, NUM_HEADS)
    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    if BLOCK_M % GROUP:  # divide again, as registers are scarce before: the compiler does not know that this is 0
        row_M += tl.load(cu_seqlens_ptr)
        query_M = first_query + row_M // GROUP
        is_real_MD = (query_M < query_end)[:, None] & (dim_D < VALUE_DIM)[None, :]
        token_M = (first_token + query_M).to(tl.int64)
        offset_MD = (first_head + row_M % GROUP)[:, None] * VALUE_DIM + dim_D[None, :]
    tl.store(out_ptr + token_M[:, None] * (NUM_HEADS * VALUE_DIM) + offset_MD, out_MD, mask=is_real_MD)

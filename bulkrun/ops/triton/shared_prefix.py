"""Attention of many decode sequences over the blocks they share: read once for a tile of sequences, not once for each.

The shared prefix is cut into the chunks of `partial_results`, the last of which may end early; this fills in their
partial results, and the merge by log-sum-exp there cannot tell who wrote them. A CUDA graph is captured for as many
groups and as long prefixes as there may ever be, and most steps have few or none. So there are as many programs as a
GPU has places, and how much work they deal out among themselves is read by the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import SharedPrefixes
from bulkrun.ops.triton import partial_results
from bulkrun.ops.triton.attention_tile import (
    attend_tile,
    dims_of_tile,
    find_owner,
    heads_of_program,
    load_rest,
    num_stages,
    num_warps,
    packed_rows,
    paged_tile_shape,
)
from bulkrun.ops.triton.partial_results import PartialResults

_PLACES = 132  # programs of eight warps that an H100 or H200 runs at a time; more only have to be started


def shared_prefix_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    shared: SharedPrefixes,
    partial: PartialResults,
    *,
    first_seq: int,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Write `partial` of every chunk of a shared prefix, for the sequences of its group.

    partial: of the sequences from `first_seq` on, as many as it has starts; the others are passed over.
    """
    chunk = partial_results.CHUNK
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    value_dim = v_cache.shape[3]
    group = num_heads // num_kv_heads
    rows, keys = paged_tile_shape(head_dim, value_dim, q_THD)
    heads = heads_of_program(group, value_dim, q_THD)
    block_m, block_s = packed_rows(rows, heads)
    warps = num_warps(block_m, value_dim)
    _shared_prefix_kernel[(_PLACES * 8 // warps,)](
        q_THD,
        k_cache,
        v_cache,
        block_tables_SM,
        shared.seq_index,
        shared.cu_groups,
        shared.prefix_lens_G,
        shared.counts,
        partial.out,
        partial.lse,
        partial.starts_S,
        first_seq,
        partial.starts_S.numel(),
        scale,
        q_THD.stride(0),
        block_tables_SM.stride(0),
        NUM_HEADS=num_heads,
        GROUP=heads,
        HEAD_BLOCKS=group // heads,
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        **dims_of_tile(head_dim, value_dim),
        BLOCK_M=block_m,
        BLOCK_S=block_s,
        BLOCK_N=keys,
        CHUNK=chunk,
        SOFT_CAP=soft_cap or 0.0,
        num_warps=warps,
        num_stages=num_stages(value_dim, q_THD),
    )


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride"])
def _shared_prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    seq_index_ptr,
    cu_groups_ptr,
    prefix_lens_ptr,
    counts_ptr,
    partial_ptr,
    lse_ptr,
    starts_ptr,
    first_seq,
    num_seqs,
    scale,
    q_stride,
    table_stride,
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
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    num_groups = tl.load(counts_ptr)
    if num_groups == 0:
        return
    REST: tl.constexpr = HEAD_DIM - VALUE_DIM
    NUM_BLOCKS: tl.constexpr = NUM_HEADS // GROUP  # of heads
    num_chunks = tl.cdiv(tl.load(counts_ptr + 1), CHUNK)  # of the longest prefix
    num_tiles = tl.load(cu_groups_ptr + num_groups) // BLOCK_S + num_groups
    dim_D = tl.arange(0, PADDED_DIM)
    # tiles that read the same keys come one after the other: some find them in the cache of the GPU
    for item in range(tl.program_id(0), num_tiles * NUM_BLOCKS * num_chunks, tl.num_programs(0)):
        tile, block, chunk = item % num_tiles, item // num_tiles % NUM_BLOCKS, item // num_tiles // NUM_BLOCKS
        first_head, kv_head = block * GROUP, block // HEAD_BLOCKS
        group, first_tile = find_owner(tile, cu_groups_ptr, num_groups, BLOCK_S)
        group_start = tl.load(cu_groups_ptr + group)
        member_end = tl.load(cu_groups_ptr + group + 1)
        prefix_len = tl.load(prefix_lens_ptr + group)
        first_member = group_start + (tile - first_tile) * BLOCK_S
        row_M = tl.arange(0, BLOCK_M)
        if BLOCK_M % GROUP:
            member_end = tl.minimum(first_member + BLOCK_S, member_end)  # the rows left over would be the next tile's
            row_M += tl.load(cu_groups_ptr)  # 0, but the compiler does not know: no quotients kept for all items
        head_M = row_M % GROUP
        member_M = first_member + row_M // GROUP
        seq_M = tl.load(seq_index_ptr + member_M, mask=member_M < member_end, other=-1)
        is_real_M = (seq_M >= first_seq) & (seq_M < first_seq + num_seqs)
        if (tl.max(is_real_M.to(tl.int32), 0) > 0) & (chunk * CHUNK < prefix_len):
            is_real_MD = is_real_M[:, None] & (dim_D < VALUE_DIM)[None, :]
            q_offset_MD = (first_head + head_M)[:, None] * HEAD_DIM + dim_D[None, :]
            q_row_M = seq_M.to(tl.int64) * q_stride
            q_MD = tl.load(q_ptr + REST + q_row_M[:, None] + q_offset_MD, mask=is_real_MD, other=0.0)
            q_row_M += (first_head + head_M) * HEAD_DIM
            q_rest_MR = load_rest(q_ptr, q_row_M, q_MD, is_real_M, REST, PADDED_REST)
            offset_MD = (first_head + head_M)[:, None] * VALUE_DIM + dim_D[None, :]
            owner = tl.load(seq_index_ptr + group_start).to(tl.int64)  # its table is as good as any of the group
            acc_MD = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
            max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
            sum_M = tl.zeros([BLOCK_M], tl.float32)
            for tile_start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, prefix_len), BLOCK_N):
                acc_MD, max_M, sum_M = attend_tile(
                    q_MD,
                    q_rest_MR,
                    acc_MD,
                    max_M,
                    sum_M,
                    k_ptr + kv_head * HEAD_DIM,
                    v_ptr + kv_head * HEAD_DIM,
                    block_tables_ptr + owner * table_stride,
                    tile_start,
                    0,
                    0,
                    max_M,  # positions: every key lies before every query
                    scale,
                    SLOT_STRIDE,
                    BLOCK_SIZE,
                    VALUE_DIM,
                    PADDED_DIM,
                    REST,
                    PADDED_REST,
                    BLOCK_N,
                    0,
                    SOFT_CAP,
                    False,
                )
            if BLOCK_M % GROUP:  # divided and read again, as registers are scarce before
                row_M = tl.arange(0, BLOCK_M) + tl.load(cu_groups_ptr)
                head_M = row_M % GROUP
                member_M = first_member + row_M // GROUP
                seq_M = tl.load(seq_index_ptr + member_M, mask=member_M < member_end, other=-1)
                is_real_M = (seq_M >= first_seq) & (seq_M < first_seq + num_seqs)
                is_real_MD = is_real_M[:, None] & (dim_D < VALUE_DIM)[None, :]
                offset_MD = (first_head + head_M)[:, None] * VALUE_DIM + dim_D[None, :]
            else:
                seq_M = tl.load(seq_index_ptr + member_M, mask=is_real_M, other=0)
            part_M = tl.load(starts_ptr + seq_M - first_seq, mask=is_real_M, other=0).to(tl.int64) + chunk
            partial_MD = part_M[:, None] * (NUM_HEADS * VALUE_DIM) + offset_MD
            tl.store(partial_ptr + partial_MD, acc_MD / sum_M[:, None], mask=is_real_MD)
            lse_offset_M = part_M * NUM_HEADS + first_head + head_M
            tl.store(lse_ptr + lse_offset_M, max_M + tl.log2(sum_M), mask=is_real_M)

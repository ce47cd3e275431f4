"""Attention of many decode sequences over the blocks they share: read once for a tile of sequences, not once for each.

The shared prefix is cut into the chunks of `partial_results`, the last of which may end early; this fills in their
partial results, and the merge by log-sum-exp there cannot tell who wrote them. As there, lengths and group sizes are
read by the device: the host knows bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention_metadata import SharedPrefixes
from bulkrun.ops.triton import partial_results
from bulkrun.ops.triton.attention_tile import attend_tile, find_owner, num_stages, num_tiles, padded_dim, tile_shape
from bulkrun.ops.triton.decode_attention import programs_per_sequence
from bulkrun.ops.triton.partial_results import PartialResults


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
    padded_group = triton.next_power_of_2(num_heads // num_kv_heads)
    rows, keys = tile_shape(head_dim, q_THD.dtype)
    block_s = max(rows // padded_group, 1)
    num_groups = shared.prefix_lens_G.numel()
    tiles = num_tiles(shared.seq_index.numel(), num_groups, block_s)
    workers = programs_per_sequence(triton.cdiv(shared.max_prefix_len, chunk), tiles * num_kv_heads)
    _shared_prefix_kernel[(tiles, num_kv_heads, workers)](
        q_THD,
        k_cache,
        v_cache,
        block_tables_SM,
        shared.seq_index,
        shared.cu_groups,
        shared.prefix_lens_G,
        partial.out,
        partial.lse,
        partial.starts_S,
        first_seq,
        partial.starts_S.numel(),
        scale,
        q_THD.stride(0),
        block_tables_SM.stride(0),
        num_groups,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        PADDED_GROUP=padded_group,
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        BLOCK_S=block_s,
        BLOCK_N=keys,
        CHUNK=chunk,
        SOFT_CAP=soft_cap or 0.0,
        num_warps=8 if rows == 128 else 4,
        num_stages=num_stages(head_dim, q_THD.dtype),
    )


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride", "num_groups"])
def _shared_prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    seq_index_ptr,
    cu_groups_ptr,
    prefix_lens_ptr,
    partial_ptr,
    lse_ptr,
    starts_ptr,
    first_seq,
    num_seqs,
    scale,
    q_stride,
    table_stride,
    num_groups,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    group, first_tile = find_owner(tile, cu_groups_ptr, num_groups, BLOCK_S)
    group_start = tl.load(cu_groups_ptr + group)
    group_size = tl.load(cu_groups_ptr + group + 1) - group_start
    first_member = (tile - first_tile) * BLOCK_S
    if first_member >= group_size:
        return

    BLOCK_M: tl.constexpr = BLOCK_S * PADDED_GROUP
    row_M = tl.arange(0, BLOCK_M)
    member_M = first_member + row_M // PADDED_GROUP
    head_M = row_M % PADDED_GROUP
    dim_D = tl.arange(0, PADDED_DIM)
    seq_M = tl.load(seq_index_ptr + group_start + member_M, mask=member_M < group_size, other=-1)
    is_real_M = (seq_M >= first_seq) & (seq_M < first_seq + num_seqs) & (head_M < GROUP)
    if tl.max(is_real_M.to(tl.int32), 0) == 0:
        return
    is_real_MD = is_real_M[:, None] & (dim_D < HEAD_DIM)[None, :]
    offset_MD = (kv_head * GROUP + head_M)[:, None] * HEAD_DIM + dim_D[None, :]
    q_MD = tl.load(q_ptr + seq_M.to(tl.int64)[:, None] * q_stride + offset_MD, mask=is_real_MD, other=0.0)
    prefix_len = tl.load(prefix_lens_ptr + group)
    owner = tl.load(seq_index_ptr + group_start).to(tl.int64)  # its block table is as good as any of the group
    for chunk in range(tl.program_id(2), tl.cdiv(prefix_len, CHUNK), tl.num_programs(2)):
        acc_MD = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        for tile_start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, prefix_len), BLOCK_N):
            acc_MD, max_M, sum_M = attend_tile(
                q_MD,
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
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_N,
                0,
                SOFT_CAP,
                False,
            )
        seq_M = tl.load(seq_index_ptr + group_start + member_M, mask=is_real_M, other=0)  # again: registers are scarce
        part_M = tl.load(starts_ptr + seq_M - first_seq, mask=is_real_M, other=0).to(tl.int64) + chunk
        partial_MD = part_M[:, None] * (NUM_HEADS * HEAD_DIM) + offset_MD
        tl.store(partial_ptr + partial_MD, acc_MD / sum_M[:, None], mask=is_real_MD)
        lse_offset_M = part_M * NUM_HEADS + kv_head * GROUP + head_M
        tl.store(lse_ptr + lse_offset_M, max_M + tl.log2(sum_M), mask=is_real_M)

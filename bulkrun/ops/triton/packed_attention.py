"""Attention in both directions over packed texts in Triton: tiles of (tokens x query heads of one key head).

The tiles of `prefill_attention` without a cache: a text's keys lie behind one another, so their addresses wait for
nothing. One loop with a mask in it: with a second one for the last keys the assembler (ptxas 12.9, for Hopper) makes
each wide matrix instruction wait for the one before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import TILE_ROWS
from bulkrun.ops.attention.packed_attention import TextLens
from bulkrun.ops.triton.attention_tile import (
    LOG2_E,
    find_owner,
    fold,
    has_large_shared_memory,
    is_cramped,
    num_tiles,
    packed_rows,
    padded_dim,
    tile_shape,
)


def packed_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    texts: TextLens,
    *,
    scale: float,
    sliding_window: int | None = None,
    distance_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; what does not lie head by head is copied first."""
    q_THD, k_TKD, v_TKD = map(_by_head, (q_THD, k_TKD, v_TKD))
    assert distance_bias is None or distance_bias.is_contiguous()
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THD.shape, k_TKD.shape[1]
    group, num_texts = num_heads // num_kv_heads, len(texts.lens)
    rows, keys = tile_shape(head_dim, q_THD)
    if num_tokens * group <= 64 * num_texts or distance_bias is not None:
        rows = min(rows, 64)  # more would be nobody's in most tiles; biases of a tile are copied ahead as keys are
    block_m, block_q = packed_rows(rows, group)
    out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=q_THD.dtype, device=q_THD.device)
    _packed_kernel[(num_tiles(num_tokens, num_texts, block_q), num_kv_heads)](
        q_THD,
        k_TKD,
        v_TKD,
        texts.cu_seqlens,
        distance_bias,
        out_THD,
        scale,
        q_THD.stride(0),
        k_TKD.stride(0),
        v_TKD.stride(0),
        num_texts,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=keys,
        SLIDING_WINDOW=sliding_window or 0,
        FARTHEST=0 if distance_bias is None else distance_bias.shape[1] // 2,
        num_warps=8 if rows == TILE_ROWS else 4,
        num_stages=_num_stages(head_dim, q_THD, has_bias=distance_bias is not None),
    )
    return out_THD


def _num_stages(head_dim: int, q_THD: torch.Tensor, *, has_bias: bool) -> int:
    """Of the pipeline that loads keys and values, two of them under way, where shared memory has the room.

    Of biases a key has one for each of a tile's 64 rows, half as it were of its keys and half of its values.
    """
    row_bytes = padded_dim(head_dim) * q_THD.element_size() + has_bias * 128
    if row_bytes > 512 + 128 or is_cramped(q_THD):
        return 1
    return 3 if row_bytes <= 256 or (row_bytes <= 512 and has_large_shared_memory(q_THD.device)) else 2


def _by_head(x_TKD: torch.Tensor) -> torch.Tensor:
    return x_TKD if x_TKD.stride()[1:] == (x_TKD.shape[2], 1) else x_TKD.contiguous()


@triton.jit(do_not_specialize=["num_texts"])
def _packed_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_seqlens_ptr,
    bias_ptr,
    out_ptr,
    scale,
    q_stride,
    k_stride,
    v_stride,
    num_texts,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    FARTHEST: tl.constexpr,  # the largest distance that has a bias; 0: there are none
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    text, first_tile = find_owner(tile, cu_seqlens_ptr, num_texts, BLOCK_Q)
    first_token = tl.load(cu_seqlens_ptr + text).to(tl.int64)
    text_len = tl.load(cu_seqlens_ptr + text + 1) - first_token.to(tl.int32)
    first_query = (tile - first_tile) * BLOCK_Q
    if first_query >= text_len:
        return

    row_M = tl.arange(0, BLOCK_M)
    query_M = first_query + row_M // GROUP
    query_end = tl.minimum(first_query + BLOCK_Q, text_len)  # rows left over would be the next tile's
    head_M = kv_head * GROUP + row_M % GROUP
    dim_D = tl.arange(0, PADDED_DIM)
    is_real_MD = (query_M < query_end)[:, None] & (dim_D < HEAD_DIM)[None, :]
    token_M = first_token + query_M
    offset_MD = head_M[:, None] * HEAD_DIM + dim_D[None, :]
    q_MD = tl.load(q_ptr + token_M[:, None] * q_stride + offset_MD, mask=is_real_MD, other=0.0)
    acc_MD = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)

    k_ptr += first_token * k_stride + kv_head * HEAD_DIM
    v_ptr += first_token * v_stride + kv_head * HEAD_DIM
    first_key, end_key = 0, text_len
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(first_query - SLIDING_WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        end_key = tl.minimum(query_end + SLIDING_WINDOW - 1, text_len)
    for tile_start in range(first_key, end_key, BLOCK_N):
        key_N = tile_start + tl.arange(0, BLOCK_N)
        own_N = tl.minimum(key_N, text_len - 1).to(tl.int64)  # no mask for what is read: it takes registers
        k_ptr_ND, v_ptr_ND = (k_ptr + own_N * k_stride)[:, None] + dim_D, (v_ptr + own_N * v_stride)[:, None] + dim_D
        if HEAD_DIM == PADDED_DIM:
            k_ND, v_ND = tl.load(k_ptr_ND), tl.load(v_ptr_ND)
        else:
            is_real_D = (dim_D < HEAD_DIM)[None, :]
            k_ND, v_ND = tl.load(k_ptr_ND, mask=is_real_D, other=0.0), tl.load(v_ptr_ND, mask=is_real_D, other=0.0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="tf32x3") * (scale * LOG2_E)
        behind_MN = key_N[None, :] - query_M[:, None]
        sees_MN = (key_N < text_len)[None, :]
        if FARTHEST > 0:
            place_MN = head_M[:, None] * (2 * FARTHEST + 1) + FARTHEST + behind_MN
            score_MN += tl.load(bias_ptr + place_MN, mask=sees_MN & (query_M < query_end)[:, None], other=0.0) * LOG2_E
        if SLIDING_WINDOW > 0:
            sees_MN = sees_MN & (behind_MN < SLIDING_WINDOW) & (behind_MN > -SLIDING_WINDOW)
        score_MN = tl.where(sees_MN, score_MN, float("-inf"))
        acc_MD, max_M, sum_M = fold(score_MN, v_ND, acc_MD, max_M, sum_M)
    out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]  # rows of nobody may see no key within a window
    tl.store(out_ptr + token_M[:, None] * (NUM_HEADS * HEAD_DIM) + offset_MD, out_MD, mask=is_real_MD)

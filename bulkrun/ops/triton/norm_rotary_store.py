"""QK-norm, rotary embedding and KV write in one pass over the projection. Knows no attention.

Roundings are those of the reference's norm; the rotation is done in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 8  # per program: enough bytes in flight, and enough programs in a step of decoding


def norm_rotary_store(
    qkv_TND: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
) -> torch.Tensor:
    """As the reference; the queries are a new contiguous tensor."""
    num_tokens, num_heads, head_dim = qkv_TND.shape
    num_kv_heads = k_cache.shape[2]
    assert qkv_TND.stride(1) == head_dim and qkv_TND.stride(2) == 1
    assert all(x is None or x.is_contiguous() for x in (k_cache, v_cache, cos, sin, qk_norm_weight))
    q_THD = qkv_TND.new_empty(num_tokens, num_heads - 2 * num_kv_heads, head_dim)
    if num_tokens:
        _norm_rotary_store_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            qkv_TND,
            qk_norm_weight,
            cos,
            sin,
            q_THD,
            k_cache,
            v_cache,
            slot_mapping_T,
            eps,
            qkv_TND.stride(0),
            NUM_Q_HEADS=num_heads - 2 * num_kv_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            ROTARY_DIM=0 if cos is None else cos.shape[-1],
            HEADS=_HEADS,
            HAS_NORM=qk_norm_weight is not None,
            num_warps=4,
        )
    return q_THD


@triton.jit(do_not_specialize=["qkv_stride"])
def _norm_rotary_store_kernel(
    qkv_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    slot_mapping_ptr,
    eps,
    qkv_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    NUM_QK_HEADS: tl.constexpr = NUM_Q_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim_D = tl.arange(0, PADDED_DIM)
    in_head_D = dim_D < HEAD_DIM
    turns_D = dim_D < ROTARY_DIM
    partner_D = tl.where(dim_D < ROTARY_DIM // 2, dim_D + ROTARY_DIM // 2, dim_D - ROTARY_DIM // 2)
    is_real_ND = (head_N < NUM_QK_HEADS + NUM_KV_HEADS)[:, None] & in_head_D[None, :]
    is_turned_ND = (head_N < NUM_QK_HEADS)[:, None] & turns_D[None, :]

    row_ptr = qkv_ptr + token * qkv_stride + head_N[:, None] * HEAD_DIM
    raw_ND = tl.load(row_ptr + dim_D[None, :], mask=is_real_ND, other=0.0)
    x_ND = raw_ND.to(tl.float32)
    partner_ND = tl.load(row_ptr + partner_D[None, :], mask=is_turned_ND, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale_N = tl.rsqrt(tl.sum(x_ND * x_ND, 1) / HEAD_DIM + eps)
        weight_row_ptr = weight_ptr + head_N[:, None] * HEAD_DIM
        is_normed_ND = (head_N < NUM_QK_HEADS)[:, None] & in_head_D[None, :]
        weight_ND = tl.load(weight_row_ptr + dim_D[None, :], mask=is_normed_ND, other=0.0)
        partner_weight_ND = tl.load(weight_row_ptr + partner_D[None, :], mask=is_turned_ND, other=0.0)
        x_ND = _weighted(x_ND * scale_N[:, None], weight_ND, raw_ND.dtype)
        partner_ND = _weighted(partner_ND * scale_N[:, None], partner_weight_ND, raw_ND.dtype)
    if ROTARY_DIM > 0:
        cos_D = tl.load(cos_ptr + token * ROTARY_DIM + dim_D, mask=turns_D, other=1.0).to(tl.float32)
        sin_D = tl.load(sin_ptr + token * ROTARY_DIM + dim_D, mask=turns_D, other=0.0).to(tl.float32)
        x_ND = x_ND * cos_D[None, :] + partner_ND * sin_D[None, :]
    turned_ND = x_ND.to(raw_ND.dtype)

    is_q_N = head_N < NUM_Q_HEADS
    is_k_N = (head_N >= NUM_Q_HEADS) & (head_N < NUM_QK_HEADS)
    is_v_N = (head_N >= NUM_QK_HEADS) & (head_N < NUM_QK_HEADS + NUM_KV_HEADS)
    slot = tl.maximum(tl.load(slot_mapping_ptr + token), 0)  # padding goes to the null block
    q_offset_ND = (token * NUM_Q_HEADS + head_N)[:, None] * HEAD_DIM + dim_D[None, :]
    k_offset_ND = (slot * NUM_KV_HEADS + head_N - NUM_Q_HEADS)[:, None] * HEAD_DIM + dim_D[None, :]
    v_offset_ND = (slot * NUM_KV_HEADS + head_N - NUM_QK_HEADS)[:, None] * HEAD_DIM + dim_D[None, :]
    tl.store(q_ptr + q_offset_ND, turned_ND, mask=is_q_N[:, None] & in_head_D[None, :])
    tl.store(k_ptr + k_offset_ND, turned_ND, mask=is_k_N[:, None] & in_head_D[None, :])
    tl.store(v_ptr + v_offset_ND, raw_ND, mask=is_v_N[:, None] & in_head_D[None, :])


@triton.jit
def _weighted(normed, weight, dtype: tl.constexpr):
    """normed * weight, rounded to the weight's dtype before and to `dtype` after."""
    return (normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)

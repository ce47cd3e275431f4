"""QK-norm, rotary embedding and KV write in one pass over the projection. Knows no attention.

A head is taken in parts: the two halves that turn with each other, and the rest where only some dimensions turn, so
that every load and store is wide. Roundings are those of the reference's norm; rotation is in float32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.triton.fp8 import to_dtype

_HEADS = 8  # per program: enough bytes in flight, and enough programs in a step of decoding


def norm_rotary_store(
    qkv_TND: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping_T: torch.Tensor,
    *,
    keys_are_values: bool = False,
) -> torch.Tensor:
    """As the reference; the queries are a new contiguous tensor."""
    num_tokens, num_heads, head_dim = qkv_TND.shape
    num_kv_heads = 0 if k_cache is None else k_cache.shape[2]
    num_v_heads = 0 if v_cache is None else num_kv_heads
    num_heads += num_v_heads if keys_are_values else 0
    num_q_heads = num_heads - num_kv_heads - num_v_heads
    rotary_dim = 0 if cos is None else cos.shape[-1]
    assert qkv_TND.stride(1) == head_dim and qkv_TND.stride(2) == 1
    assert all(x is None or x.is_contiguous() for x in (k_cache, v_cache, cos, sin, qk_norm_weight))
    q_THD = qkv_TND.new_empty(num_tokens, num_q_heads, head_dim)
    unused = q_THD  # nothing is written to a cache that is not there
    if num_tokens:
        _norm_rotary_store_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            qkv_TND,
            qk_norm_weight,
            cos,
            sin,
            q_THD,
            unused if k_cache is None else k_cache,
            unused if v_cache is None else v_cache,
            slot_mapping_T,
            eps,
            qkv_TND.stride(0),
            NUM_Q_HEADS=num_q_heads,
            NUM_KV_HEADS=num_kv_heads,
            NUM_V_HEADS=num_v_heads,
            HEAD_DIM=head_dim,
            HALF=rotary_dim // 2,
            REST=head_dim - rotary_dim,
            PADDED_HALF=triton.next_power_of_2(max(rotary_dim // 2, 1)),
            PADDED_REST=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
            HEADS=_HEADS,
            HAS_NORM=qk_norm_weight is not None,
            NORMS_VALUES=qk_norm_weight is not None and len(qk_norm_weight) == num_heads,
            KEYS_ARE_VALUES=keys_are_values,
            num_warps=4,
        )
    return q_THD


@triton.jit
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
    NUM_V_HEADS: tl.constexpr,  # as many, or none
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # dimensions of each half that turns; 0: none turns
    REST: tl.constexpr,  # dimensions after them
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half_H = tl.arange(0, PADDED_HALF)
    rest_R = 2 * HALF + tl.arange(0, PADDED_REST)
    is_real_N = head_N < NUM_Q_HEADS + NUM_KV_HEADS + NUM_V_HEADS
    is_value_N = head_N >= NUM_Q_HEADS + NUM_KV_HEADS
    is_plain_N = is_value_N & (not NORMS_VALUES)
    source_N = head_N
    if KEYS_ARE_VALUES:
        source_N = tl.where(is_value_N, head_N - NUM_KV_HEADS, head_N)
    is_half_NH = is_real_N[:, None] & (half_H < HALF)[None, :]
    is_rest_NR = is_real_N[:, None] & (rest_R < HEAD_DIM)[None, :]
    row_ptr = qkv_ptr + token * qkv_stride + source_N[:, None] * HEAD_DIM
    sum_N = tl.zeros([HEADS], tl.float32)
    if HALF > 0:
        first_NH = tl.load(row_ptr + half_H[None, :], mask=is_half_NH, other=0.0)
        second_NH = tl.load(row_ptr + HALF + half_H[None, :], mask=is_half_NH, other=0.0)
        sum_N += _sum_of_squares(first_NH) + _sum_of_squares(second_NH)
    if REST > 0:
        rest_NR = tl.load(row_ptr + rest_R[None, :], mask=is_rest_NR, other=0.0)
        sum_N += _sum_of_squares(rest_NR)
    scale_N = tl.rsqrt(sum_N / HEAD_DIM + eps)

    # where each head goes: to the queries, or to the token's slot in one of the caches; padding to the null block
    slot = tl.maximum(tl.load(slot_mapping_ptr + token), 0)
    q_row_N = (token * NUM_Q_HEADS + head_N) * HEAD_DIM
    k_row_N = (slot * NUM_KV_HEADS + head_N - NUM_Q_HEADS) * HEAD_DIM
    v_row_N = k_row_N - NUM_KV_HEADS * HEAD_DIM
    weight_N = head_N * HEAD_DIM
    if HALF > 0:
        normed_first_NH = _normed(first_NH, scale_N, weight_ptr, weight_N, half_H, is_plain_N, is_half_NH, HAS_NORM)
        normed_second_NH = _normed(
            second_NH, scale_N, weight_ptr, weight_N, HALF + half_H, is_plain_N, is_half_NH, HAS_NORM
        )
        angle_H = token * (2 * HALF) + HALF + half_H  # the second half, in which sines have their own sign
        cos_H = tl.load(cos_ptr + angle_H, mask=half_H < HALF, other=0.0).to(tl.float32)
        sin_H = tl.load(sin_ptr + angle_H, mask=half_H < HALF, other=0.0).to(tl.float32)
        turned_first_NH = normed_first_NH * cos_H[None, :] - normed_second_NH * sin_H[None, :]
        turned_second_NH = normed_second_NH * cos_H[None, :] + normed_first_NH * sin_H[None, :]
        if NORMS_VALUES:
            first_NH, second_NH = normed_first_NH.to(first_NH.dtype), normed_second_NH.to(second_NH.dtype)
        _store(
            turned_first_NH, first_NH, q_ptr, k_ptr, v_ptr, q_row_N, k_row_N, v_row_N, half_H, head_N, is_half_NH,
            NUM_Q_HEADS, NUM_KV_HEADS,
        )  # fmt: skip
        _store(
            turned_second_NH, second_NH, q_ptr, k_ptr, v_ptr, q_row_N, k_row_N, v_row_N, HALF + half_H, head_N,
            is_half_NH, NUM_Q_HEADS, NUM_KV_HEADS,
        )  # fmt: skip
    if REST > 0:
        normed_rest_NR = _normed(rest_NR, scale_N, weight_ptr, weight_N, rest_R, is_plain_N, is_rest_NR, HAS_NORM)
        if NORMS_VALUES:
            rest_NR = normed_rest_NR.to(rest_NR.dtype)
        _store(
            normed_rest_NR, rest_NR, q_ptr, k_ptr, v_ptr, q_row_N, k_row_N, v_row_N, rest_R, head_N, is_rest_NR,
            NUM_Q_HEADS, NUM_KV_HEADS,
        )  # fmt: skip


@triton.jit
def _sum_of_squares(x_ND):
    x_ND = x_ND.to(tl.float32)
    return tl.sum(x_ND * x_ND, 1)


@triton.jit
def _normed(x_ND, scale_N, weight_ptr, weight_N, dim_D, is_plain_N, is_real_ND, HAS_NORM: tl.constexpr):
    """Part of the heads in float32, normalized: rounded to the weight's dtype before and to x's after, as ever."""
    float_ND = x_ND.to(tl.float32)
    if HAS_NORM:
        mask_ND = is_real_ND & ~is_plain_N[:, None]
        weight_ND = tl.load(weight_ptr + weight_N[:, None] + dim_D[None, :], mask=mask_ND, other=0.0)
        rounded_ND = (float_ND * scale_N[:, None]).to(weight_ND.dtype).to(tl.float32)
        float_ND = (rounded_ND * weight_ND.to(tl.float32)).to(x_ND.dtype).to(tl.float32)
    return float_ND


@triton.jit
def _store(
    x_ND,
    value_ND,
    q_ptr,
    k_ptr,
    v_ptr,
    q_row_N,
    k_row_N,
    v_row_N,
    dim_D,
    head_N,
    is_real_ND,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """Part of the heads to where they belong; `value_ND`: what of values is kept."""
    x_ND = x_ND.to(value_ND.dtype)
    is_q_N = head_N < NUM_Q_HEADS
    is_v_N = head_N >= NUM_Q_HEADS + NUM_KV_HEADS
    tl.store(q_ptr + q_row_N[:, None] + dim_D[None, :], x_ND, mask=is_real_ND & is_q_N[:, None])
    k_ND, v_ND = to_dtype(x_ND, k_ptr.dtype.element_ty), to_dtype(value_ND, v_ptr.dtype.element_ty)
    tl.store(k_ptr + k_row_N[:, None] + dim_D[None, :], k_ND, mask=is_real_ND & ~(is_q_N | is_v_N)[:, None])
    tl.store(v_ptr + v_row_N[:, None] + dim_D[None, :], v_ND, mask=is_real_ND & is_v_N[:, None])

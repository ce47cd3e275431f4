"""The gated delta rule in Triton, token by token: a program has some columns of a head's state in its registers.

A warp each, so that sums over a key's dimensions need no shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.linear_attention.gated_delta_rule import NORM_EPS
from bulkrun.ops.triton.softplus import softplus

_COLUMNS = 16


def gated_delta_rule(
    qkv_TC: torch.Tensor,
    ba_TG: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias: torch.Tensor,
    state_RHDV: torch.Tensor,
    meta: AttentionMetadata,
    *,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """As the reference."""
    assert meta.rows_S is not None, "layers with a state are given where it is"
    assert qkv_TC.stride(1) == ba_TG.stride(1) == 1 and state_RHDV.is_contiguous()
    num_heads, size, value_size = state_RHDV.shape[1:]
    make = torch.zeros if meta.is_padded else torch.empty
    out_THV = make(len(qkv_TC), num_heads, value_size, dtype=qkv_TC.dtype, device=qkv_TC.device)
    _gated_delta_rule_kernel[(triton.cdiv(value_size, _COLUMNS), num_heads, meta.rows_S.numel())](
        qkv_TC,
        ba_TG,
        a_log_H,
        dt_bias,
        state_RHDV,
        out_THV,
        meta.rows_S,
        meta.cu_seqlens_q,
        meta.context_lens_S,
        qkv_TC.stride(0),
        ba_TG.stride(0),
        NUM_HEADS=num_heads,
        KEY_DIM=(qkv_TC.shape[1] - num_heads * value_size) // 2,
        SIZE=size,
        VALUE_SIZE=value_size,
        EPS=NORM_EPS,
        BETA_SCALE=beta_scale,
        HAS_CHANNELS=dt_bias.numel() > num_heads,
        ROWS=triton.next_power_of_2(size),
        COLUMNS=_COLUMNS,
        num_warps=1,
    )
    return out_THV


@triton.jit
def _gated_delta_rule_kernel(
    qkv_ptr,
    ba_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    out_ptr,
    rows_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    qkv_stride,
    ba_stride,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    HAS_CHANNELS: tl.constexpr,  # each channel of keys has a decay of its own
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, seq = tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    if first == end:  # it pads the step
        return
    index_D = tl.arange(0, ROWS)
    index_V = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_real_D, is_real_V = index_D < SIZE, index_V < VALUE_SIZE
    is_real_DV = is_real_D[:, None] & is_real_V[None, :]
    state_ptr += (tl.load(rows_ptr + seq) * NUM_HEADS + head) * (SIZE * VALUE_SIZE)
    place_DV = index_D[:, None] * VALUE_SIZE + index_V[None, :]
    before = tl.load(context_lens_ptr + seq) - (end - first)
    is_known_D = index_D < tl.minimum(before, 1) * SIZE  # of a sequence that begins nothing is
    state_DV = tl.load(state_ptr + place_DV, mask=is_known_D[:, None] & is_real_V[None, :], other=0.0)
    forgetting = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if HAS_CHANNELS:
        own = head * SIZE + index_D
        dt_bias = tl.load(dt_bias_ptr + own, mask=is_real_D, other=0.0).to(tl.float32)
    else:
        own = head
        dt_bias = tl.load(dt_bias_ptr + own).to(tl.float32)
    query_ptr = qkv_ptr + head // (NUM_HEADS // (KEY_DIM // SIZE)) * SIZE + index_D
    value_ptr = qkv_ptr + 2 * KEY_DIM + head * VALUE_SIZE + index_V
    out_ptr += head * VALUE_SIZE + index_V
    for token in range(first.to(tl.int64), end.to(tl.int64)):
        query_D = _unit(tl.load(query_ptr + token * qkv_stride, mask=is_real_D, other=0.0), EPS)
        key_D = _unit(tl.load(query_ptr + KEY_DIM + token * qkv_stride, mask=is_real_D, other=0.0), EPS)
        value_V = tl.load(value_ptr + token * qkv_stride, mask=is_real_V, other=0.0).to(tl.float32)
        beta = BETA_SCALE * tl.sigmoid(tl.load(ba_ptr + token * ba_stride + head).to(tl.float32))
        a_ptr = ba_ptr + token * ba_stride + NUM_HEADS + own
        if HAS_CHANNELS:
            a_D = tl.load(a_ptr, mask=is_real_D, other=0.0).to(tl.float32) + dt_bias
            state_DV *= tl.exp(-forgetting * softplus(a_D))[:, None]
        else:
            state_DV *= tl.exp(-forgetting * softplus(tl.load(a_ptr).to(tl.float32) + dt_bias))
        error_V = (value_V - tl.sum(state_DV * key_D[:, None], 0)) * beta
        state_DV += key_D[:, None] * error_V[None, :]
        out_V = tl.sum(state_DV * query_D[:, None], 0) / tl.sqrt(SIZE * 1.0)
        tl.store(out_ptr + token * (NUM_HEADS * VALUE_SIZE), out_V, mask=is_real_V)
    tl.store(state_ptr + place_DV, state_DV, mask=is_real_DV)


@triton.jit
def _unit(head_D, EPS: tl.constexpr):
    """A head of length 1."""
    x_D = head_D.to(tl.float32)
    return x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) + EPS)

"""Mamba's selective state space in Triton, token by token: a program has some channels' states in its registers.

A warp each, so that sums over a channel's numbers need no shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.triton.softplus import softplus

_NUMBERS = 1024  # of a program's states, and as many rates: half of the registers
_CHANNELS = 32  # at most: a warp's


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    gate_TC: torch.Tensor,
    rate_NC: torch.Tensor,
    dt_bias_C: torch.Tensor,
    d_C: torch.Tensor,
    state_RHNP: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """As the reference."""
    assert meta.rows_S is not None, "layers with a state are given where it is"
    of_tokens = (x_TC, dt_TC, b_TN, c_TN, gate_TC)
    assert all(x.stride(1) == 1 for x in of_tokens) and state_RHNP.is_contiguous() and rate_NC.is_contiguous()
    num_heads, size, head_dim = state_RHNP.shape[1:]
    rows = triton.next_power_of_2(size)
    channels = max(min(_NUMBERS // rows, _CHANNELS, triton.next_power_of_2(head_dim)), 1)
    make = torch.zeros if meta.is_padded else torch.empty
    out_TC = make(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    _selective_scan_kernel[(triton.cdiv(head_dim, channels), num_heads, meta.rows_S.numel())](
        *of_tokens,
        rate_NC,
        dt_bias_C,
        d_C,
        state_RHNP,
        out_TC,
        meta.rows_S,
        meta.cu_seqlens_q,
        meta.context_lens_S,
        *(x.stride(0) for x in of_tokens),
        NUM_HEADS=num_heads,
        SIZE=size,
        HEAD_DIM=head_dim,
        ROWS=rows,
        CHANNELS=channels,
        num_warps=1,
    )
    return out_TC


@triton.jit
def _selective_scan_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    gate_ptr,
    rate_ptr,
    dt_bias_ptr,
    d_ptr,
    state_ptr,
    out_ptr,
    rows_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    head, seq = tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    if first == end:  # it pads the step
        return
    index_N = tl.arange(0, ROWS)
    index_P = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_real_N, is_real_P = index_N < SIZE, index_P < HEAD_DIM
    is_real_NP = is_real_N[:, None] & is_real_P[None, :]
    state_ptr += (tl.load(rows_ptr + seq) * NUM_HEADS + head) * (SIZE * HEAD_DIM)
    place_NP = index_N[:, None] * HEAD_DIM + index_P[None, :]
    before = tl.load(context_lens_ptr + seq) - (end - first)
    is_known_N = index_N < tl.minimum(before, 1) * SIZE  # of a sequence that begins nothing is
    state_NP = tl.load(state_ptr + place_NP, mask=is_known_N[:, None] & is_real_P[None, :], other=0.0)
    channel_P = head * HEAD_DIM + index_P
    rate_at_NP = index_N[:, None] * (NUM_HEADS * HEAD_DIM) + channel_P[None, :]
    rate_NP = tl.load(rate_ptr + rate_at_NP, mask=is_real_NP, other=0.0)
    dt_bias_P = tl.load(dt_bias_ptr + channel_P, mask=is_real_P, other=0.0)
    d_P = tl.load(d_ptr + channel_P, mask=is_real_P, other=0.0)
    for token in range(first.to(tl.int64), end.to(tl.int64)):
        x_P = tl.load(x_ptr + token * x_stride + channel_P, mask=is_real_P, other=0.0).to(tl.float32)
        dt_P = tl.load(dt_ptr + token * dt_stride + channel_P, mask=is_real_P, other=0.0).to(tl.float32)
        gate_P = tl.load(gate_ptr + token * gate_stride + channel_P, mask=is_real_P, other=0.0).to(tl.float32)
        b_N = tl.load(b_ptr + token * b_stride + index_N, mask=is_real_N, other=0.0).to(tl.float32)
        c_N = tl.load(c_ptr + token * c_stride + index_N, mask=is_real_N, other=0.0).to(tl.float32)
        step_P = softplus(dt_P + dt_bias_P)
        state_NP = state_NP * tl.exp(step_P[None, :] * rate_NP) + b_N[:, None] * (step_P * x_P)[None, :]
        out_P = (tl.sum(state_NP * c_N[:, None], 0) + d_P * x_P) * gate_P * tl.sigmoid(gate_P)
        tl.store(out_ptr + token * (NUM_HEADS * HEAD_DIM) + channel_P, out_P, mask=is_real_P)
    tl.store(state_ptr + place_NP, state_NP, mask=is_real_NP)

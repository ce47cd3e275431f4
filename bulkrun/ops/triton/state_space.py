"""Mamba 2's state space in Triton, token by token: a program has some columns of a head's state in its registers.

A warp each, so that sums over a state's rows need no shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.triton.softplus import softplus

_NUMBERS = 2048  # of a program's state: half of the registers
_COLUMNS = 64  # at most: of few rows more programs have some


def state_space(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    d_H: torch.Tensor,
    state_RHNP: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """As the reference."""
    assert meta.rows_S is not None, "layers with a state are given where it is"
    assert xbc_TC.stride(1) == dt_TH.stride(1) == 1 and state_RHNP.is_contiguous()
    num_heads, size, head_dim = state_RHNP.shape[1:]
    rows = triton.next_power_of_2(size)
    columns = min(_NUMBERS // rows, _COLUMNS, triton.next_power_of_2(head_dim))
    make = torch.zeros if meta.is_padded else torch.empty
    out_THP = make(len(xbc_TC), num_heads, head_dim, dtype=xbc_TC.dtype, device=xbc_TC.device)
    _state_space_kernel[(triton.cdiv(head_dim, columns), num_heads, meta.rows_S.numel())](
        xbc_TC,
        dt_TH,
        a_log_H,
        dt_bias_H,
        d_H,
        state_RHNP,
        out_THP,
        meta.rows_S,
        meta.cu_seqlens_q,
        meta.context_lens_S,
        xbc_TC.stride(0),
        dt_TH.stride(0),
        NUM_HEADS=num_heads,
        GROUPS_DIM=(xbc_TC.shape[1] - num_heads * head_dim) // 2,
        SIZE=size,
        HEAD_DIM=head_dim,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=1,
    )
    return out_THP


@triton.jit
def _state_space_kernel(
    xbc_ptr,
    dt_ptr,
    a_log_ptr,
    dt_bias_ptr,
    d_ptr,
    state_ptr,
    out_ptr,
    rows_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    xbc_stride,
    dt_stride,
    NUM_HEADS: tl.constexpr,
    GROUPS_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, seq = tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    if first == end:  # it pads the step
        return
    index_N = tl.arange(0, ROWS)
    index_P = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_real_N, is_real_P = index_N < SIZE, index_P < HEAD_DIM
    state_ptr += (tl.load(rows_ptr + seq) * NUM_HEADS + head) * (SIZE * HEAD_DIM)
    place_NP = index_N[:, None] * HEAD_DIM + index_P[None, :]
    before = tl.load(context_lens_ptr + seq) - (end - first)
    is_known_N = index_N < tl.minimum(before, 1) * SIZE  # of a sequence that begins nothing is
    state_NP = tl.load(state_ptr + place_NP, mask=is_known_N[:, None] & is_real_P[None, :], other=0.0)
    forgetting = tl.exp(tl.load(a_log_ptr + head))
    dt_bias, d = tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    x_ptr = xbc_ptr + head * HEAD_DIM + index_P
    b_ptr = xbc_ptr + NUM_HEADS * HEAD_DIM + head // (NUM_HEADS // (GROUPS_DIM // SIZE)) * SIZE + index_N
    out_ptr += head * HEAD_DIM + index_P
    for token in range(first.to(tl.int64), end.to(tl.int64)):
        x_P = tl.load(x_ptr + token * xbc_stride, mask=is_real_P, other=0.0).to(tl.float32)
        b_N = tl.load(b_ptr + token * xbc_stride, mask=is_real_N, other=0.0).to(tl.float32)
        c_N = tl.load(b_ptr + GROUPS_DIM + token * xbc_stride, mask=is_real_N, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + dt_bias)
        state_NP = state_NP * tl.exp(-forgetting * step) + b_N[:, None] * (step * x_P)[None, :]
        out_P = tl.sum(state_NP * c_N[:, None], 0) + d * x_P
        tl.store(out_ptr + token * (NUM_HEADS * HEAD_DIM), out_P, mask=is_real_P)
    tl.store(state_ptr + place_NP, state_NP, mask=is_real_N[:, None] & is_real_P[None, :])

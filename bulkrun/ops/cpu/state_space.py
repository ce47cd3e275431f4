"""Mamba 2's state space, compiled. Contract: `ops.linear_attention.state_space`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_number
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.ops.linear_attention.state_space import state_space as reference

_LANES = 16  # columns of a state that are worked on together
_POINTERS = ("xbc", "dt", "a_log", "dt_bias", "d", "state", "out", "rows", "cu_seqlens", "context_lens")
_INTEGERS = (
    "xbc_stride", "dt_stride", "num_heads", "num_groups", "size", "value_size", "num_seqs", "num_tokens",
)  # fmt: skip


class _StateSpace(ctypes.Structure):
    """`struct StateSpace` of state_space.h."""

    _fields_ = (*[(x, c_void_p) for x in _POINTERS], *[(x, c_int64) for x in _INTEGERS], ("num_threads", c_int32))


def state_space(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    d_H: torch.Tensor,
    state_RHNP: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """As the reference; a sequence's bits depend on its own tokens alone, however they are spread over steps."""
    dtype, num_tokens = name(xbc_TC.dtype), len(xbc_TC)
    num_heads, size, head_dim = state_RHNP.shape[1:]
    if dtype is None or not fits_state_space(size, head_dim) or dt_TH.dtype != xbc_TC.dtype:
        return reference(xbc_TC, dt_TH, a_log_H, dt_bias_H, d_H, state_RHNP, meta)
    assert meta.rows_S is not None, "layers with a state are given where it is"
    assert xbc_TC.stride(1) == dt_TH.stride(1) == 1 and state_RHNP.is_contiguous() and meta.rows_S.is_contiguous()
    assert all(x.dtype == torch.float32 for x in (a_log_H, dt_bias_H, d_H, state_RHNP))
    out_THP = xbc_TC.new_empty(num_tokens, num_heads, head_dim)
    num_groups = (xbc_TC.shape[1] - num_heads * head_dim) // (2 * size)
    space = _StateSpace(
        xbc_TC.data_ptr(), dt_TH.data_ptr(), a_log_H.data_ptr(), dt_bias_H.data_ptr(), d_H.data_ptr(),
        state_RHNP.data_ptr(), out_THP.data_ptr(), meta.rows_S.data_ptr(), meta.cu_seqlens_q.data_ptr(),
        meta.context_lens_S.data_ptr(), xbc_TC.stride(0), dt_TH.stride(0), num_heads, num_groups, size, head_dim,
        meta.rows_S.numel(), num_tokens, torch.get_num_threads(),
    )  # fmt: skip
    _function(dtype)(ctypes.byref(space))
    return out_THP


def fits_state_space(size: int, head_dim: int) -> bool:
    """Whether it is compiled for states of so many rows and columns; the library must be there."""
    return size <= c_number("max_state_size") and not head_dim % _LANES


@cache
def _function(dtype: str) -> Callable[..., None]:
    return struct_function(f"state_space_{dtype}", _StateSpace)

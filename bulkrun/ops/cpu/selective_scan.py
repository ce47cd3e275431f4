"""Mamba's selective state space, compiled. Contract: `ops.linear_attention.selective_scan`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.state_space import fits_state_space
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.ops.linear_attention.selective_scan import selective_scan as reference

_POINTERS = (
    "x", "dt", "b", "c", "gate", "rate", "dt_bias", "d", "state", "out", "rows", "cu_seqlens", "context_lens",
)  # fmt: skip
_INTEGERS = (
    "x_stride", "dt_stride", "b_stride", "c_stride", "gate_stride",
    "num_heads", "size", "value_size", "num_seqs", "num_tokens",
)  # fmt: skip


class _SelectiveScan(ctypes.Structure):
    """`struct SelectiveScan` of selective_scan.h."""

    _fields_ = (*[(x, c_void_p) for x in _POINTERS], *[(x, c_int64) for x in _INTEGERS], ("num_threads", c_int32))


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
    """As the reference; a sequence's bits depend on its own tokens alone, however they are spread over steps."""
    dtype, num_tokens = name(x_TC.dtype), len(x_TC)
    num_heads, size, head_dim = state_RHNP.shape[1:]
    of_tokens, of_channels = (x_TC, dt_TC, b_TN, c_TN, gate_TC), (rate_NC, dt_bias_C, d_C)
    if dtype is None or not fits_state_space(size, head_dim):
        return reference(*of_tokens, *of_channels, state_RHNP, meta)
    assert meta.rows_S is not None, "layers with a state are given where it is"
    assert all(x.stride(1) == 1 and x.dtype == x_TC.dtype for x in of_tokens)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (*of_channels, state_RHNP))
    out_TC = x_TC.new_empty(x_TC.shape)
    scan = _SelectiveScan(
        *[x.data_ptr() for x in (*of_tokens, *of_channels, state_RHNP, out_TC, meta.rows_S)],
        meta.cu_seqlens_q.data_ptr(), meta.context_lens_S.data_ptr(), *[x.stride(0) for x in of_tokens],
        num_heads, size, head_dim, meta.rows_S.numel(), num_tokens, torch.get_num_threads(),
    )  # fmt: skip
    _function(dtype)(ctypes.byref(scan))
    return out_TC


@cache
def _function(dtype: str) -> Callable[..., None]:
    return struct_function(f"selective_scan_{dtype}", _SelectiveScan)

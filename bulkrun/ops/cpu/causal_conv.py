"""A short convolution over each sequence's last tokens, compiled. Contract: `ops.linear_attention.causal_conv`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.ops.linear_attention.causal_conv import causal_conv as reference

_POINTERS = ("x", "weight", "bias", "state", "out", "rows", "cu_seqlens", "context_lens")
_INTEGERS = ("x_stride", "num_channels", "num_taps", "num_seqs", "num_tokens")


class _Convolution(ctypes.Structure):
    """`struct Convolution` of causal_conv.cpp."""

    _fields_ = (
        *[(x, c_void_p) for x in _POINTERS],
        *[(x, c_int64) for x in _INTEGERS],
        ("silu", c_int32),
        ("num_threads", c_int32),
    )


def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_RWC: torch.Tensor,
    meta: AttentionMetadata,
    *,
    silu: bool,
) -> torch.Tensor:
    """As the reference, for all tensors of x's dtype; a sequence's bits depend on its own tokens alone."""
    dtype, (num_tokens, num_channels) = name(x_TC.dtype), x_TC.shape
    is_plain = weight_WC.dtype == state_RWC.dtype == x_TC.dtype and x_TC.stride(1) == 1
    is_plain &= bias_C is None or (bias_C.dtype == x_TC.dtype and bias_C.is_contiguous())
    if dtype is None or not is_plain:
        return reference(x_TC, weight_WC, bias_C, state_RWC, meta, silu=silu)
    assert meta.rows_S is not None, "layers with a state are given where it is"
    assert weight_WC.is_contiguous() and state_RWC.is_contiguous() and meta.rows_S.is_contiguous()
    out_TC = x_TC.new_empty(num_tokens, num_channels)
    convolution = _Convolution(
        x_TC.data_ptr(), weight_WC.data_ptr(), None if bias_C is None else bias_C.data_ptr(), state_RWC.data_ptr(),
        out_TC.data_ptr(), meta.rows_S.data_ptr(), meta.cu_seqlens_q.data_ptr(), meta.context_lens_S.data_ptr(),
        x_TC.stride(0), num_channels, weight_WC.shape[0], meta.rows_S.numel(), num_tokens, silu,
        torch.get_num_threads(),
    )  # fmt: skip
    _function(dtype)(ctypes.byref(convolution))
    return out_TC


@cache
def _function(dtype: str) -> Callable[..., None]:
    return struct_function(f"causal_conv_{dtype}", _Convolution)

"""The gated delta rule, compiled. Contract: `ops.linear_attention.gated_delta_rule`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_number
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.ops.linear_attention.gated_delta_rule import NORM_EPS
from bulkrun.ops.linear_attention.gated_delta_rule import gated_delta_rule as reference

_LANES = 16  # columns of a state that are worked on together
_POINTERS = ("qkv", "ba", "a_log", "dt_bias", "state", "out", "rows", "cu_seqlens", "context_lens")
_INTEGERS = (
    "qkv_stride", "ba_stride", "num_heads", "num_key_heads", "size", "value_size", "num_decays", "num_seqs",
    "num_tokens",
)  # fmt: skip


class _DeltaRule(ctypes.Structure):
    """`struct DeltaRule` of gated_delta_rule.cpp."""

    _fields_ = (
        *[(x, c_void_p) for x in _POINTERS],
        *[(x, c_int64) for x in _INTEGERS],
        ("norm_eps", c_float),
        ("beta_scale", c_float),
        ("num_threads", c_int32),
    )


def fits_delta_rule(size: int, value_size: int) -> bool:
    """Whether it is compiled for keys and values of so many dimensions; the library must be there."""
    return size <= c_number("max_state_size") and not size % 2 and not value_size % _LANES


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
    """As the reference; a sequence's bits depend on its own tokens alone, however they are spread over steps."""
    dtype, num_tokens = name(qkv_TC.dtype), len(qkv_TC)
    num_heads, size, value_size = state_RHDV.shape[1:]
    is_plain = a_log_H.dtype == dt_bias.dtype == torch.float32 and ba_TG.dtype == qkv_TC.dtype
    if dtype is None or not fits_delta_rule(size, value_size) or not is_plain:
        return reference(qkv_TC, ba_TG, a_log_H, dt_bias, state_RHDV, meta, beta_scale=beta_scale)
    assert meta.rows_S is not None, "layers with a state are given where it is"
    assert qkv_TC.stride(1) == ba_TG.stride(1) == 1 and state_RHDV.is_contiguous() and meta.rows_S.is_contiguous()
    out_THV = qkv_TC.new_empty(num_tokens, num_heads, value_size)
    num_key_heads = (qkv_TC.shape[1] - num_heads * value_size) // (2 * size)
    rule = _DeltaRule(
        qkv_TC.data_ptr(), ba_TG.data_ptr(), a_log_H.data_ptr(), dt_bias.data_ptr(), state_RHDV.data_ptr(),
        out_THV.data_ptr(), meta.rows_S.data_ptr(), meta.cu_seqlens_q.data_ptr(), meta.context_lens_S.data_ptr(),
        qkv_TC.stride(0), ba_TG.stride(0), num_heads, num_key_heads, size, value_size,
        dt_bias.numel() // num_heads, meta.rows_S.numel(), num_tokens, NORM_EPS, beta_scale, torch.get_num_threads(),
    )  # fmt: skip
    _function(dtype)(ctypes.byref(rule))
    return out_THV


@cache
def _function(dtype: str) -> Callable[..., None]:
    return struct_function(f"gated_delta_rule_{dtype}", _DeltaRule)

"""Attention over a paged KV cache, compiled: blocks are read in place. Contract: `ops.attention.paged_attention`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.attention.paged_attention import paged_attention as reference
from bulkrun.ops.cpu.dtypes import cache_format, name
from bulkrun.ops.cpu.library import c_number
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.windows import Window, kernel_window

_POINTERS = (
    "q", "k_cache", "v_cache", "out", "block_tables", "context_lens", "cu_seqlens_q", "sinks", "distance_bias",
)  # fmt: skip
_INTEGERS = (
    "q_stride", "out_stride", "num_tokens", "num_seqs", "table_width",
    "num_heads", "num_kv_heads", "head_dim", "block_size", "value_dim", "window", "max_distance",
)  # fmt: skip


class _Step(ctypes.Structure):
    """`struct Step` of paged_attention.h."""

    _fields_ = (
        *[(x, c_void_p) for x in _POINTERS],
        *[(x, c_int64) for x in _INTEGERS],
        ("scale", c_float),
        ("soft_cap", c_float),
        *[(x, c_int32) for x in ("cache_format", "sees_later", "num_threads")],
    )


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: Window | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; a row's bits depend on its own query and keys alone, whatever else is in the step."""
    num_tokens, num_heads, head_dim = q_THD.shape
    dtype, num_kv_heads = name(q_THD.dtype), k_cache.shape[2]
    if not can_attend(q_THD, k_cache):
        return reference(
            q_THD, k_cache, v_cache, meta,
            scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks_H=sinks_H,
        )  # fmt: skip
    if q_THD.stride()[1:] != (head_dim, 1):
        q_THD = q_THD.contiguous()
    tables, context_lens, cu_seqlens_q = meta.block_tables_SM, meta.context_lens_S, meta.cu_seqlens_q
    assert k_cache.is_contiguous() and v_cache.stride() == k_cache.stride() and tables.stride(1) == 1
    assert v_cache.dtype == k_cache.dtype
    assert tables.dtype == context_lens.dtype == cu_seqlens_q.dtype == torch.int32
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
    value_dim = v_cache.shape[3]
    out_THV = q_THD.new_empty(num_tokens, num_heads, value_dim)
    step = _Step(
        q_THD.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out_THV.data_ptr(), tables.data_ptr(),
        context_lens.data_ptr(), cu_seqlens_q.data_ptr(), None if sinks_H is None else sinks_H.data_ptr(), None,
        q_THD.stride(0), out_THV.stride(0), num_tokens,
        context_lens.numel(), tables.stride(0), num_heads, num_kv_heads, head_dim, k_cache.shape[1],
        value_dim, kernel_window(sliding_window), 0, scale, soft_cap or 0.0,
        cache_format(k_cache.dtype, q_THD.dtype), False, torch.get_num_threads(),
    )  # fmt: skip
    _function(dtype)(ctypes.byref(step))
    return out_THV


def can_attend(q_THD: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether it is compiled for such tensors."""
    heads_per_kv_head = q_THD.shape[1] // k_cache.shape[2]
    is_known = name(q_THD.dtype) is not None and cache_format(k_cache.dtype, q_THD.dtype) is not None
    return is_known and heads_per_kv_head <= c_number("max_heads_per_kv_head")


@cache
def _function(dtype: str) -> Callable[..., None]:
    return struct_function(f"paged_attention_{dtype}", _Step)

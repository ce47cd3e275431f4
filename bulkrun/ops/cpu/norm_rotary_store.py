"""QK-norm, rotary embedding and KV write, compiled: one pass. Contract: `ops.attention.norm_rotary_store`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.attention.norm_rotary_store import norm_rotary_store as reference
from bulkrun.ops.cpu.dtypes import cache_format, suffix
from bulkrun.ops.cpu.library import c_number
from bulkrun.ops.cpu.structs import struct_function


class _Projection(ctypes.Structure):
    """`struct Projection` of norm_rotary_store.h."""

    _fields_ = (
        *[(name, c_void_p) for name in ("qkv", "weight", "cos", "sin", "queries", "k_cache", "v_cache", "slots")],
        *[
            (name, c_int64)
            for name in ("qkv_stride", "num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")
        ],
        ("eps", c_float),
        ("norms_values", c_int32),
        ("keys_are_values", c_int32),
        ("cache_format", c_int32),
        ("num_threads", c_int32),
    )


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
    """As the reference; the turn is rounded once to qkv's dtype, and the queries are a new contiguous tensor."""
    num_tokens, num_heads, head_dim = qkv_TND.shape
    names = suffix(qkv_TND.dtype, qkv_TND.dtype if qk_norm_weight is None else qk_norm_weight.dtype)
    cache = cache_format(qkv_TND.dtype if k_cache is None else k_cache.dtype, qkv_TND.dtype)
    is_known = cache is not None and (cos is None or cos.dtype == qkv_TND.dtype)
    is_long = qk_norm_weight is not None and head_dim > c_number("max_head_dim")
    if names is None or not is_known or is_long or qkv_TND.stride()[1:] != (head_dim, 1):
        return reference(
            qkv_TND, qk_norm_weight, eps, cos, sin, k_cache, v_cache, slot_mapping_T, keys_are_values=keys_are_values
        )
    num_kv_heads = 0 if k_cache is None else k_cache.shape[2]
    num_heads += num_kv_heads if keys_are_values else 0
    num_normed = 0 if qk_norm_weight is None else len(qk_norm_weight)
    num_v_heads = 0 if v_cache is None else num_kv_heads
    num_q_heads = num_heads - num_kv_heads - num_v_heads
    q_THD = qkv_TND.new_empty(num_tokens, num_q_heads, head_dim)
    projection = _Projection(
        qkv_TND.data_ptr(), _pointer(qk_norm_weight), _pointer(cos), _pointer(sin), q_THD.data_ptr(),
        _pointer(k_cache), _pointer(v_cache), slot_mapping_T.data_ptr(), qkv_TND.stride(0), num_tokens,
        num_q_heads, num_kv_heads, head_dim, 0 if cos is None else cos.shape[-1],
        eps, num_normed == num_heads, keys_are_values, cache, torch.get_num_threads(),
    )  # fmt: skip
    _function(names)(ctypes.byref(projection))
    return q_THD


def _pointer(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


@cache
def _function(names: str) -> Callable[..., None]:
    return struct_function(f"norm_rotary_store_{names}", _Projection)

"""A norm before or behind a gate, compiled. Contract: `ops.linear_attention.gated_rms_norm`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.linear_attention.gated_rms_norm import gated_rms_norm as reference


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    norm_before_gate: bool = True,
    silu: bool = True,
) -> torch.Tensor:
    """As the reference, for tensors of one dtype."""
    dtype, (num_tokens, num_heads, size) = name(x.dtype), x.shape
    is_plain = x.is_contiguous() and gate.stride()[1:] == (size, 1) and x.dtype == gate.dtype == weight.dtype
    is_plain &= silu and weight.is_contiguous()
    if dtype is None or not is_plain:
        return reference(x, gate, weight, eps, norm_before_gate=norm_before_gate, silu=silu)
    out = torch.empty_like(x)
    _function(dtype)(
        x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr(),
        num_tokens, num_heads, size, gate.stride(0), size if weight.ndim > 1 else 0,
        eps, norm_before_gate, torch.get_num_threads(),
    )  # fmt: skip
    return out


@cache
def _function(dtype: str) -> Callable[..., None]:
    return c_function(f"gated_rms_norm_{dtype}", *[c_void_p] * 4, *[c_int64] * 5, c_float, c_int, c_int)

"""Root-mean-square norms, compiled. Contract: `ops.rms_norm`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import suffix
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.rms_norm import add_rms_norm as add_reference
from bulkrun.ops.rms_norm import rms_norm as reference

_SIZES = (c_int64, c_int64, c_float, c_int)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference, where there is one weight for all rows; everything else goes to the reference."""
    names = suffix(x.dtype, weight.dtype)
    if names is None or weight.dim() != 1:
        return reference(x, weight, eps)
    x = x.contiguous()
    size, out = x.shape[-1], torch.empty_like(x)
    run = _function("rms_norm", names, 3, ())
    run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, torch.get_num_threads())
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, where rows have one weight and lie one behind the other; else it goes to the reference."""
    names = suffix(x.dtype, weight.dtype)
    is_plain = x.is_contiguous() and residual.is_contiguous() and x.dtype == residual.dtype
    if names is None or weight.dim() != 1 or not is_plain:
        return add_reference(x, residual, weight, eps, scale)
    size, out, total = x.shape[-1], torch.empty_like(x), torch.empty_like(x)
    _function("add_rms_norm", names, 5, (c_float,))(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
        x.numel() // size, size, eps, torch.get_num_threads(), 1.0 if scale is None else scale.item(),
    )  # fmt: skip
    return out, total


@cache
def _function(op: str, names: str, num_pointers: int, more: tuple[type, ...]) -> Callable[..., None]:
    return c_function(f"{op}_{names}", *[c_void_p] * num_pointers, *_SIZES, *more)

"""The activation of Apertus, compiled. Contract: `ops.xielu`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.xielu import factors
from bulkrun.ops.xielu import xielu as reference


def xielu(x: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    dtype = name(x.dtype)
    if dtype is None or not x.is_contiguous():
        return reference(x, alphas)
    out = torch.empty_like(x)
    _function(dtype)(x.data_ptr(), out.data_ptr(), x.numel(), *factors(alphas).tolist(), torch.get_num_threads())
    return out


@cache
def _function(dtype: str) -> Callable[..., None]:
    return c_function(f"xielu_{dtype}", c_void_p, c_void_p, c_int64, c_float, c_float, c_int)

"""Gates of which few are above zero, compiled. Contract: `ops.cut_gates`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.cut_gates import cut_gates_ as reference


def cut_gates_(gate_TI: torch.Tensor, num_deviations: float) -> torch.Tensor:
    """As the reference."""
    dtype = name(gate_TI.dtype)
    if dtype is None or gate_TI.stride(1) != 1:
        return reference(gate_TI, num_deviations)
    rows, size = gate_TI.shape
    _function(dtype)(gate_TI.data_ptr(), rows, gate_TI.stride(0), size, num_deviations, torch.get_num_threads())
    return gate_TI


@cache
def _function(dtype: str) -> Callable[..., None]:
    return c_function(f"cut_gates_{dtype}", c_void_p, c_int64, c_int64, c_int64, c_float, c_int)

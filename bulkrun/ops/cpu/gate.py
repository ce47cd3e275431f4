"""What the compiled gated activations share. Knows no activation."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function


def gate(op: str, gate_up: torch.Tensor) -> torch.Tensor | None:
    """`op` over [..., 2 I], gate in the first half: [..., I]; None where it is compiled for no such tensor."""
    dtype = name(gate_up.dtype)
    if dtype is None or not gate_up.is_contiguous() or gate_up.shape[-1] % 2:
        return None
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    rows = out.numel() // size
    _function(op, dtype)(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
    return out


@cache
def _function(op: str, dtype: str) -> Callable[..., None]:
    return c_function(f"{op}_{dtype}", c_void_p, c_void_p, c_int64, c_int64, c_int)

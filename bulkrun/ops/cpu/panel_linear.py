"""Products with weights in panels, compiled for processors with AVX2. Contract: `ops.matmul.linear`.

One layout serves steps of any width, and the layer stack reads the same one. From memory it is read as fast as memory
gives it; beside the products of torch's libraries, see tests/benchmarks/LOG.md. A row's bits depend on that row and the
weight alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function, library
from bulkrun.ops.cpu.panel_matrix import Matrix, panel_matrix
from bulkrun.ops.cpu.structs import struct_function

PANEL = 32  # columns of a panel; also the multiple that a row's numbers must be: whole loads of a tile unit (AMX)
_ROWS = 16  # of a tile


def can_pack_panels(weight: torch.Tensor, rows_dtype: torch.dtype | None = None) -> bool:
    """Whether `panel_linear` is compiled for such a weight [O, I]; the first call may compile.

    rows_dtype: of what is multiplied with it, if not its own.
    """
    is_plain = weight.device.type == "cpu" and weight.layout == torch.strided and weight.ndim == 2
    return is_plain and fills_panels(*weight.shape) and compiles_panels(rows_dtype or weight.dtype)


def fills_panels(columns: int, size: int) -> bool:
    """Whether a weight [columns, size] is one of whole panels."""
    return columns % PANEL == size % PANEL == 0


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """A weight [O, I] of float32 or bf16, O and I multiples of 32, word by word: [O / 32, words, 32, 4 / itemsize]."""
    return pack_panels_(weight.clone(memory_format=torch.contiguous_format))


def pack_panels_(weight: torch.Tensor) -> torch.Tensor:
    """`pack_panels` in the memory of a contiguous weight, no longer plain then: a panel lies where its rows lay."""
    assert weight.is_contiguous() and not weight.shape[0] % PANEL, "whole panels, in one piece"
    rows, words = weight.view(torch.int32).shape
    c_function("pack_panels", c_void_p, c_int64, c_int64)(weight.data_ptr(), rows, words)
    return weight.view(rows // PANEL, words, PANEL, 4 // weight.element_size())


def panel_linear(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, I] times a weight from `pack_panels`, plus a bias [O] of x's dtype; returns [T, O].

    The weight is of x's dtype, or of bf16 where x is float32: then it counts as the float32 that its numbers are.
    """
    return multiply_panels(x, panel_matrix(panels, bias), panels.shape[0] * PANEL)


def multiply_panels(x: torch.Tensor, matrix: Matrix, columns: int) -> torch.Tensor:
    """x [T, I] of float32 or bf16 times panels with so many columns, plus their bias; returns [T, O]."""
    num_tokens, size = x.shape
    if num_tokens % _ROWS or not x.is_contiguous():
        rows = x.new_empty(num_tokens + -num_tokens % _ROWS, size)
        rows[:num_tokens] = x
        x = rows
    out = x.new_empty(num_tokens, columns)
    _function(x.dtype)(
        ctypes.byref(matrix), x.data_ptr(), out.data_ptr(), num_tokens, size, columns, torch.get_num_threads()
    )
    return out


def compiles_panels(dtype: torch.dtype) -> bool:
    """Whether such products are compiled for numbers of this dtype; the first call may compile."""
    ops, end = library(), name(dtype)
    return ops is not None and end is not None and hasattr(ops, f"panel_linear_{end}")


@cache
def _function(dtype: torch.dtype) -> Callable[..., None]:
    more = (*[c_void_p] * 2, *[c_int64] * 3, c_int32)
    return struct_function(f"panel_linear_{name(dtype)}", Matrix, more=more)

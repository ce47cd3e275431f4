"""Products with int8 weights in panels, compiled for processors with AVX2. Contract: `ops.matmul.int8_linear`.

The panels are those of `panel_linear` with four numbers to a word, which the layer stack reads too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import library
from bulkrun.ops.cpu.panel_linear import PANEL, pack_panels_
from bulkrun.ops.cpu.panel_matrix import Matrix, panel_matrix
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.ops.matmul.int8_linear import ZERO, Int8Weight
from bulkrun.ops.matmul.int8_linear import int8_linear as reference

ROW_MULTIPLE = 64  # of a row's numbers, which are bytes: whole loads of a tile unit (AMX)
_ROWS = 16  # of a tile
_ROWS_TO_SUM = 256


def can_pack_int8(columns: int, size: int) -> bool:
    """Whether products with so many columns, of rows of this size, are compiled; the first call may compile."""
    return not columns % PANEL and not size % ROW_MULTIPLE and _is_compiled()


def pack_int8_(weight: Int8Weight) -> Int8Weight:
    """The weight in panels, in the memory of its values, which are no longer plain then; itself where it cannot be.

    The first call may compile.
    """
    if not can_pack_int8(*weight.values.shape):
        return weight
    some_rows = weight.values.split(_ROWS_TO_SUM)  # torch makes a copy of what it sums as other integers
    zeros = torch.cat([rows.sum(-1, dtype=torch.int32) for rows in some_rows]).mul_(ZERO)
    return Int8Weight(pack_panels_(weight.values), weight.scale, zeros)


def int8_linear(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See `bulkrun.ops.matmul.int8_linear.int8_linear`; weight: plain too."""
    if weight.zeros is None:
        return reference(x, weight, bias)
    if name(x.dtype) is None:
        return int8_linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)
    return multiply_int8_panels(x, panel_matrix(weight, bias), weight.values.shape[0] * PANEL)


def multiply_int8_panels(x: torch.Tensor, matrix: Matrix, columns: int) -> torch.Tensor:
    """x [T, I] of float32 or bf16, as int8, times panels with so many columns, plus their bias; returns [T, O]."""
    x = x.contiguous()
    num_tokens, size = x.shape
    rows, words = num_tokens + -num_tokens % _ROWS, size // 4
    values, scales = torch.empty(rows, words, dtype=torch.int32), torch.empty(rows)
    out = x.new_empty(num_tokens, columns)
    _function(x.dtype)(
        ctypes.byref(matrix), x.data_ptr(), values.data_ptr(), scales.data_ptr(), out.data_ptr(),
        num_tokens, size, words, columns, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _is_compiled() -> bool:
    ops = library()
    return ops is not None and hasattr(ops, "int8_linear_float32")


@cache
def _function(dtype: torch.dtype) -> Callable[..., None]:
    more = (*[c_void_p] * 4, *[c_int64] * 4, c_int32)
    return struct_function(f"int8_linear_{name(dtype)}", Matrix, more=more)

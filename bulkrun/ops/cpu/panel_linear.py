"""Products with bf16 weights in panels, compiled for processors with a tile unit (AMX). Contract: `bulkrun.ops.linear`.

One layout serves steps of any width, and the layer stack reads the same one. From memory it is read as fast as memory
gives it; beside oneDNN's packed products, see tests/benchmarks/LOG.md.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.library import c_function, library

PANEL = 32  # columns of a panel; also the multiple that a row's numbers must be: whole loads of the tile unit
_ROWS = 16  # of a tile


def can_pack_panels(weight: torch.Tensor) -> bool:
    """Whether `panel_linear` is compiled for such a weight [O, I]; the first call may compile."""
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.layout == torch.strided
    return fits and not any(size % PANEL for size in weight.shape) and _has_tile_unit()


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """A weight [O, I] of float32 or bf16, O and I multiples of 32, word by word: [O / 32, words, 32, 4 / itemsize]."""
    per_word = 4 // weight.element_size()
    words = weight.contiguous().view(torch.int32).view(weight.shape[0] // PANEL, PANEL, -1)
    return words.transpose(1, 2).contiguous().view(weight.dtype).unflatten(-1, (PANEL, per_word))


def panel_linear(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, I] bf16 times a weight from `pack_panels`, plus a bias [O]; returns [T, O]."""
    num_tokens, columns = x.shape[0], panels.shape[0] * PANEL
    if num_tokens % _ROWS or not x.is_contiguous():
        rows = x.new_empty(num_tokens + -num_tokens % _ROWS, x.shape[1])
        rows[:num_tokens] = x
        x = rows
    out = x.new_empty(num_tokens, columns)
    _function()(
        x.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        num_tokens, panels.shape[1], columns, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _has_tile_unit() -> bool:
    ops = library()
    return ops is not None and bool(ops.has_tile_unit())


@cache
def _function() -> Callable[..., None]:
    return c_function("panel_linear", *[c_void_p] * 4, *[c_int64] * 3, c_int32)

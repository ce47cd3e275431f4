"""What the tables of compiled layers point to: weights in panels, a step's metadata, scratch. Knows no layer."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu import panel_matrix
from bulkrun.ops.cpu.panel_linear import PANEL, pack_panels
from bulkrun.ops.cpu.panel_matrix import PanelWeight

_THREAD_ROWS = 256  # of panels.h, at most: scratch rows of one thread; those per token grow by as many
LANES = 16  # numbers in a vector (vector.h)
PAD = 32  # of layer_stack.cpp: what rows are a multiple of


class Matrix(NamedTuple):
    """A weight [O, I], plain or in panels, which those of 8 and 4 bits always are, and perhaps a bias [O]."""

    weight: PanelWeight
    bias: torch.Tensor | None


class StackMemory:
    """The memory of one stack. `row_sizes`: numbers in a row of each of its scratch buffers."""

    def __init__(self, dtype: torch.dtype, row_sizes: Mapping[str, int], per_token: Collection[str]) -> None:
        self.dtype = dtype
        self._kept: list[torch.Tensor] = []
        self._row_sizes, self._per_token = row_sizes, per_token
        self._rows: dict[str, int] = {}
        self._scratch = torch.zeros(0, dtype=dtype)

    def keep(self, tensor: torch.Tensor) -> int:
        """Its address, contiguous, for as long as this lives."""
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def matrix(self, matrix: Matrix) -> panel_matrix.Matrix:
        """In panels, padded to whole ones."""
        weight, bias = matrix
        if isinstance(weight, torch.Tensor) and weight.ndim == 2:
            weight = pack_panels(F.pad(padded(weight), (0, -weight.shape[1] % PAD)))
        if bias is not None:
            self.keep(bias := padded(bias).contiguous())
        for part in panel_matrix.tensors_of(weight):
            self.keep(part)
        return panel_matrix.panel_matrix(weight, bias)

    def make_room(self, stack: ctypes.Structure, num_tokens: int) -> None:
        """Scratch for a step; rows that are multiplied have whole words behind them, zeros for good."""
        token_rows, thread_rows = num_tokens + -num_tokens % _THREAD_ROWS, torch.get_num_threads() * _THREAD_ROWS
        rows = {name: token_rows if name in self._per_token else thread_rows for name in self._row_sizes}
        if all(self._rows.get(name, 0) >= count for name, count in rows.items()):
            return
        self._rows, sizes = rows, [rows[name] * size for name, size in self._row_sizes.items()]
        self._scratch = self._scratch.new_zeros(sum(sizes))
        for name, part in zip(rows, self._scratch.split(sizes), strict=True):
            setattr(stack, name, part.data_ptr())


def set_step(stack: Any, meta: AttentionMetadata) -> None:
    """Whose tokens a step's are and where their keys lie; the tensors must outlive the call."""
    tables = meta.block_tables_SM
    assert tables.dtype == meta.context_lens_S.dtype == meta.cu_seqlens_q.dtype == torch.int32
    assert tables.stride(1) == 1
    stack.slots, stack.block_tables = meta.slot_mapping_T.data_ptr(), tables.data_ptr()
    stack.context_lens, stack.cu_seqlens_q = meta.context_lens_S.data_ptr(), meta.cu_seqlens_q.data_ptr()
    stack.num_seqs, stack.table_width = meta.context_lens_S.numel(), tables.stride(0)


def set_kept(stack: Any, kept: torch.Tensor | None, num_tokens: int) -> None:
    """Which tokens go on after the last layer's attention: int64 [S], ascending; None: all. Behind `set_step`."""
    if kept is None:
        stack.kept, stack.num_kept = None, num_tokens
    else:  # of no tokens torch has no address, and without one all would attend in the last layer too, for nothing
        stack.kept, stack.num_kept = kept.data_ptr() or stack.slots, len(kept)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """With zeros behind, up to whole panels."""
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, -rows.shape[0] % PANEL))

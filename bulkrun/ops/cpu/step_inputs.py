"""Step preparation in one pass, compiled, and what a step appends. Contract: `ops.step_inputs`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache

import torch

from bulkrun.blocks import NULL_BLOCK
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.ops.step_inputs import StepBuffers

_POINTERS = (
    "token_ids", "block_tables", "sequences",
    "input_ids", "positions", "slots", "context_lens", "cu_seqlens_q", "tables", "state_rows",
)  # fmt: skip
_INTEGERS = (
    "length", "width", "num_seqs", "num_tokens", "table_stride", "table_width", "block_size", "padding_slot",
)  # fmt: skip


class _StepRows(ctypes.Structure):
    """`struct StepRows` of step_inputs.cpp."""

    _fields_ = (*[(name, c_void_p) for name in _POINTERS], *[(name, c_int64) for name in _INTEGERS])


def step_inputs(
    token_ids_RL: torch.Tensor,
    block_tables_RM: torch.Tensor,
    sequences_3S: torch.Tensor,
    out: StepBuffers,
    *,
    block_size: int,
) -> None:
    """As the reference."""
    assert sequences_3S.is_contiguous() and token_ids_RL.is_contiguous() and block_tables_RM.is_contiguous()
    tables = out.block_tables_SM
    step = _StepRows(
        token_ids_RL.data_ptr(), block_tables_RM.data_ptr(), sequences_3S.data_ptr(),
        out.input_ids_T.data_ptr(), out.positions_T.data_ptr(), out.slot_mapping_T.data_ptr(),
        out.context_lens_S.data_ptr(), out.cu_seqlens_q.data_ptr(), tables.data_ptr(),
        out.rows_S.data_ptr(),
        token_ids_RL.shape[1], block_tables_RM.shape[1], sequences_3S.shape[1], out.input_ids_T.numel(),
        tables.stride(0), tables.shape[1], block_size, NULL_BLOCK * block_size,
    )  # fmt: skip
    _function()(ctypes.byref(step))


def append_tokens(
    token_ids_RL: torch.Tensor, row_S: torch.Tensor, position_S: torch.Tensor, token_S: torch.Tensor
) -> None:
    """As the reference."""
    assert token_ids_RL.is_contiguous() and row_S.dtype == position_S.dtype == token_S.dtype == torch.int64
    assert row_S.is_contiguous() and position_S.is_contiguous() and token_S.is_contiguous()
    append = c_function("append_tokens", c_void_p, c_int64, *[c_void_p] * 3, c_int64)
    append(
        token_ids_RL.data_ptr(), token_ids_RL.shape[1],
        row_S.data_ptr(), position_S.data_ptr(), token_S.data_ptr(), token_S.numel(),
    )  # fmt: skip


@cache
def _function() -> Callable[..., None]:
    return struct_function("step_inputs", _StepRows)

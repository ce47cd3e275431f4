"""Products with weights in Triton, for any number of rows in one way: the contract of `ops.matmul.invariant_linear`.

A program takes BLOCK_M rows and BLOCK_N outputs and sums over the inputs from the first to the last in steps of
BLOCK_K, in float32. The sizes of a tile depend on the weight's shape alone and no sum is split among programs, so a
row's bits cannot depend on how many rows there are; rows beyond the last are zeros (the way of Thinking Machines'
batch-invariant product, 2025). 64 rows are the fewest that Hopper's wide matrix instructions take: more would be wasted
on decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from bulkrun.ops.tile_workers import TileWorkers
from bulkrun.ops.triton.tile_order import place_of_program

_BLOCK_M = 64
_WIDE = 8192  # outputs from which on wide tiles still keep a large GPU busy while a few sequences decode


def invariant_linear(
    x_TI: torch.Tensor,
    panels: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    workers: TileWorkers | None,
) -> torch.Tensor:
    """As the reference; one panel, any number of rows, no workers."""
    (weight_OI,) = panels
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    (num_rows, size), num_outputs = x_TI.shape, weight_OI.shape[0]
    out_TO = x_TI.new_empty(num_rows, num_outputs)
    block_n = 128 if num_outputs >= _WIDE else 64
    block_k = 64 if x_TI.element_size() <= 2 else 32
    if num_rows:
        grid = triton.cdiv(num_rows, _BLOCK_M) * triton.cdiv(num_outputs, block_n)
        _linear_kernel[(grid,)](
            x_TI,
            weight_OI,
            bias,
            out_TO,
            num_rows,
            x_TI.stride(0),
            SIZE=size,
            NUM_OUTPUTS=num_outputs,
            HAS_BIAS=bias is not None,
            BLOCK_M=_BLOCK_M,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=4,
        )
    return out_TO


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    SIZE: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row_tile, column_tile = place_of_program(tl.program_id(0), num_row_tiles, (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N)
    row_M = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column_N = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_row_M, is_column_N = row_M < num_rows, column_N < NUM_OUTPUTS

    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        index_K = start + tl.arange(0, BLOCK_K)
        x_mask, weight_mask = is_row_M[:, None], is_column_N[None, :]
        if SIZE % BLOCK_K != 0:
            x_mask, weight_mask = x_mask & (index_K < SIZE)[None, :], weight_mask & (index_K < SIZE)[:, None]
        x_MK = tl.load(x_ptr + row_M[:, None] * x_stride + index_K[None, :], mask=x_mask, other=0.0)
        weight_KN = tl.load(weight_ptr + column_N[None, :] * SIZE + index_K[:, None], mask=weight_mask, other=0.0)
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + column_N, mask=is_column_N, other=0.0).to(tl.float32)[None, :]
    out_MN = row_M[:, None] * NUM_OUTPUTS + column_N[None, :]
    tl.store(out_ptr + out_MN, acc_MN, mask=is_row_M[:, None] & is_column_N[None, :])

"""Experts with fp8 weights on a GPU: pairs of token and expert sorted by expert, and one product over all of them.

A program takes BLOCK_M rows of one expert (`expert_tiles`) and BLOCK_N of its outputs. Tiles are of three kinds, by how
many rows an expert gets on average; which one it is can change the last bits of a row's sums, as can the dense
product's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bulkrun.ops.experts.expert_pairs import ExpertActivation, ExpertPairs, gated
from bulkrun.ops.matmul.fp8_linear import Fp8Weight
from bulkrun.ops.triton.expert_pairs import sum_by_token
from bulkrun.ops.triton.expert_tiles import most_row_tiles, rows_of_tile
from bulkrun.ops.triton.fp8_linear import quantize_rows
from bulkrun.ops.triton.tile_order import place_of_program

_BLOCK_K = 128  # numbers that Hopper's fp8 units sum with 14 bits, before float32 takes over


class _Tile(NamedTuple):
    rows_per_expert: float  # on average, up to which it is taken
    rows: int
    outputs: int
    num_warps: int


_TILES = (
    _Tile(4, 16, 128, 4),  # a step that decodes few sequences reads weights and does little else
    _Tile(96, 64, 128, 4),  # the fewest rows that Hopper's wide matrix instructions take
    _Tile(float("inf"), 128, 128, 8),
)
_NUM_STAGES = 3  # what a GPU with 100 KB of shared memory has room for


def fp8_experts(
    x_TE: torch.Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    activation: ExpertActivation,
) -> torch.Tensor:
    """As the reference; weights and biases are contiguous."""
    gate_up_bias, down_bias = biases or (None, None)
    pairs = ExpertPairs.of(ids_Tk, gate_up.values.shape[0])
    out_PO = x_TE.new_empty(len(pairs.order_P), gate_up.values.shape[1])
    _grouped_linear(quantize_rows(x_TE), pairs.token_P, pairs.ends_X, gate_up, gate_up_bias, out_PO)
    out_PE = x_TE.new_empty(len(pairs.order_P), x_TE.shape[1])
    _grouped_linear(quantize_rows(gated(out_PO, activation)), None, pairs.ends_X, down, down_bias, out_PE)
    return sum_by_token(out_PE, pairs.order_P, weights_Tk)


def _grouped_linear(
    x: tuple[torch.Tensor, torch.Tensor],
    row_P: torch.Tensor | None,
    ends_X: torch.Tensor,
    weight: Fp8Weight,
    bias_XO: torch.Tensor | None,
    out_PO: torch.Tensor,
) -> None:
    """Row p of `out` is row p, or the one `row_P` names, of `x` (fp8 and scales) through the expert that has pair p."""
    x_fp8, x_scale = x
    num_pairs, (num_experts, num_outputs, size) = out_PO.shape[0], weight.values.shape
    if not num_pairs:
        return
    tile = next(tile for tile in _TILES if num_pairs <= tile.rows_per_expert * num_experts)
    num_row_tiles = most_row_tiles(num_pairs, num_experts, tile.rows)
    _grouped_linear_kernel[(num_row_tiles * triton.cdiv(num_outputs, tile.outputs),)](
        x_fp8, x_scale, row_P, weight.values, weight.scale, bias_XO, ends_X, out_PO, num_row_tiles,
        SIZE=size, NUM_OUTPUTS=num_outputs, NUM_EXPERTS=num_experts, BLOCK_X=triton.next_power_of_2(num_experts),
        HAS_BIAS=bias_XO is not None, IS_GATHERED=row_P is not None,
        BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=_BLOCK_K,
        num_warps=tile.num_warps, num_stages=_NUM_STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_row_tiles"])
def _grouped_linear_kernel(
    x_ptr,
    x_scale_ptr,
    row_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    ends_ptr,
    out_ptr,
    num_row_tiles,
    SIZE: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_tile, column_tile = place_of_program(tl.program_id(0), num_row_tiles, (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N)
    expert, first, end = rows_of_tile(ends_ptr, row_tile, NUM_EXPERTS, BLOCK_X, BLOCK_M)
    if first >= end:
        return
    pair_M = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    column_N = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_pair_M, is_column_N = pair_M < end, column_N < NUM_OUTPUTS
    row_M = pair_M
    if IS_GATHERED:
        row_M = tl.load(row_ptr + pair_M, mask=is_pair_M, other=0)
    output_N = expert.to(tl.int64) * NUM_OUTPUTS + column_N  # a row of all experts' weights

    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        index_K = start + tl.arange(0, BLOCK_K)
        x_mask, weight_mask = is_pair_M[:, None], is_column_N[None, :]
        if SIZE % BLOCK_K != 0:
            x_mask, weight_mask = x_mask & (index_K < SIZE)[None, :], weight_mask & (index_K < SIZE)[:, None]
        x_MK = tl.load(x_ptr + row_M[:, None] * SIZE + index_K[None, :], mask=x_mask, other=0.0)
        weight_KN = tl.load(weight_ptr + output_N[None, :] * SIZE + index_K[:, None], mask=weight_mask, other=0.0)
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, max_num_imprecise_acc=BLOCK_K)
    acc_MN *= tl.load(x_scale_ptr + row_M, mask=is_pair_M, other=0.0)[:, None]
    acc_MN *= tl.load(weight_scale_ptr + output_N, mask=is_column_N, other=0.0)[None, :]
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + output_N, mask=is_column_N, other=0.0).to(tl.float32)[None, :]
    out_MN = pair_M[:, None] * NUM_OUTPUTS + column_N[None, :]
    tl.store(out_ptr + out_MN, acc_MN, mask=is_pair_M[:, None] & is_column_N[None, :])

"""One product with weights of four bits in Triton, for a matrix or for experts: codes are unpacked in registers.

A program takes BLOCK_N outputs and BLOCK_M rows, of one expert where there are such (`expert_tiles`). Codes and scales
are copied to shared memory as they are stored, several tiles ahead, and become numbers on their way to the matrix
units (`four_bit_numbers`): memory gives half a byte for each. The weight is the first operand, which Hopper's matrix
units take from registers. Numbers are those of `unpack`, sums are float32. Where a matrix has few outputs several
programs share a sum, so that every multiprocessor has two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bulkrun.ops.matmul.four_bit_weight import TILE_INPUTS, FourBitWeight
from bulkrun.ops.triton.expert_tiles import most_row_tiles, rows_of_tile
from bulkrun.ops.triton.four_bit_numbers import four_bit_numbers
from bulkrun.ops.triton.interpreted import IS_INTERPRETED
from bulkrun.ops.triton.tile_order import place_of_program


class _Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int  # as many as keep memory busy with one program to a multiprocessor, in 80 KB: see below


# GPUs without Hopper's matrix units turn a tile's numbers through up to 32 KB of shared memory, of which some have 100.
_TILES = (_Tile(16, 128, 128, 4, 4), _Tile(32, 128, 128, 4, 4), _Tile(64, 128, 64, 4, 6), _Tile(128, 128, 64, 8, 4))
_PROGRAMS = 264  # two for each multiprocessor of an H100: one alone leaves its units idle while it waits
_LEAST_STEPS, _MOST_SPLITS = 8, 4  # of a sum that is shared out
_SUM_BLOCK = 1024
assert {tile.inputs for tile in _TILES} <= {*TILE_INPUTS}, "into which groups fit"


class ExpertRows(NamedTuple):
    """Which rows go through which expert; P rows of the output."""

    row_P: torch.Tensor | None  # int64: the row of the input; None: the same
    ends_X: torch.Tensor  # int32: where each expert's end


def multiply(
    x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None, out: torch.Tensor, experts: ExpertRows | None
) -> None:
    """Write rows through the weight [O, I] to `out` [T, O], or row p of `out` through its expert of [X, O, I].

    x: [T, I], contiguous, as are `bias` [O] or [X, O] and what the weight holds. A weight `in_bits`.
    """
    num_rows, (num_outputs, num_bytes) = out.shape[0], weight.codes.shape[-2:]
    num_experts = 0 if experts is None else len(experts.ends_X)
    tile = _tile_for(num_rows / max(num_experts, 1), is_sure=not num_experts)
    num_row_tiles = triton.cdiv(num_rows, tile.rows)
    if experts is not None:
        num_row_tiles = most_row_tiles(num_rows, num_experts, tile.rows)
    row_P, ends_X = experts or (None, None)
    num_tiles = num_row_tiles * triton.cdiv(num_outputs, tile.outputs)
    if not num_tiles:
        return
    splits = 1 if num_experts else _splits(num_tiles, triton.cdiv(2 * num_bytes, tile.inputs))
    parts = out if splits == 1 else out.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
    _product_kernel[(num_tiles, splits)](
        x, row_P, weight.codes.view(torch.int32), weight.scale, bias, ends_X, parts, num_rows, num_row_tiles,
        SIZE=2 * num_bytes, NUM_OUTPUTS=num_outputs,
        GROUP_SIZE=weight.group_size, NUM_GROUPS=weight.scale.shape[-1], ARE_WHOLE=weight.form == "whole",
        IN_PAIRS=x.dtype in weight.exact_in,
        NUM_EXPERTS=num_experts, BLOCK_X=triton.next_power_of_2(max(num_experts, 1)),
        BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, SPLITS=splits,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(num_rows, triton.cdiv(num_outputs, _SUM_BLOCK))](
            parts, bias, out, num_rows, NUM_OUTPUTS=num_outputs, SPLITS=splits, BLOCK=_SUM_BLOCK
        )


def _splits(num_tiles: int, num_steps: int) -> int:
    """Among how many programs a sum of so many steps is shared out, so that there are enough of them."""
    return max(1, min(_PROGRAMS // num_tiles, num_steps // _LEAST_STEPS, _MOST_SPLITS))


def _tile_for(num_rows: float, *, is_sure: bool) -> _Tile:
    """The smallest tile that holds so many rows; of an average, one that twice as many fit into."""
    wanted = num_rows if is_sure else 2 * num_rows
    return next((tile for tile in _TILES if wanted <= tile.rows), _TILES[-1])


@triton.jit
def finished(acc_NM):
    """The same numbers, once the matrix units are done with them, and so with the registers that they read.

    Left alone, the compiler lets Hopper's units go on into the next step, and on to registers that hold the next
    weights by then: wrong sums, now and then (Triton 3.6, seen on an H200). It waits where a sum is used for anything.
    """
    if IS_INTERPRETED:
        return acc_NM
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc_NM], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["num_rows", "num_row_tiles"])
def _product_kernel(
    x_ptr,
    row_ptr,  # None: row p is row p of x
    word_ptr,  # of codes
    scale_ptr,
    bias_ptr,  # None: none
    ends_ptr,
    out_ptr,
    num_rows,
    num_row_tiles,
    SIZE: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,  # 0: a matrix
    BLOCK_X: tl.constexpr,
    ARE_WHOLE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,  # programs that share a sum; with several, `out` is float32 [SPLITS, T, O], without the bias
):
    STEPS: tl.constexpr = (SIZE + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    G: tl.constexpr = BLOCK_K // GROUP_SIZE if GROUP_SIZE < BLOCK_K else 1
    row_tile, column_tile = place_of_program(tl.program_id(0), num_row_tiles, (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N)
    expert, first, end = 0, row_tile * BLOCK_M, num_rows
    if NUM_EXPERTS > 0:
        expert, first, end = rows_of_tile(ends_ptr, row_tile, NUM_EXPERTS, BLOCK_X, BLOCK_M)
    if first >= end:
        return
    pair_M = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    column_N = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_pair_M, is_column_N = pair_M < end, column_N < NUM_OUTPUTS
    row_M = pair_M
    if row_ptr is not None:
        row_M = tl.load(row_ptr + pair_M, mask=is_pair_M, other=0)
    output_N = expert * tl.cast(NUM_OUTPUTS, tl.int64) + column_N  # a row of all experts' weights

    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    start = 0
    if SPLITS > 1:
        start = tl.program_id(1) * (STEPS * BLOCK_K)
        out_ptr += tl.program_id(1).to(tl.int64) * num_rows * NUM_OUTPUTS
    for step in range(STEPS):  # as many whatever the program: else wide matrix instructions wait for each other
        first_input = start + step * BLOCK_K
        index_W, index_K = first_input // 8 + tl.arange(0, BLOCK_K // 8), first_input + tl.arange(0, BLOCK_K)
        index_G = first_input // GROUP_SIZE + tl.arange(0, G)
        x_mask, word_mask, scale_mask = is_pair_M[None, :], is_column_N[:, None], is_column_N[:, None]
        if SIZE % (BLOCK_K * SPLITS) != 0:
            x_mask = x_mask & (index_K < SIZE)[:, None]
            word_mask = word_mask & (index_W < SIZE // 8)[None, :]
            scale_mask = scale_mask & (index_G < NUM_GROUPS)[None, :]
        x_KM = tl.load(x_ptr + row_M[None, :] * SIZE + index_K[:, None], mask=x_mask, other=0.0)
        word_NW = tl.load(word_ptr + output_N[:, None] * (SIZE // 8) + index_W[None, :], mask=word_mask, other=0)
        scale_NG = tl.load(scale_ptr + output_N[:, None] * NUM_GROUPS + index_G[None, :], mask=scale_mask, other=0)
        weight_NK = four_bit_numbers(word_NW, scale_NG, x_KM.dtype, ARE_WHOLE, IN_PAIRS, BLOCK_N, BLOCK_K, G)
        acc_NM = finished(tl.dot(weight_NK, x_KM, acc_NM, input_precision="ieee"))
    if bias_ptr is not None and SPLITS == 1:
        acc_NM += tl.load(bias_ptr + output_N, mask=is_column_N, other=0.0).to(tl.float32)[:, None]
    out_NM = pair_M[None, :] * NUM_OUTPUTS + column_N[:, None]
    tl.store(out_ptr + out_NM, acc_NM, mask=is_pair_M[None, :] & is_column_N[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    parts_ptr,
    bias_ptr,  # None: none
    out_ptr,
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column_O = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real_O = column_O < NUM_OUTPUTS
    sum_O = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        sum_O += tl.load(parts_ptr + (split * num_rows + row) * NUM_OUTPUTS + column_O, mask=is_real_O, other=0.0)
    if bias_ptr is not None:
        sum_O += tl.load(bias_ptr + column_O, mask=is_real_O, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_OUTPUTS + column_O, sum_O, mask=is_real_O)

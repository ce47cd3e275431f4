"""Log-probabilities in Triton: logits are read once, in the dtype they come in, and nothing of their size is written.

A program finds the likeliest tokens of a tile and what the tile weighs; another one merges the tiles of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits per program
_NEG_INF = tl.constexpr(float("-inf"))


def token_logprobs(
    logits_SV: torch.Tensor, token_S: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference, up to the rounding of sums; of equals the first token stands first."""
    num_seqs, vocab_size = logits_SV.shape
    assert logits_SV.stride(1) == 1
    num_tiles = triton.cdiv(vocab_size, _TILE)
    numbers = logits_SV.new_empty(0, dtype=torch.float32)
    highest_SN = numbers.new_empty(num_seqs, num_tiles)
    mass_SN = torch.empty_like(highest_SN)  # by itself: half of one tensor is aligned for some numbers of rows only
    top_SNk = numbers.new_empty(num_seqs, num_tiles, k)
    top_ids_SNk = torch.empty(num_seqs, num_tiles, k, dtype=torch.int32, device=logits_SV.device)
    chosen_S, values_Sk = numbers.new_empty(num_seqs), numbers.new_empty(num_seqs, k)
    ids_Sk = torch.empty(num_seqs, k, dtype=torch.int64, device=logits_SV.device)
    if num_seqs:
        tiles = (highest_SN, mass_SN, top_SNk, top_ids_SNk)
        _tile_kernel[(num_seqs, num_tiles)](
            logits_SV, *tiles, logits_SV.stride(0), num_tiles, k, VOCAB_SIZE=vocab_size, TILE=_TILE, num_warps=8
        )
        _row_kernel[(num_seqs,)](
            logits_SV,
            token_S.contiguous(),
            *tiles,
            chosen_S,
            values_Sk,
            ids_Sk,
            logits_SV.stride(0),
            num_tiles,
            k,
            VOCAB_SIZE=vocab_size,
            TILES=triton.next_power_of_2(num_tiles),
            CANDIDATES=triton.next_power_of_2(num_tiles * max(k, 1)),
            num_warps=4,
        )
    return chosen_S, values_Sk, ids_Sk


@triton.jit(do_not_specialize=["num_tiles", "k"])
def _tile_kernel(
    logits_ptr,
    highest_ptr,
    mass_ptr,
    top_ptr,
    top_ids_ptr,
    stride,
    num_tiles,
    k,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_V = tile * TILE + tl.arange(0, TILE)
    logits_V = tl.load(logits_ptr + row * stride + token_V, mask=token_V < VOCAB_SIZE, other=_NEG_INF).to(tl.float32)
    highest = tl.max(logits_V, 0)
    at = row * num_tiles + tile
    tl.store(highest_ptr + at, highest)
    weight_V = tl.where(logits_V == _NEG_INF, 0.0, tl.exp(logits_V - highest))
    tl.store(mass_ptr + at, tl.sum(weight_V, 0))
    is_left_V = token_V < VOCAB_SIZE
    for i in range(k):
        best, index = _first_of_largest(logits_V, is_left_V, TILE)
        tl.store(top_ptr + at * k + i, best)
        tl.store(top_ids_ptr + at * k + i, tile * TILE + index)
        is_left_V = is_left_V & (token_V != tile * TILE + index)


@triton.jit(do_not_specialize=["num_tiles", "k"])
def _row_kernel(
    logits_ptr,
    token_ptr,
    highest_ptr,
    mass_ptr,
    top_ptr,
    top_ids_ptr,
    chosen_ptr,
    values_ptr,
    ids_ptr,
    stride,
    num_tiles,
    k,
    VOCAB_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile_N = tl.arange(0, TILES)
    is_tile_N = tile_N < num_tiles
    highest_N = tl.load(highest_ptr + row * num_tiles + tile_N, mask=is_tile_N, other=_NEG_INF)
    mass_N = tl.load(mass_ptr + row * num_tiles + tile_N, mask=is_tile_N, other=0.0)
    highest = tl.max(highest_N, 0)
    everything = highest + tl.log(tl.sum(tl.where(mass_N == 0.0, 0.0, mass_N * tl.exp(highest_N - highest)), 0))
    chosen = tl.load(logits_ptr + row * stride + tl.load(token_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, chosen - everything)
    one_C = tl.arange(0, CANDIDATES)
    is_left_C = one_C < num_tiles * k
    candidates = row * num_tiles * k
    top_C = tl.load(top_ptr + candidates + one_C, mask=is_left_C, other=_NEG_INF)
    for i in range(k):  # tiles lie in order, so the first of equals is the first token
        best, index = _first_of_largest(top_C, is_left_C, CANDIDATES)
        tl.store(values_ptr + row * k + i, best - everything)
        token = tl.load(top_ids_ptr + candidates + tl.minimum(index, num_tiles * k - 1))
        tl.store(ids_ptr + row * k + i, tl.minimum(token, VOCAB_SIZE - 1).to(tl.int64))  # NaN is no token's maximum
        is_left_C = is_left_C & (one_C != index)


@triton.jit
def _first_of_largest(x_V, is_left_V, SIZE: tl.constexpr):
    """The largest number of those that are left, -inf if none is, and its index, which is one of theirs if any is."""
    left_V = tl.where(is_left_V, x_V, _NEG_INF)
    best = tl.max(left_V, 0)
    index_V = tl.where(is_left_V & (left_V == best), tl.arange(0, SIZE), SIZE - 1)
    return best, tl.min(index_V, 0)

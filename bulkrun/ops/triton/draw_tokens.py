"""Drawing tokens in Triton. The noise is the reference's, bit for bit up to the last logarithms.

The logits are read once, in the dtype they come in, and a few times more where somebody filters. Nothing of their size
is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.triton.sampling import least_kept

_TILE = 4096  # logits per program
_CUT_TILE = 1024  # where filters may leave nothing of a tile: the smaller, the more of them end early
_NEG_INF = tl.constexpr(float("-inf"))
_INF = tl.constexpr(float("inf"))


def draw_tokens(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    *,
    min_p_S: torch.Tensor | None = None,
    top_k_S: torch.Tensor | None = None,
    top_p_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; of equal sums the first token wins."""
    threshold_S = None
    if min_p_S is not None or top_k_S is not None or top_p_S is not None:
        threshold_S = least_kept(logits_SV, temperature_S, min_p_S, top_k_S, top_p_S)
    num_seqs, vocab_size = logits_SV.shape
    assert logits_SV.stride(1) == 1
    tile = _TILE if threshold_S is None else _CUT_TILE
    num_tiles = triton.cdiv(vocab_size, tile)
    best_SN = torch.empty(num_seqs, num_tiles, dtype=torch.float32, device=logits_SV.device)
    highest_SN = torch.empty_like(best_SN)  # by itself: half of one tensor is aligned for some numbers of rows only
    token_SN = torch.empty(num_seqs, num_tiles, dtype=torch.int32, device=logits_SV.device)
    token_S = torch.empty(num_seqs, dtype=torch.int64, device=logits_SV.device)
    is_valid_S = torch.empty(num_seqs, dtype=torch.bool, device=logits_SV.device)
    if num_seqs:
        _best_of_tile_kernel[(num_seqs, num_tiles)](
            logits_SV,
            temperature_S.contiguous(),
            seed_S.contiguous(),
            position_S.contiguous(),
            threshold_S,
            best_SN,
            token_SN,
            highest_SN,
            logits_SV.stride(0),
            num_tiles,
            VOCAB_SIZE=vocab_size,
            TILE=tile,
            num_warps=tile // 512,
        )
        tiles = triton.next_power_of_2(num_tiles)
        _best_of_row_kernel[(num_seqs,)](
            best_SN, token_SN, highest_SN, token_S, is_valid_S, num_tiles, TILES=tiles, num_warps=1
        )
    return token_S, is_valid_S


@triton.jit(do_not_specialize=["num_tiles"])
def _best_of_tile_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    threshold_ptr,
    best_ptr,
    token_ptr,
    highest_ptr,
    stride,
    num_tiles,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_V = tile * TILE + tl.arange(0, TILE)
    logits_V = tl.load(logits_ptr + row * stride + token_V, mask=token_V < VOCAB_SIZE, other=_NEG_INF).to(tl.float32)
    is_number_V = logits_V == logits_V
    highest = tl.max(tl.where(is_number_V, logits_V, _INF), 0)
    tl.store(highest_ptr + row * num_tiles + tile, highest)
    temperature = tl.load(temperature_ptr + row)
    if temperature != 0.0:
        lowest = _NEG_INF
        if threshold_ptr is not None:
            lowest = tl.div_rn(tl.load(threshold_ptr + row), temperature)
        if tl.div_rn(highest, temperature) >= lowest:  # else nothing of the tile is kept, and noise costs the most
            key = _mix64(_mix64(tl.load(seed_ptr + row)) ^ tl.load(position_ptr + row))
            scaled_V = tl.div_rn(logits_V, tl.zeros([TILE], tl.float32) + temperature)
            logits_V = tl.where(scaled_V >= lowest, scaled_V + _gumbel(token_V, key), _NEG_INF)
        else:
            logits_V = tl.full([TILE], _NEG_INF, tl.float32)
    logits_V = tl.where(is_number_V, logits_V, _NEG_INF)  # a maximum with NaN could point past the vocabulary
    best, index = tl.max(logits_V, 0, return_indices=True)
    tl.store(best_ptr + row * num_tiles + tile, best)
    tl.store(token_ptr + row * num_tiles + tile, tile * TILE + index)


@triton.jit(do_not_specialize=["num_tiles"])
def _best_of_row_kernel(best_ptr, token_ptr, highest_ptr, out_ptr, is_valid_ptr, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index_N = tl.arange(0, TILES)
    is_real_N = index_N < num_tiles
    best_N = tl.load(best_ptr + row * num_tiles + index_N, mask=is_real_N, other=_NEG_INF)
    tile = tl.argmax(best_N, 0)
    tl.store(out_ptr + row, tl.load(token_ptr + row * num_tiles + tile).to(tl.int64))
    highest = tl.max(tl.load(highest_ptr + row * num_tiles + index_N, mask=is_real_N, other=_NEG_INF), 0)
    tl.store(is_valid_ptr + row, (highest > _NEG_INF) & (highest < _INF))


@triton.jit
def _mix64(x):
    """The splitmix64 finalizer of the reference; int64 arithmetic wraps."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(token_V, key):
    """The reference's noise of these tokens under a row's 64-bit key."""
    bits_V = _xor_shift((token_V * -0x61C88647) ^ key.to(tl.int32), 16) * -0x7A143595
    bits_V = _xor_shift(bits_V + (key >> 32).to(tl.int32), 13) * -0x3D4D51CB
    bits_V = _xor_shift(bits_V, 16) & 0x7FFFFFFF
    uniform_V = tl.minimum((bits_V.to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    rest_V = 1.0 - uniform_V
    # log1p(-u), which Triton lacks: log(1 - u) times what rounding 1 - u has lost; the smallest u must keep all digits
    lost_V = tl.where(rest_V == 1.0, 1.0, 1.0 - rest_V)
    log1p_V = tl.where(rest_V == 1.0, -uniform_V, tl.log(rest_V) * (uniform_V / lost_V))
    return -tl.log(-log1p_V)


@triton.jit
def _xor_shift(x, BITS: tl.constexpr):
    return x ^ ((x >> BITS) & ((1 << (32 - BITS)) - 1))

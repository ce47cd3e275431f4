"""Drawing tokens and masking logits in Triton. The noise is the reference's, bit for bit up to the last logarithms.

One read of the logits and nothing of their size written: the reference hashes a vocabulary's worth of noise per row in
some twenty passes. Penalties touch few logits of few rows and stay in torch. Knows no request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits per program
_NEG_INF = tl.constexpr(float("-inf"))


def gumbel_sample(
    logits_SV: torch.Tensor, temperature_S: torch.Tensor, seed_S: torch.Tensor, position_S: torch.Tensor
) -> torch.Tensor:
    """As the reference; of equal sums the first token wins."""
    num_seqs, vocab_size = logits_SV.shape
    assert logits_SV.stride(1) == 1
    num_tiles = triton.cdiv(vocab_size, _TILE)
    best_SN = logits_SV.new_empty(num_seqs, num_tiles, dtype=torch.float32)
    token_SN = torch.empty(num_seqs, num_tiles, dtype=torch.int32, device=logits_SV.device)
    token_S = torch.empty(num_seqs, dtype=torch.int64, device=logits_SV.device)
    if num_seqs:
        _best_of_tile_kernel[(num_seqs, num_tiles)](
            logits_SV,
            temperature_S.contiguous(),
            seed_S.contiguous(),
            position_S.contiguous(),
            best_SN,
            token_SN,
            logits_SV.stride(0),
            num_tiles,
            VOCAB_SIZE=vocab_size,
            TILE=_TILE,
            num_warps=8,
        )
        _best_of_row_kernel[(num_seqs,)](
            best_SN, token_SN, token_S, num_tiles, TILES=triton.next_power_of_2(num_tiles), num_warps=1
        )
    return token_S


def apply_token_masks(logits_SV: torch.Tensor, mask_CW: torch.Tensor, row_C: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    masked_SV = logits_SV.clone(memory_format=torch.contiguous_format)
    num_masks, num_words = mask_CW.shape
    vocab_size = logits_SV.shape[1]
    if num_masks:
        _token_mask_kernel[(num_masks, triton.cdiv(vocab_size, _TILE))](
            masked_SV,
            mask_CW.contiguous(),
            row_C.contiguous(),
            num_words,
            VOCAB_SIZE=vocab_size,
            TILE=_TILE,
            num_warps=8,
        )
    return masked_SV


@triton.jit(do_not_specialize=["stride", "num_tiles"])
def _best_of_tile_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    token_ptr,
    stride,
    num_tiles,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_V = tile * TILE + tl.arange(0, TILE)
    logits_V = tl.load(logits_ptr + row * stride + token_V, mask=token_V < VOCAB_SIZE, other=_NEG_INF)
    if tl.load(temperature_ptr + row) != 0.0:
        key = _mix64(_mix64(tl.load(seed_ptr + row)) ^ tl.load(position_ptr + row))
        logits_V = logits_V + _gumbel(token_V, key)
    logits_V = tl.where(logits_V == logits_V, logits_V, _NEG_INF)  # a maximum with NaN could point past the vocabulary
    best, index = tl.max(logits_V, 0, return_indices=True)
    tl.store(best_ptr + row * num_tiles + tile, best)
    tl.store(token_ptr + row * num_tiles + tile, tile * TILE + index)


@triton.jit(do_not_specialize=["num_tiles"])
def _best_of_row_kernel(best_ptr, token_ptr, out_ptr, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index_N = tl.arange(0, TILES)
    best_N = tl.load(best_ptr + row * num_tiles + index_N, mask=index_N < num_tiles, other=_NEG_INF)
    tile = tl.argmax(best_N, 0)
    tl.store(out_ptr + row, tl.load(token_ptr + row * num_tiles + tile).to(tl.int64))


@triton.jit(do_not_specialize=["num_words"])
def _token_mask_kernel(logits_ptr, mask_ptr, row_ptr, num_words, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + index)
    token_V = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word_V = tl.load(mask_ptr + index * num_words + token_V // 32, mask=token_V // 32 < num_words, other=0)
    is_forbidden_V = ((word_V >> (token_V % 32)) & 1) == 0
    no_chance_V = tl.full([TILE], _NEG_INF, tl.float32)
    tl.store(logits_ptr + row * VOCAB_SIZE + token_V, no_chance_V, mask=is_forbidden_V & (token_V < VOCAB_SIZE))


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

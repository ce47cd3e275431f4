"""Masking, cutting and drawing in Triton. The noise is the reference's, bit for bit up to the last logarithms.

A draw reads the logits once and writes nothing of their size; a cut finds its threshold by search instead of sorting
the vocabulary. Penalties touch few logits of few rows and stay in torch. Knows no request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits per program
_PIVOTS_TILE = 1024  # logits compared with all pivots of a search at once
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


def apply_top_k_top_p(
    logits_SV: torch.Tensor, top_k_S: torch.Tensor, top_p_S: torch.Tensor, *, max_top_k: int | None = None
) -> torch.Tensor:
    """As the reference; nothing is sorted, so `max_top_k` saves nothing here."""
    num_seqs, vocab_size = logits_SV.shape
    assert logits_SV.stride(1) == 1
    cut_SV = torch.empty(logits_SV.shape, dtype=logits_SV.dtype, device=logits_SV.device)
    if num_seqs:
        _top_k_top_p_kernel[(num_seqs,)](
            logits_SV,
            top_k_S.contiguous(),
            top_p_S.contiguous(),
            cut_SV,
            logits_SV.stride(0),
            VOCAB_SIZE=vocab_size,
            TILE=_PIVOTS_TILE,
            num_warps=8,
        )
    return cut_SV


@triton.jit
def _top_k_top_p_kernel(
    logits_ptr, top_k_ptr, top_p_ptr, out_ptr, stride, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    highest_V = tl.full([TILE], _NEG_INF, tl.float32)
    for start in range(0, VOCAB_SIZE, TILE):
        highest_V = tl.maximum(highest_V, _logits(row_ptr, start, VOCAB_SIZE, TILE))
    highest = tl.max(highest_V, 0)

    threshold = tl.full([], -(2**31), tl.int64)  # a key: everything is kept
    if (top_k > 0) & (top_k < VOCAB_SIZE):
        threshold = _search(row_ptr, highest, top_k.to(tl.float32), VOCAB_SIZE, TILE, False)
    if top_p < 1.0:
        above, num_above, mass_at = 0.0, 0.0, 0.0
        for start in range(0, VOCAB_SIZE, TILE):
            logits_V = _logits(row_ptr, start, VOCAB_SIZE, TILE)
            key_V = _ordered_key(logits_V)
            weight_V = tl.exp(logits_V - highest)
            above += tl.sum(tl.where(key_V > threshold, weight_V, 0.0), 0)
            num_above += tl.sum((key_V > threshold).to(tl.float32), 0)
            mass_at = tl.maximum(mass_at, tl.max(tl.where(key_V == threshold, weight_V, 0.0), 0))
        mass = above + (top_k.to(tl.float32) - num_above) * mass_at  # of tokens that tie at place k, those up to it
        least_mass = tl.maximum(mass * top_p, 1e-30)  # the likeliest token is always kept
        threshold = tl.maximum(threshold, _search(row_ptr, highest, least_mass, VOCAB_SIZE, TILE, True))
    for start in range(0, VOCAB_SIZE, TILE):
        token_V = start + tl.arange(0, TILE)
        logits_V = _logits(row_ptr, start, VOCAB_SIZE, TILE)
        kept_V = tl.where(_ordered_key(logits_V) < threshold, _NEG_INF, logits_V)
        tl.store(out_ptr + row * VOCAB_SIZE + token_V, kept_V, mask=token_V < VOCAB_SIZE)


@triton.jit
def _search(row_ptr, highest, limit, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr, BY_MASS: tl.constexpr):
    """The smallest key above which lie fewer than `limit` tokens, or less than `limit` of their weights.

    Sixteen pivots a pass settle four bits of the key. What lies above a pivot is summed in one order for all pivots, so
    rounding cannot make a lower pivot look as if less lay above it.
    """
    base = tl.full([], -(2**31), tl.int64)
    step = tl.full([], 2**28, tl.int64)
    for _ in range(8):
        pivot_P = (base + (tl.arange(0, 16) + 1) * step - 1).to(tl.int32)
        above_P = tl.zeros([16], tl.float32)
        for start in range(0, VOCAB_SIZE, TILE):
            logits_V = _logits(row_ptr, start, VOCAB_SIZE, TILE)
            if BY_MASS:
                weight_V = tl.exp(logits_V - highest)
            else:
                weight_V = tl.full([TILE], 1.0, tl.float32)
            is_above_PV = _ordered_key(logits_V)[None, :] > pivot_P[:, None]
            above_P += tl.sum(tl.where(is_above_PV, weight_V[None, :], 0.0), 1)
        base += step * tl.sum((above_P >= limit).to(tl.int64), 0)
        step = step // 16
    return base


@triton.jit
def _logits(row_ptr, start, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    """A tile of a row; minus infinity past the vocabulary."""
    token_V = start + tl.arange(0, TILE)
    return tl.load(row_ptr + token_V, mask=token_V < VOCAB_SIZE, other=_NEG_INF)


@triton.jit
def _ordered_key(logits_V):
    """int32 in the order of the floats; equal floats have equal keys (adding zero makes one zero of two)."""
    bits_V = (logits_V + 0.0).to(tl.int32, bitcast=True)
    return bits_V ^ ((bits_V >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_tiles"])
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

"""Cutting in Triton: a threshold is found by search instead of sorting the vocabulary. Knows no request, no noise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits per program
_PIVOTS_TILE = 1024  # logits compared with all pivots of a search at once
_NEG_INF = tl.constexpr(float("-inf"))


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
        above_PV = tl.zeros([16, TILE], tl.float32)  # summed once a pass: sums across warps cost more than the tile
        for start in range(0, VOCAB_SIZE, TILE):
            logits_V = _logits(row_ptr, start, VOCAB_SIZE, TILE)
            if BY_MASS:
                weight_V = tl.exp(logits_V - highest)
            else:
                weight_V = tl.full([TILE], 1.0, tl.float32)
            is_above_PV = _ordered_key(logits_V)[None, :] > pivot_P[:, None]
            above_PV += tl.where(is_above_PV, weight_V[None, :], 0.0)
        base += step * tl.sum((tl.sum(above_PV, 1) >= limit).to(tl.int64), 0)
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

"""Cutting in Triton: the least logit that a row's filters keep, found without sorting. Knows no noise.

A program reads a row a few times, in the dtype it comes in, and writes one number. Its passes only look for bounds
between which the threshold must lie; the logits between them are few and go to scratch memory, where the search is
exact. All compare raw logits: a positive temperature leaves their order as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 256  # logits looked at together, one by each thread; token t stands in column t % 256
_DEPTH = 64  # logits of a column for which there is room
_NEG_INF = tl.constexpr(float("-inf"))
_INF = tl.constexpr(float("inf"))
_LEAST_FLOAT = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_ROUNDS = tl.constexpr(3)  # of narrowing the bounds: each to an eighth


def least_kept(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    min_p_S: torch.Tensor | None,
    top_k_S: torch.Tensor | None,
    top_p_S: torch.Tensor | None,
) -> torch.Tensor:
    """The least raw logit of each row that all filters keep, float32 [S]; what equals it once scaled is kept as well.

    Filters as in `draw_tokens`; None: nobody wants it. Rows of temperature 0 keep everything (-inf).
    """
    num_seqs, vocab_size = logits_SV.shape
    assert logits_SV.stride(1) == 1
    log_min_p_S = torch.full_like(temperature_S, float("-inf")) if min_p_S is None else min_p_S.log()
    top_k_S = torch.zeros_like(temperature_S, dtype=torch.int64) if top_k_S is None else top_k_S
    top_p_S = torch.ones_like(temperature_S) if top_p_S is None else top_p_S
    scratch = torch.empty(num_seqs, _DEPTH * _COLUMNS, dtype=logits_SV.dtype, device=logits_SV.device)
    threshold_S = torch.empty(num_seqs, dtype=torch.float32, device=logits_SV.device)
    if num_seqs:
        _least_kept_kernel[(num_seqs,)](
            logits_SV,
            temperature_S.contiguous(),
            log_min_p_S.contiguous(),
            top_k_S.contiguous(),
            top_p_S.contiguous(),
            scratch,
            threshold_S,
            logits_SV.stride(0),
            VOCAB_SIZE=vocab_size,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=8,
            maxnreg=80,  # three programs fit a multiprocessor; the compiler spills at times to fit four
        )
    return threshold_S


@triton.jit
def _least_kept_kernel(
    logits_ptr,
    temperature_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    scratch_ptr,
    threshold_ptr,
    stride,
    VOCAB_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tl.static_assert(DEPTH >= 4)  # room for the maxima
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        tl.store(threshold_ptr + row, _NEG_INF)
        return
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    row_ptr = logits_ptr + row * stride
    scratch_ptr += row * DEPTH * COLUMNS
    highest_V = _group_maxima(row_ptr, VOCAB_SIZE, COLUMNS)
    highest = tl.max(highest_V, 0)
    scale = tl.minimum(tl.fdiv(_LOG2_E, temperature), 1e30)  # weights are powers of two
    lowest = _least_of_min_p(highest, temperature, tl.load(log_min_p_ptr + row))

    # lo <= threshold < hi. Masses, where the likeliest weighs 1: `above` from hi on, `least` what top_p asks for.
    lo, hi, above, least = lowest, _INF, 0.0, 0.0
    depth = DEPTH + 1  # of the scratch memory in use; more than there is: what lies between the bounds has no room
    has_top_k = (top_k > 0) & (top_k < VOCAB_SIZE)
    count = top_k.to(tl.float32)
    if has_top_k:  # k groups hold a logit from the k-th largest maximum on: the threshold is no less, and few lie above
        tl.store(scratch_ptr + tl.arange(0, 4 * COLUMNS), highest_V.to(scratch_ptr.dtype.element_ty))
        tl.debug_barrier()
        lo = _as_float(_search(scratch_ptr, 4 * COLUMNS, lo, highest, 0.0, count, highest, 0.0, COLUMNS))
        depth = _gather(row_ptr, lo, hi, scratch_ptr, VOCAB_SIZE, COLUMNS, DEPTH)
    elif top_p < 1.0:  # up to the threshold lies more than 1 - top_p of the mass, so it cannot lie too deep
        weight_V = tl.where(highest_V >= lowest, tl.exp2((highest_V - highest) * scale), 0.0)
        deepest = tl.log(VOCAB_SIZE / ((1.0 - top_p) * tl.sum(weight_V, 0))) + 1.0  # one more, for rounding
        lo = tl.maximum(lo, highest - deepest * temperature)
        rounds = 0
        while (depth > DEPTH) & (rounds < _ROUNDS):
            lo, hi, above, least = _narrow(
                row_ptr, lo, hi, above, lowest, top_p, highest, scale, VOCAB_SIZE, COLUMNS
            )  # fmt: skip
            depth = _gather(row_ptr, lo, hi, scratch_ptr, VOCAB_SIZE, COLUMNS, DEPTH)
            rounds += 1

    from_ptr, num = scratch_ptr, depth * COLUMNS
    if depth > DEPTH:  # many ties, or a top_k above a thousand: slow, and as exact
        from_ptr, num, above = row_ptr, VOCAB_SIZE, 0.0
    threshold = lo
    if has_top_k:
        threshold = _as_float(_search(from_ptr, num, lo, highest, 0.0, count, highest, 0.0, COLUMNS))
        least = _mass_of_likeliest(from_ptr, num, threshold, count, highest, scale, COLUMNS) * top_p
        least = tl.maximum(least, 1e-30)  # the likeliest token is always kept
    if top_p < 1.0:
        limit = tl.minimum(hi, highest)
        threshold = _as_float(_search(from_ptr, num, threshold, limit, above, least, highest, scale, COLUMNS))
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _group_maxima(row_ptr, VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The row in 4 x COLUMNS groups: the largest logit of each. Sixteen tiles at once keep the memory busy."""
    highest_V = tl.full([16 * COLUMNS], _NEG_INF, tl.float32)
    for start in range(0, VOCAB_SIZE, 16 * COLUMNS):
        highest_V = tl.maximum(highest_V, _tile(row_ptr, start, VOCAB_SIZE, 16 * COLUMNS).to(tl.float32))
    return tl.max(tl.reshape(highest_V, [4 * COLUMNS, 4]), 1)


@triton.jit
def _least_of_min_p(highest, temperature, log_min_p):
    """The least finite logit that is at least so likely once scaled; -inf: the least there is."""
    lowest = tl.div_rn(highest, temperature) + log_min_p
    near_P = _ordered_key(lowest * temperature) + tl.arange(0, 8) - 4  # what rounding may have moved it by, and more
    is_kept_P = tl.div_rn(_as_float(near_P), tl.zeros([8], tl.float32) + temperature) >= lowest
    kept = _as_float(tl.min(tl.where(is_kept_P, near_P, 0x7F800000), 0))
    return tl.maximum(tl.minimum(kept, highest), _LEAST_FLOAT)


@triton.jit
def _narrow(
    row_ptr, lo, hi, above, lowest, top_p, highest, scale, VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Bounds an eighth as far apart, what lies from the upper one on weighs, and what top_p keeps at least."""
    index_P = tl.arange(0, 8)
    pivot_P = tl.where(index_P == 0, lowest, lo + index_P * ((tl.minimum(hi, highest) - lo) / 8))
    mass_PV = tl.zeros([8, COLUMNS], tl.float32)
    for start in tl.range(0, VOCAB_SIZE, COLUMNS, loop_unroll_factor=8):
        logits_V = _tile(row_ptr, start, VOCAB_SIZE, COLUMNS).to(tl.float32)
        weight_V = tl.exp2((logits_V - highest) * scale)
        mass_PV = tl.where(logits_V[None, :] >= pivot_P[:, None], mass_PV + weight_V[None, :], mass_PV)
    mass_P = tl.sum(mass_PV, 1)  # in one order for all pivots and rounds, so rounding cannot set them against another
    least = tl.maximum(tl.max(mass_P, 0) * top_p, 1e-30)  # the likeliest token is always kept
    is_reached_P = mass_P >= least
    lo = tl.maximum(lo, tl.max(tl.where(is_reached_P, pivot_P, lowest), 0))
    hi = tl.minimum(hi, tl.min(tl.where(is_reached_P, _INF, pivot_P), 0))
    above = tl.maximum(above, tl.max(tl.where(is_reached_P, 0.0, mass_P), 0))
    return lo, hi, above, least


@triton.jit
def _gather(row_ptr, lo, hi, scratch_ptr, VOCAB_SIZE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Collect the logits from lo to below hi column by column, and tell how many the fullest has; -inf fills up.

    A column needs nothing of its neighbours: no sums across a program, no atomics, and always the same order.
    """
    column_V = tl.arange(0, COLUMNS)
    num_V = tl.zeros([COLUMNS], tl.int32)
    tl.debug_barrier()
    for start in range(0, VOCAB_SIZE, 8 * COLUMNS):
        tiles = ()
        for tile in tl.static_range(8):  # before the first is stored: a load never overtakes a store
            tiles += (_tile(row_ptr, start + tile * COLUMNS, VOCAB_SIZE, COLUMNS),)
        for tile in tl.static_range(8):
            logits_V = tiles[tile].to(tl.float32)
            is_between_V = (logits_V >= lo) & (logits_V < hi)
            tl.store(scratch_ptr + num_V * COLUMNS + column_V, tiles[tile], mask=is_between_V & (num_V < DEPTH))
            num_V += is_between_V.to(tl.int32)
    depth = tl.max(num_V, 0)
    for place in range(tl.minimum(depth, DEPTH)):
        filling_V = tl.full([COLUMNS], _NEG_INF, tl.float32)
        tl.store(scratch_ptr + place * COLUMNS + column_V, filling_V, mask=num_V <= place)
    tl.debug_barrier()
    return depth


@triton.jit
def _search(
    from_ptr, num, lo, highest, above, limit, top, scale, TILE: tl.constexpr
):  # fmt: skip
    """Key of the least number from lo to `highest` above which lie fewer than `limit` logits, or less than `limit` of
    their weights; `above` of those are not among the `num` logits.

    Sixteen pivots a pass settle four bits of the key. What lies above a pivot is summed in one order for all pivots, so
    rounding cannot make a lower pivot look as if less lay above it.
    """
    base = _ordered_key(lo).to(tl.int64)
    span = _ordered_key(highest).to(tl.int64) - base + 1
    step = tl.full([], 1, tl.int64)
    while step * 16 < span:
        step *= 16
    while step > 0:
        pivot_P = tl.minimum(base + (tl.arange(0, 16) + 1) * step - 1, 0x7FFFFFFF).to(tl.int32)
        above_PV = tl.zeros([16, TILE], tl.float32)  # summed once a pass: sums across warps cost more than the tile
        for start in tl.range(0, num, TILE, loop_unroll_factor=4):
            logits_V = _tile(from_ptr, start, num, TILE).to(tl.float32)
            weight_V = tl.exp2((logits_V - top) * scale)
            is_above_PV = _ordered_key(logits_V)[None, :] > pivot_P[:, None]
            above_PV = tl.where(is_above_PV, above_PV + weight_V[None, :], above_PV)
        base += step * tl.sum((above + tl.sum(above_PV, 1) >= limit).to(tl.int64), 0)
        step = step // 16
    return base.to(tl.int32)


@triton.jit
def _mass_of_likeliest(from_ptr, num, threshold, count, highest, scale, TILE: tl.constexpr):
    """What the `count` likeliest weigh, of which the threshold is the last; of those that tie with it only so many."""
    above_V = tl.zeros([TILE], tl.float32)
    num_above_V, num_at_V = above_V, above_V
    for start in tl.range(0, num, TILE, loop_unroll_factor=4):
        logits_V = _tile(from_ptr, start, num, TILE).to(tl.float32)
        above_V += tl.where(logits_V > threshold, tl.exp2((logits_V - highest) * scale), 0.0)
        num_above_V += (logits_V > threshold).to(tl.float32)
        num_at_V += (logits_V == threshold).to(tl.float32)
    num_at = tl.minimum(tl.sum(num_at_V, 0), count - tl.sum(num_above_V, 0))
    return tl.sum(above_V, 0) + num_at * tl.exp2((threshold - highest) * scale)


@triton.jit
def _tile(from_ptr, start, num, TILE: tl.constexpr):
    """A tile of a row as it is; minus infinity past its end."""
    token_V = start + tl.arange(0, TILE)
    return tl.load(from_ptr + token_V, mask=token_V < num, other=_NEG_INF)


@triton.jit
def _ordered_key(x):
    """int32 in the order of the floats; equal floats have equal keys (adding zero makes one zero of two)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _as_float(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

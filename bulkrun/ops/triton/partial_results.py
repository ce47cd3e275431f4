"""Attention over parts of a context, one after the other in memory, and their merge by log-sum-exp, in order.

Contexts are cut at multiples of `CHUNK` positions, so a sequence's result does not depend on the rest of the batch. The
parts of all sequences lie behind each other, found by a prefix sum that the device makes once per step: room is needed
for the sum of the contexts, which the pool of KV blocks bounds, and not for the longest one times their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bulkrun.ops.triton.attention_tile import add_sink, first_seen, padded_dim
from bulkrun.windows import Window, kernel_window, most_seen

CHUNK = 512  # keys: partial results of 4 heads add about 2% to the bytes read
_MERGED_HEADS = 8  # per program: most sequences may have nothing to merge, and a program for each head costs then
_TILE = 1024  # sequences whose parts are counted at a time


@dataclass(frozen=True, slots=True)
class PartialResults:
    """Normalized attention over parts of contexts [P, H, V] and base-2 log-sum-exp [P, H], float32.

    A sequence's parts, in order: the chunks of its shared prefix, the last of which may be cut short, then the chunks
    behind it, the first of which may begin late (under a sliding window too). A sequence with one part has none here.
    """

    out: torch.Tensor
    lse: torch.Tensor
    starts_S: torch.Tensor  # int32: a sequence's first part; anything where no sequence has more than one
    max_parts: int  # of one sequence, a bound

    @classmethod
    def allocate(cls, out_SHV: torch.Tensor, num_parts: int, starts_S: torch.Tensor, max_parts: int) -> PartialResults:
        """Room for so many parts of such results in all, uninitialized."""
        num_heads, value_dim = out_SHV.shape[1:]
        new = out_SHV.new_empty
        out = new(num_parts, num_heads, value_dim, dtype=torch.float32)
        return cls(out, new(num_parts, num_heads, dtype=torch.float32), starts_S, max_parts)


def bytes_of_parts(num_keys: int, num_seqs: int, num_heads: int, value_dim: int) -> int:
    """What the parts of contexts take that have so many keys together, where each begins and ends within a chunk."""
    num_parts = num_keys // CHUNK + 2 * num_seqs
    return num_parts * num_heads * (value_dim + 1) * torch.float32.itemsize


def max_chunks(max_context_len: int, sliding_window: Window | None) -> int:
    """Chunks that any sequence can touch, at least one."""
    chunks = triton.cdiv(max_context_len, CHUNK)
    if sliding_window is not None:
        chunks = min(chunks, triton.cdiv(most_seen(sliding_window) - 1, CHUNK) + 1)
    return max(chunks, 1)


def part_starts(context_lens_S: torch.Tensor, chunks_per_seq: int, *, has_prefixes: bool) -> torch.Tensor:
    """Where each sequence's parts begin, int32 [S].

    Sequence s has room for min(cdiv(context, CHUNK), chunks_per_seq) parts, and for one more where shared prefixes may
    end within a chunk.
    """
    starts_S = torch.empty_like(context_lens_S)
    _part_starts_kernel[(1,)](
        context_lens_S,
        starts_S,
        context_lens_S.numel(),
        chunks_per_seq,
        CHUNK=CHUNK,
        EXTRA=int(has_prefixes),
        TILE=_TILE,
        num_warps=4,
    )
    return starts_S


def merge_parts(
    partial: PartialResults,
    context_lens_S: torch.Tensor,
    prefix_lens_S: torch.Tensor | None,
    out_THV: torch.Tensor,
    *,
    sliding_window: Window | None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Write the first rows of `out_THV`, one for each sequence that has more than one part; the others are left."""
    num_heads, head_dim = out_THV.shape[1:]
    _merge_kernel[(context_lens_S.numel(), triton.cdiv(num_heads, _MERGED_HEADS))](
        partial.out,
        partial.lse,
        partial.starts_S,
        context_lens_S,
        prefix_lens_S,
        sinks_H,
        out_THV,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        CHUNK=CHUNK,
        SLIDING_WINDOW=kernel_window(sliding_window),
        HAS_PREFIX=prefix_lens_S is not None,
        HAS_SINKS=sinks_H is not None,
        HEADS=_MERGED_HEADS,
        num_warps=4,
    )


@triton.jit
def parts_of(
    context_len, prefix_lens_ptr, seq, CHUNK: tl.constexpr, SLIDING_WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr
):
    """The first key that the last position sees and nobody else reads for it; parts before that key, and from it on.

    A context that is nothing but a shared prefix has one part of its own, without a key, or none.
    """
    first_key = context_len * 0
    num_shared = context_len * 0
    if SLIDING_WINDOW != 0:
        first_key = tl.maximum(first_seen(context_len - 1, SLIDING_WINDOW), 0)
    if HAS_PREFIX:
        first_key = tl.load(prefix_lens_ptr + seq)
        num_shared = tl.cdiv(first_key, CHUNK)
    return first_key, num_shared, tl.cdiv(context_len, CHUNK) - first_key // CHUNK


@triton.jit(do_not_specialize=["num_seqs", "chunks_per_seq"])
def _part_starts_kernel(
    context_lens_ptr,
    starts_ptr,
    num_seqs,
    chunks_per_seq,
    CHUNK: tl.constexpr,
    EXTRA: tl.constexpr,
    TILE: tl.constexpr,
):
    item_I = tl.arange(0, TILE)
    before = num_seqs * 0
    for first in range(0, num_seqs, TILE):
        seq_I = first + item_I
        context_len_I = tl.load(context_lens_ptr + seq_I, mask=seq_I < num_seqs, other=0)
        parts_I = tl.minimum(tl.cdiv(context_len_I, CHUNK), chunks_per_seq) + EXTRA
        tl.store(starts_ptr + seq_I, before + tl.cumsum(parts_I, 0) - parts_I, mask=seq_I < num_seqs)
        before += tl.sum(parts_I, 0)


@triton.jit
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    starts_ptr,
    context_lens_ptr,
    prefix_lens_ptr,
    sinks_ptr,
    out_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    _, num_shared, num_own = parts_of(context_len, prefix_lens_ptr, seq, CHUNK, SLIDING_WINDOW, HAS_PREFIX)
    if (num_shared == 0) & (num_own <= 1):
        return
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim_D = tl.arange(0, PADDED_DIM)
    is_real_ND = (head_N < NUM_HEADS)[:, None] & (dim_D < HEAD_DIM)[None, :]
    acc_ND = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    highest_N = tl.full([HEADS], float("-inf"), tl.float32)
    total_N = tl.zeros([HEADS], tl.float32)
    first_part = tl.load(starts_ptr + seq).to(tl.int64)
    for index in range(0, num_shared + num_own):
        row_N = (first_part + index) * NUM_HEADS + head_N
        lse_N = tl.load(lse_ptr + row_N, mask=head_N < NUM_HEADS, other=0.0)
        part_ND = tl.load(partial_ptr + row_N[:, None] * HEAD_DIM + dim_D[None, :], mask=is_real_ND, other=0.0)
        new_highest_N = tl.maximum(highest_N, lse_N)
        decay_N = tl.exp2(highest_N - new_highest_N)
        weight_N = tl.exp2(lse_N - new_highest_N)
        acc_ND = acc_ND * decay_N[:, None] + part_ND * weight_N[:, None]
        total_N = total_N * decay_N + weight_N
        highest_N = new_highest_N
    if HAS_SINKS:
        total_N = add_sink(total_N, highest_N, sinks_ptr, head_N, NUM_HEADS)
    out_ND = acc_ND / tl.where(total_N == 0.0, 1.0, total_N)[:, None]
    out_row_N = (seq * NUM_HEADS + head_N) * HEAD_DIM
    tl.store(out_ptr + out_row_N[:, None] + dim_D[None, :], out_ND, mask=is_real_ND)

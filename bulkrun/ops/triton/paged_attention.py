"""Attention over a paged KV cache in Triton: the contract of `ops.attention.paged_attention`, prefill and decode apart.

One kernel per problem: a kernel that branches between the two pipelines neither. Nothing here asks the device.
"""

from __future__ import annotations

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.triton import partial_results
from bulkrun.ops.triton.decode_attention import decode_attention
from bulkrun.ops.triton.partial_results import PartialResults, max_chunks, part_starts
from bulkrun.ops.triton.prefill_attention import prefill_attention
from bulkrun.ops.triton.shared_prefix import shared_prefix_attention
from bulkrun.windows import Chunks, Window

_MAX_CHUNKS = 2**14  # beside two per decode sequence: 32 query heads of 128 dimensions then take 256 MiB of results


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: Window | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; queries whose heads are not side by side are copied first."""
    if isinstance(sliding_window, Chunks) and meta.max_context_len <= sliding_window.size:
        sliding_window = None  # everybody is in the first chunk: tiles need no mask, and prefixes may be shared
    assert k_cache.is_contiguous() and v_cache.stride() == k_cache.stride() and meta.block_tables_SM.stride(1) == 1
    if q_THD.stride()[1:] != (q_THD.shape[2], 1):
        q_THD = q_THD.contiguous()
    num_decode, num_seqs = meta.num_decode_seqs, meta.context_lens_S.numel()
    out_THV = q_THD.new_empty(*q_THD.shape[:2], v_cache.shape[3])
    if meta.is_padded and q_THD.shape[0] > num_decode:
        out_THV.zero_()
    if num_decode:
        _attend_decode(
            q_THD, k_cache, v_cache, meta, out_THV,
            scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks_H=sinks_H,
        )  # fmt: skip
    if num_seqs > num_decode:
        prefill_attention(
            q_THD, k_cache, v_cache, meta, out_THV,
            scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks_H=sinks_H,
        )  # fmt: skip
    return out_THV


def _attend_decode(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out_THV: torch.Tensor,
    *,
    scale: float,
    sliding_window: Window | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
) -> None:
    """Decode sequences, all at once unless their contexts would make room for partial results too large."""
    shared = meta.shared_prefixes if sliding_window is None else None
    at_once = _seqs_at_once(meta, sliding_window)
    for first in range(0, meta.num_decode_seqs, at_once):
        some = slice(first, min(first + at_once, meta.num_decode_seqs))
        partial = _room_for_parts(out_THV, meta, some, sliding_window, has_prefixes=shared is not None)
        if shared is not None:
            shared_prefix_attention(
                q_THD,
                k_cache,
                v_cache,
                meta.block_tables_SM,
                shared,
                partial,
                first_seq=first,
                scale=scale,
                soft_cap=soft_cap,
            )
        decode_attention(
            q_THD[first:],
            k_cache,
            v_cache,
            meta.block_tables_SM[some],
            meta.context_lens_S[some],
            out_THV[first:],
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks_H=sinks_H,
            partial=partial,
            prefix_lens_S=None if shared is None else shared.prefix_lens_S[some],
        )


def _seqs_at_once(meta: AttentionMetadata, sliding_window: Window | None) -> int:
    """All of them, or so many that even contexts as long as the longest one's bound find room."""
    chunks_per_seq = max_chunks(meta.max_context_len, sliding_window)
    if _num_chunks(meta, meta.num_decode_seqs, chunks_per_seq) <= _MAX_CHUNKS + meta.num_decode_seqs:
        return meta.num_decode_seqs
    at_once = _MAX_CHUNKS // chunks_per_seq
    return max(at_once // 16 * 16, 1)  # addresses stay aligned, for which kernels are compiled


def _num_chunks(meta: AttentionMetadata, num_seqs: int, chunks_per_seq: int) -> int:
    """An upper bound on the chunks of `num_seqs` decode sequences."""
    if meta.max_decode_keys is None:
        return num_seqs * chunks_per_seq
    return min(num_seqs * chunks_per_seq, meta.max_decode_keys // partial_results.CHUNK + num_seqs)


def _room_for_parts(
    out_THV: torch.Tensor, meta: AttentionMetadata, some: slice, sliding_window: Window | None, *, has_prefixes: bool
) -> PartialResults:
    """Partial results of some of the decode sequences; where all of them are, the layers share one prefix sum."""
    num_seqs = some.stop - some.start
    chunks_per_seq = max_chunks(meta.max_context_len, sliding_window)
    max_parts = chunks_per_seq + has_prefixes
    starts_S = meta.plans.part_starts.get(sliding_window) if num_seqs == meta.num_decode_seqs else None
    if starts_S is None:
        starts_S = context_lens_S = meta.context_lens_S[some]
        if max_parts > 1:
            starts_S = part_starts(context_lens_S, chunks_per_seq, has_prefixes=has_prefixes)
    if num_seqs == meta.num_decode_seqs:
        meta.plans.part_starts[sliding_window] = starts_S
    num_parts = _num_chunks(meta, num_seqs, chunks_per_seq) + has_prefixes * num_seqs
    return PartialResults.allocate(out_THV, num_parts, starts_S, max_parts)

"""Attention over a paged KV cache in Triton: the contract of `bulkrun.ops.paged_attention`, prefill and decode apart.

One kernel per problem: a kernel that branches between the two pipelines neither. Nothing here asks the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bulkrun.ops.attention_metadata import AttentionMetadata
from bulkrun.ops.triton.decode_attention import PartialResults, decode_attention, max_chunks
from bulkrun.ops.triton.prefill_attention import prefill_attention
from bulkrun.ops.triton.shared_prefix import shared_prefix_attention

_MAX_CHUNKS = 2**14  # of all decode sequences: 32 query heads of 128 dimensions then take 256 MiB of partial results


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """As the reference; queries whose heads are not side by side are copied first."""
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and meta.block_tables_SM.stride(1) == 1
    if q_THD.stride()[1:] != (q_THD.shape[2], 1):
        q_THD = q_THD.contiguous()
    num_decode, num_seqs = meta.num_decode_seqs, meta.context_lens_S.numel()
    all_rows_written = q_THD.shape[0] == num_decode
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if not all_rows_written:
        out_THD.zero_()
    if num_decode:
        _attend_decode(
            q_THD, k_cache, v_cache, meta, out_THD, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
        )
    if num_seqs > num_decode:
        prefill_attention(
            q_THD, k_cache, v_cache, meta, out_THD, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
        )
    return out_THD


def _attend_decode(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out_THD: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """Decode sequences, all at once unless the longest context would make room for partial results too large.

    Then some at a time, and prefixes are read by each sequence for itself.
    """
    num_decode = meta.num_decode_seqs
    longest = meta.max_context_len if meta.max_decode_context_len is None else meta.max_decode_context_len
    num_chunks = max_chunks(longest, sliding_window)
    at_once = max(_MAX_CHUNKS // num_chunks, 1)
    if num_decode > at_once:
        at_once = max(at_once // 16 * 16, 1)  # addresses stay aligned, for which kernels are compiled
    shared = meta.shared_prefixes if sliding_window is None and num_decode <= at_once else None
    partial = PartialResults.allocate(q_THD[: min(num_decode, at_once)], num_chunks + (shared is not None))
    if shared is not None:
        shared_prefix_attention(
            q_THD, k_cache, v_cache, meta.block_tables_SM, shared, partial, scale=scale, soft_cap=soft_cap
        )
    for first in range(0, num_decode, at_once):
        last = min(first + at_once, num_decode)
        some = meta
        if first or last < num_decode:
            some = replace(
                meta,
                context_lens_S=meta.context_lens_S[first:last],
                block_tables_SM=meta.block_tables_SM[first:last],
                num_decode_seqs=last - first,
            )
        decode_attention(
            q_THD[first:],
            k_cache,
            v_cache,
            some,
            out_THD[first:],
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            partial=partial,
            prefix_lens_S=None if shared is None else shared.prefix_lens_S,
        )

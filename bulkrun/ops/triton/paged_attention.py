"""Attention over a paged KV cache in Triton: the contract of `bulkrun.ops.paged_attention`, prefill and decode apart.

One kernel per problem: a kernel that branches between the two pipelines neither. Nothing here asks the device.
"""

from __future__ import annotations

import torch

from bulkrun.ops.attention_metadata import AttentionMetadata
from bulkrun.ops.triton.decode_attention import PartialResults, decode_attention, max_chunks
from bulkrun.ops.triton.prefill_attention import prefill_attention
from bulkrun.ops.triton.shared_prefix import shared_prefix_attention


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
        shared = meta.shared_prefixes if sliding_window is None else None
        longest = meta.max_context_len if meta.max_decode_context_len is None else meta.max_decode_context_len
        num_parts = max_chunks(longest, sliding_window) + (shared is not None)
        partial = PartialResults.allocate(q_THD[:num_decode], num_parts)
        if shared is not None:
            shared_prefix_attention(
                q_THD, k_cache, v_cache, meta.block_tables_SM, shared, partial, scale=scale, soft_cap=soft_cap
            )
        decode_attention(
            q_THD,
            k_cache,
            v_cache,
            meta,
            out_THD,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            partial=partial,
            prefix_lens_S=None if shared is None else shared.prefix_lens_S,
        )
    if num_seqs > num_decode:
        prefill_attention(
            q_THD, k_cache, v_cache, meta, out_THD, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
        )
    return out_THD

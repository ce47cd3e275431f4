"""Attention in Triton with the same bits for a query however it comes: the contract of `ops.invariant_attention`.

Every token, decoded ones too, goes through the prefill kernel, with a mask on every tile. That is exact: a row meets
the tiles of keys from the first to the one of its own position, at the same absolute places and in the same order
whatever chunk it is in; a tile it does not see multiplies its sums by one and adds zero; the products of one row of a
tile do not depend on the others. What the normal path does for speed would not be: decoding by chunks that are merged,
a shared prefix read for many at once, and tiles without a mask, which the compiler may round otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.tile_workers import TileWorkers
from bulkrun.ops.triton.prefill_attention import prefill_attention
from bulkrun.windows import Window


def invariant_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: Window | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    workers: TileWorkers | None = None,
) -> torch.Tensor:
    """As the reference, without workers."""
    assert k_cache.is_contiguous() and v_cache.stride() == k_cache.stride() and meta.block_tables_SM.stride(1) == 1
    if q_THD.stride()[1:] != (q_THD.shape[2], 1):
        q_THD = q_THD.contiguous()
    out_THV = q_THD.new_zeros(*q_THD.shape[:2], v_cache.shape[3])
    prefill_attention(
        q_THD,
        k_cache,
        v_cache,
        replace(meta, num_decode_seqs=0),
        out_THV,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks_H=sinks_H,
        is_invariant=True,
    )
    return out_THV

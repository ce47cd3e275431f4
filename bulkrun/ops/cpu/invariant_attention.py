"""Attention with the same bits for a query however it comes, compiled. Contract: `ops.attention.invariant_attention`.

The compiled `paged_attention` is that already: its tiles of keys lie at fixed positions, every sum goes in order
whatever the number of rows, and one thread computes a row. Its threads take whole rows, so all of them may work.
"""

from __future__ import annotations

import torch

from bulkrun.ops.attention.invariant_attention import invariant_attention as reference
from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu import paged_attention as compiled
from bulkrun.ops.tile_workers import TileWorkers
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
    """As the reference, which takes what the compiled attention does not."""
    assert workers is not None, "only a GPU can do without"
    if not compiled.can_attend(q_THD, k_cache):
        return reference(
            q_THD, k_cache, v_cache, meta,
            scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks_H=sinks_H, workers=workers,
        )  # fmt: skip
    with workers.all_together():
        return compiled.paged_attention(
            q_THD, k_cache, v_cache, meta,
            scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks_H=sinks_H,
        )  # fmt: skip

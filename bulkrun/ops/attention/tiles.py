"""How attention is cut so that a query's arithmetic is always the same: fixed tiles of keys at absolute positions.

A unit is up to R rows (queries of one sequence x query heads of a key head); an item is a unit and one tile of L keys.
A token that is decoded, one in the middle of a chunk and one that is computed again after a preemption all go through
the same tiles of keys: those that a row does not see leave it exactly as it is. Knows lengths and slots, no numbers.
"""

from __future__ import annotations

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.attention.plans import AttentionTiles
from bulkrun.windows import Window, first_seen

TILE_ROWS = 32
TILE_KEYS = 128


def rows_per_unit(heads_per_kv_head: int) -> tuple[int, int]:
    """Queries and rows of a unit: TILE_ROWS rows, or as many more as one query has heads."""
    return max(TILE_ROWS // heads_per_kv_head, 1), max(-(-heads_per_kv_head // TILE_ROWS), 1) * TILE_ROWS


def make_attention_tiles(
    meta: AttentionMetadata,
    *,
    block_size: int,
    heads_per_kv_head: int,
    sliding_window: Window | None,
    dtype: torch.dtype,
) -> AttentionTiles:
    """The step's units and items. A query at position p sees the keys from `first_seen(p, sliding_window)` to p."""
    num_queries, num_rows = rows_per_unit(heads_per_kv_head)
    num_tokens = meta.slot_mapping_T.numel()
    start_S, context_S = meta.cu_seqlens_q[:-1].long(), meta.context_lens_S.long()
    len_S = meta.cu_seqlens_q[1:].long() - start_S
    seq_U, index_U = _repeated(-(-len_S // num_queries))
    first_U = index_U * num_queries  # of the unit's queries, in the chunk
    position_U = (context_S - len_S)[seq_U] + first_U
    last_U = torch.minimum(position_U + num_queries, context_S[seq_U]) - 1
    first_key_U = torch.zeros_like(last_U)
    if sliding_window is not None:
        first_key_U = first_seen(position_U, sliding_window).clamp_min_(0)
    count_U, order_U = (last_U // TILE_KEYS + 1 - first_key_U // TILE_KEYS).sort(descending=True, stable=True)
    seq_U, first_U, position_U, last_U, first_key_U = (
        own[order_U] for own in (seq_U, first_U, position_U, last_U, first_key_U)
    )

    query_UQ = first_U[:, None] + torch.arange(num_queries)
    token_UQ = start_S[seq_U][:, None] + query_UQ
    is_real_UQ = query_UQ < len_S[seq_U][:, None]
    unit_N, step_N, units_per_step = _items(count_U)
    key_NL = ((first_key_U[unit_N] // TILE_KEYS + step_N) * TILE_KEYS)[:, None] + torch.arange(TILE_KEYS)
    own_key_NL = key_NL.clamp(first_key_U[unit_N][:, None], last_U[unit_N][:, None])
    block_NL = meta.block_tables_SM.long()[seq_U[unit_N][:, None], own_key_NL // block_size]
    position_UR = position_U[:, None] + torch.arange(num_rows) // heads_per_kv_head
    return AttentionTiles(
        query_index=token_UQ.clamp_max(num_tokens - 1).flatten(),
        output_index=torch.where(is_real_UQ, token_UQ, num_tokens).flatten(),
        unit_N=unit_N,
        key_slots_NL=block_NL * block_size + own_key_NL % block_size,
        mask=_mask(key_NL, position_UR[unit_N], sliding_window, dtype),
        units_per_step=units_per_step,
        num_queries=num_queries,
        num_rows=num_rows,
    )


def _repeated(count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For `count` things each: the owner of every thing and which of its things it is."""
    owner = torch.repeat_interleave(torch.arange(count.numel()), count)
    return owner, torch.arange(owner.numel()) - (count.cumsum(0) - count)[owner]


def _items(count_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Unit and step of every item, all first items first; counts fall, so the units of a step are the first ones."""
    num_steps = int(count_U[0]) if count_U.numel() else 0
    units_per_step = [int((count_U > step).sum()) for step in range(num_steps)]
    step_N = torch.repeat_interleave(torch.arange(num_steps), torch.tensor(units_per_step, dtype=torch.int64))
    unit_N = torch.cat([torch.arange(count) for count in units_per_step]) if num_steps else step_N
    return unit_N, step_N, units_per_step


def _mask(
    key_NL: torch.Tensor, position_NR: torch.Tensor, sliding_window: Window | None, dtype: torch.dtype
) -> torch.Tensor:
    hidden_NRL = key_NL[:, None, :] > position_NR[:, :, None]
    if sliding_window is not None:
        hidden_NRL |= key_NL[:, None, :] < first_seen(position_NR, sliding_window)[:, :, None]
    # a finite number: a row that sees nothing of a tile gets a weight of exactly zero in the merge, and no NaN
    return hidden_NRL.to(dtype).mul_(torch.finfo(dtype).min)[:, None]

"""Attention over a paged KV cache in which a query's bits depend on its own sequence alone.

Not on the batch, on how its prompt was cut into chunks, on what was in the prefix cache or on whether it is decoded or
computed again: every query goes through the same fixed tiles of keys (`attention_tiles`), whose partial results are
merged by log-sum-exp in the order of the keys. Contract as `paged_attention`. This is the reference, which also runs on
a CPU without compiled ops; the Triton kernel takes every token through the prefill tiles.
"""

from __future__ import annotations

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.attention.paged_attention import are_in_keys
from bulkrun.ops.attention.plans import AttentionTiles
from bulkrun.ops.attention.tiles import TILE_KEYS, make_attention_tiles, rows_per_unit
from bulkrun.ops.matmul.fp8 import raw_bytes
from bulkrun.ops.tile_workers import TileWorkers
from bulkrun.windows import Window

_PIECE_BYTES = 2**21  # gathered keys and values that one thread works on: about what its cache holds


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
    """As `paged_attention`. `workers` share the tiles on a CPU; a GPU does not use them."""
    assert workers is not None, "only the kernel can do without"
    num_kv_heads = k_cache.shape[2]
    if sliding_window not in meta.plans.tiles:
        meta.plans.tiles[sliding_window] = make_attention_tiles(
            meta,
            block_size=k_cache.shape[1],
            heads_per_kv_head=q_THD.shape[1] // num_kv_heads,
            sliding_window=sliding_window,
            dtype=q_THD.dtype,
        )
    tiles, num_tokens = meta.plans.tiles[sliding_window], q_THD.shape[0]
    # one row more: padded queries write there
    out_THV = q_THD.new_zeros(num_tokens + 1, q_THD.shape[1], v_cache.shape[3])
    q_UKRD = _unit_queries(q_THD, tiles, num_kv_heads)
    part_NKRV = q_THD.new_empty(tiles.unit_N.numel(), *q_UKRD.shape[1:3], v_cache.shape[3])
    lse_NKR = torch.empty(part_NKRV.shape[:3])

    def attend(piece: slice) -> None:
        k_nKLD = _gather(k_cache, tiles, piece, q_THD.dtype)
        if are_in_keys(v_cache, k_cache):
            v_nKLV = k_nKLD[..., -v_cache.shape[3] :]
        else:
            v_nKLV = _gather(v_cache, tiles, piece, q_THD.dtype)
        part_NKRV[piece], lse_NKR[piece] = attend_tiles(
            q_UKRD[tiles.unit_N[piece]], k_nKLD, v_nKLV, tiles.mask[piece], scale, soft_cap
        )

    item_bytes = 2 * TILE_KEYS * k_cache[0, 0].numel() * q_THD.element_size()
    size = max(_PIECE_BYTES // item_bytes, 1)
    workers.run(attend, [slice(start, start + size) for start in range(0, tiles.unit_N.numel(), size)])
    out_UKRV, lse_UKR = _merge(part_NKRV, lse_NKR, tiles.units_per_step)
    if sinks_H is not None:
        out_UKRV = _after_sinks(out_UKRV, lse_UKR, sinks_H.view(num_kv_heads, -1))
    rows_XHV = _token_rows(out_UKRV, tiles, q_THD.shape[1] // num_kv_heads)
    out_THV.index_copy_(0, tiles.output_index, rows_XHV)
    return out_THV[:num_tokens]


def attend_tiles(
    q_nKRD: torch.Tensor,
    k_nKLD: torch.Tensor,
    v_nKLV: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of n items, each for itself: [n, K, R, V] in q's dtype and natural log-sum-exp float32 [n, K, R].

    torch's own kernel computes each (item, head) on one thread. It has no soft-cap and one head dim, so those are
    spelled out.
    """
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if soft_cap is None and flash is not None and k_nKLD.shape[3] == v_nKLV.shape[3]:
        out, lse = flash(q_nKRD, k_nKLD, v_nKLV, attn_mask=mask, scale=scale)
        return out, lse
    scores = (q_nKRD @ k_nKLD.transpose(-1, -2)).float().mul_(scale)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores = scores.add_(mask)
    lse_nKR = scores.logsumexp(-1)
    return scores.softmax(-1).to(q_nKRD.dtype) @ v_nKLV, lse_nKR


def is_invariant_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, soft_cap: float | None, dtype: torch.dtype
) -> bool:
    """Whether a row of an item gives the same bits at every place, beside any others and in any number of items.

    Tried with noise; call with one thread.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_items, num_rows = 7, rows_per_unit(num_heads // num_kv_heads)[1]
    q = noise(num_items, num_kv_heads, num_rows, head_dim)
    k, v = (noise(num_items, TILE_KEYS, num_kv_heads, dim).transpose(1, 2) for dim in (head_dim, value_dim))
    mask = _mask_of_rows(num_items, num_rows, dtype)
    out, lse = attend_tiles(q, k, v, mask, head_dim**-0.5, soft_cap)
    turned = attend_tiles(q.roll(5, 2), k, v, mask.roll(5, 2), head_dim**-0.5, soft_cap)
    alone = [
        attend_tiles(q[i:][:1], k[i:][:1], v[i:][:1], mask[i:][:1], head_dim**-0.5, soft_cap) for i in range(num_items)
    ]
    results = [(turned[0].roll(-5, 2), turned[1].roll(-5, 2)), tuple(map(torch.cat, zip(*alone, strict=True)))]
    return all(torch.equal(own, out) and torch.equal(own_lse, lse) for own, own_lse in results)


def _mask_of_rows(num_items: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Every row sees another number of keys."""
    ends = torch.arange(num_items * num_rows).view(num_items, num_rows) * 11 % TILE_KEYS
    return (torch.arange(TILE_KEYS) > ends[..., None]).to(dtype).mul_(torch.finfo(dtype).min)[:, None]


def _unit_queries(q_THD: torch.Tensor, tiles: AttentionTiles, num_kv_heads: int) -> torch.Tensor:
    """The units' rows [U, K, R, D]: (query, head of the group) in order, then zeros."""
    q_UQKGD = q_THD.index_select(0, tiles.query_index).view(
        tiles.num_units, tiles.num_queries, num_kv_heads, -1, q_THD.shape[2]
    )
    rows_UKrD = q_UQKGD.transpose(1, 2).flatten(2, 3)
    return torch.nn.functional.pad(rows_UKrD, (0, 0, 0, tiles.num_rows - rows_UKrD.shape[2])).contiguous()


def _gather(cache: torch.Tensor, tiles: AttentionTiles, piece: slice, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values of some items, as a strided view [n, K, L, D]."""
    slots_nL = tiles.key_slots_NL[piece]
    by_slot = raw_bytes(cache).view(-1, cache.shape[2] * cache.shape[3])
    rows = by_slot.index_select(0, slots_nL.flatten()).view(cache.dtype).to(dtype)
    return rows.view(*slots_nL.shape, *cache.shape[2:]).transpose(1, 2)


def _merge(
    part_NKRD: torch.Tensor, lse_NKR: torch.Tensor, units_per_step: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The units' results [U, K, R, D] and log-sum-exps [U, K, R], in order of the keys.

    A tile that a row does not see has the weight zero.
    """
    if len(units_per_step) < 2:
        return part_NKRD, lse_NKR
    num_units, more = units_per_step[0], units_per_step[1]
    out_UKRD = part_NKRD[:num_units]
    acc, highest = out_UKRD[:more].float(), lse_NKR[:more].clone()
    total, start = torch.ones_like(highest), num_units
    for count in units_per_step[1:]:
        part, lse = part_NKRD[start : start + count], lse_NKR[start : start + count]
        new_highest = torch.maximum(highest[:count], lse)
        decay, weight = (highest[:count] - new_highest).exp_(), (lse - new_highest).exp_()
        acc[:count] = acc[:count] * decay[..., None] + part * weight[..., None]
        total[:count] = total[:count] * decay + weight
        highest[:count] = new_highest
        start += count
    out_UKRD[:more] = acc / total[..., None]
    lse_UKR = lse_NKR[:num_units]
    lse_UKR[:more] = highest + total.log_()
    return out_UKRD, lse_UKR


def _after_sinks(out_UKRV: torch.Tensor, lse_UKR: torch.Tensor, sinks_KG: torch.Tensor) -> torch.Tensor:
    """What sinks leave of a softmax without them.

    Of whole units, whose rows fill vectors: torch computes what is left over at a tensor's end one by one, and rounds
    some of it otherwise.
    """
    num_rows, group = lse_UKR.shape[2], sinks_KG.shape[1]
    sinks_KR = sinks_KG.repeat(1, -(-num_rows // group))[:, :num_rows]
    share_UKR = (lse_UKR - sinks_KR).sigmoid_()
    return (out_UKRV.float() * share_UKR[..., None]).to(out_UKRV.dtype)


def _token_rows(out_UKRD: torch.Tensor, tiles: AttentionTiles, heads_per_kv_head: int) -> torch.Tensor:
    """[U * Q, H, D]: the padding of the rows left out."""
    own_UKrD = out_UKRD[:, :, : tiles.num_queries * heads_per_kv_head]
    return own_UKrD.unflatten(2, (tiles.num_queries, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

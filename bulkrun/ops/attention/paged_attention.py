"""Attention over a paged KV cache, for steps that mix decode tokens and prefill chunks.

The KV cache of a layer is two tensors [N, B, K, D]; token p of a sequence lies in block `block_tables[s, p // B]`
at offset `p % B`. Where values are the last dimensions of their keys (latent attention), they are one tensor and a view
of it, [N, B, K, V]. This is the contract and the pure-torch reference, which also runs where neither Triton nor a
compiled twin does: it works group by group (see `sequence_groups`), never sequence by sequence. Knows no model and no
scheduler.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.attention.plans import SequenceGroup
from bulkrun.ops.attention.sequence_groups import group_sequences
from bulkrun.ops.matmul.fp8 import FP8, raw_bytes, to_fp8
from bulkrun.windows import Window


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping_T: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot, in place, rounded to the cache's dtype (fp8 saturates).

    k_TKD, v_TKD: [T, K, D], any strides. k_cache, v_cache: [N, B, K, D] contiguous; without v_cache keys alone are
    written. slot_mapping_T: int64, block * B
    + offset; a negative slot is padding and goes to the null block, which no sequence reads.
    """
    slots_T = slot_mapping_T.clamp_min(0)
    for cache, x_TKD in ((k_cache, k_TKD), (v_cache, v_TKD)):
        if cache is None:
            continue
        stored_TKD = to_fp8(x_TKD) if cache.dtype == FP8 else x_TKD.to(cache.dtype)
        _by_slot(cache).index_copy_(0, slots_T, raw_bytes(stored_TKD).flatten(1))


def copy_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_copies: torch.Tensor) -> None:
    """Copy slots `kv_copies[0]` to slots `kv_copies[1]`, in place; int64 [2, C], no slot on both sides.

    k_cache, v_cache: [N, B, K, D] contiguous; or values that are in their keys, as of `paged_attention`.
    """
    for cache in (k_cache,) if are_in_keys(v_cache, k_cache) else (k_cache, v_cache):
        by_slot = _by_slot(cache)
        by_slot.index_copy_(0, kv_copies[1], by_slot.index_select(0, kv_copies[0]))


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
    """Causal attention of each query over its own sequence's keys in the cache; returns [T, H, V] in q's dtype.

    q_THD: [T, H, D], H a multiple of K; query head h reads key head h // (H / K). k_cache, v_cache: [N, B, K, D], with
    this step's tokens already stored; of another dtype than q (fp8) they are converted to q's before the products.
    v_cache may also be `k_cache[..., D - V:]`, of fewer dimensions; else V is D. A query at position p sees
    (p - sliding_window, p], with chunks [p - p % size, p], or [0, p] where it is None. Before the softmax a scaled
    score s becomes `soft_cap * tanh(s / soft_cap)`, unless soft_cap is None. sinks_H: float32, a score of each head
    that takes part in every softmax and has no value. Rows that belong to no sequence come out as zeros.
    """
    if sliding_window not in meta.plans.groups:
        meta.plans.groups[sliding_window] = group_sequences(
            meta,
            block_size=k_cache.shape[1],
            kv_bytes=2 * k_cache[0, 0].numel() * q_THD.element_size(),
            sliding_window=sliding_window,
            dtype=q_THD.dtype,
        )
    groups, num_tokens = meta.plans.groups[sliding_window], q_THD.shape[0]
    # one row more: padded queries write there
    out_THV = q_THD.new_zeros(num_tokens + 1, q_THD.shape[1], v_cache.shape[3])
    workspace = _workspace(groups, k_cache)
    for group in groups:
        attend = _attend_folded if _pays_to_fold(group, q_THD, k_cache) else _attend_by_head
        k_sKLD = _gather(k_cache, group, workspace[0]).to(q_THD.dtype)
        if are_in_keys(v_cache, k_cache):
            v_sKLV = k_sKLD[..., -v_cache.shape[3] :]
        else:
            v_sKLV = _gather(v_cache, group, workspace[1]).to(q_THD.dtype)
        out_THV.index_copy_(0, group.output_index, attend(q_THD, k_sKLD, v_sKLV, group, scale, soft_cap, sinks_H))
    return out_THV[:num_tokens]


def are_in_keys(v_cache: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether values are the last dimensions of their keys."""
    return v_cache.shape[3] < k_cache.shape[3]


def _by_slot(cache: torch.Tensor) -> torch.Tensor:
    return raw_bytes(cache).view(-1, cache.shape[2] * cache.shape[3])


def _workspace(groups: list[SequenceGroup], cache: torch.Tensor) -> torch.Tensor:
    """Room for the keys and the values of the largest group: one piece of memory that stays warm over the groups."""
    largest = max((group.key_slots.numel() for group in groups), default=0)
    return raw_bytes(cache).new_empty(2, largest, cache.shape[2] * cache.shape[3])


def _gather(cache: torch.Tensor, group: SequenceGroup, workspace: torch.Tensor) -> torch.Tensor:
    """The group's keys or values, copied into the workspace, as a strided view [s, K, L, D]."""
    rows = workspace[: group.key_slots.numel()]
    torch.index_select(_by_slot(cache), 0, group.key_slots, out=rows)
    return rows.view(cache.dtype).view(group.num_seqs, group.num_keys, *cache.shape[2:]).transpose(1, 2)


def _pays_to_fold(group: SequenceGroup, q_THD: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether one-query sequences go as matrices: in half precision, below 4 rows, torch is faster row by row."""
    heads_per_kv_head = q_THD.shape[1] // k_cache.shape[2]
    return group.num_queries == 1 and (q_THD.dtype == torch.float32 or heads_per_kv_head >= 4)


def _attend_folded(
    q_THD: torch.Tensor,
    k_sKLD: torch.Tensor,
    v_sKLV: torch.Tensor,
    group: SequenceGroup,
    scale: float,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """One query per sequence: the query heads of one key head become the rows of one matrix product."""
    num_heads, num_kv_heads = q_THD.shape[1], k_sKLD.shape[1]
    q_sKGD = q_THD.index_select(0, group.query_index).unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    mask = group.mask.expand(-1, -1, q_sKGD.shape[2], -1)
    sinks = None if sinks_H is None else sinks_H.view(num_kv_heads, 1, -1, 1)
    return _attend(q_sKGD, k_sKLD, v_sKLV, mask, scale, soft_cap, sinks).flatten(1, 2)


def _attend_by_head(
    q_THD: torch.Tensor,
    k_sKLD: torch.Tensor,
    v_sKLV: torch.Tensor,
    group: SequenceGroup,
    scale: float,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Q queries per sequence, padded; causality and windows are in the mask."""
    q_sHQD = q_THD.index_select(0, group.query_index).unflatten(0, (group.num_seqs, -1)).transpose(1, 2)
    sinks = None if sinks_H is None else sinks_H.view(k_sKLD.shape[1], -1, 1, 1)
    out_sHQD = _attend(q_sHQD, k_sKLD, v_sKLV, group.mask, scale, soft_cap, sinks)
    return out_sHQD.transpose(1, 2).flatten(0, 1)


def _attend(
    q_sHQD: torch.Tensor,
    k_sKLD: torch.Tensor,
    v_sKLV: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Dense attention [s, H, Q, V]; torch's own has no soft-cap and no sinks: those are spelled out, in float32.

    sinks: float32 [K, H / K, Q or 1, 1].
    """
    num_heads, num_kv_heads = q_sHQD.shape[1], k_sKLD.shape[1]
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q_sHQD, k_sKLD, v_sKLV, attn_mask=mask, scale=scale, enable_gqa=num_heads != num_kv_heads
        )
    q_sKGQD = q_sHQD.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    scores = (q_sKGQD @ k_sKLD.transpose(-1, -2).unsqueeze(2)).float().mul_(scale)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    weights = _weights(scores.add_(mask.unsqueeze(1)), sinks).to(q_sHQD.dtype)
    return (weights @ v_sKLV.unsqueeze(2)).flatten(1, 2)


def _weights(scores_sKGQL: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax over keys and, where there is one, the sink, which is then left out."""
    if sinks is None:
        return scores_sKGQL.softmax(-1)
    with_sink = torch.cat((scores_sKGQL, sinks.expand(*scores_sKGQL.shape[:-1], 1)), dim=-1)
    return with_sink.softmax(-1)[..., :-1]

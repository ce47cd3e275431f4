"""What happens to queries, keys and values between their projection and attention, in one op.

On a GPU it is one pass over the projection; the reference is the three ops it is made of. Knows no model.
"""

from __future__ import annotations

import torch

from bulkrun.ops.attention.paged_attention import store_kv
from bulkrun.ops.attention.rotary import apply_rotary
from bulkrun.ops.rms_norm import rms_norm


def norm_rotary_store(
    qkv_TND: torch.Tensor,
    qk_norm_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slot_mapping_T: torch.Tensor,
    *,
    keys_are_values: bool = False,
) -> torch.Tensor:
    """Normalize query and key heads, turn them by position, write keys and values; returns the queries [T, H, D].

    qkv_TND: [T, H + 2 K, D], contiguous heads: queries, keys, values. qk_norm_weight: [H + K, D], see `rms_norm`, or
    [H + 2 K, D] where values are normalized too; None: no normalization. cos, sin: [T, 1, R], see `apply_rotary`; None:
    positions turn nothing. k_cache, v_cache: [N, B, K, D] contiguous, written in place; None: there are queries alone,
    [T, H, D], whose keys others have written. v_cache alone None: there are no values beside keys, [T, H + K, D], as
    they are within keys. slot_mapping_T: int64, see `store_kv`. keys_are_values: there are no others in the projection,
    [T, H + K, D]; the cache gets keys as they came, or normalized as values.
    """
    num_kv_heads = 0 if k_cache is None else k_cache.shape[2]
    num_v_heads = 0 if v_cache is None else num_kv_heads
    if keys_are_values:
        qkv_TND = torch.cat((qkv_TND, qkv_TND[:, -num_kv_heads:]), dim=1)
    num_qk_heads = qkv_TND.shape[1] - num_v_heads
    num_q_heads = num_qk_heads - num_kv_heads
    if qk_norm_weight is not None:
        normed_TND = rms_norm(qkv_TND[:, : len(qk_norm_weight)], qk_norm_weight, eps)
        qkv_TND = torch.cat((normed_TND, qkv_TND[:, len(qk_norm_weight) :]), dim=1)
    qk_TND, v_TKD = qkv_TND[:, :num_qk_heads], qkv_TND[:, num_qk_heads:]
    if cos is not None and sin is not None:
        qk_TND = apply_rotary(qk_TND, cos, sin)
    if k_cache is not None:
        store_kv(qk_TND[:, num_q_heads:], v_TKD, k_cache, v_cache, slot_mapping_T)
    return qk_TND[:, :num_q_heads]

"""Attention in both directions over texts that lie behind one another: each token over the whole of its own text.

No cache: a text's keys and values are all there, in the order of its tokens. This is the contract and the pure-torch
reference. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F


class TextLens(NamedTuple):
    """Where the texts of T tokens lie: text s has the tokens from cu_seqlens[s] on to before cu_seqlens[s + 1]."""

    cu_seqlens: torch.Tensor  # int32 [S + 1], on the device
    lens: Sequence[int]  # the same as lengths, where nobody has to wait for the device

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device | str = "cpu") -> TextLens:
        """Texts of so many tokens each."""
        return cls(torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32), lens)


def packed_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    texts: TextLens,
    *,
    scale: float,
    sliding_window: int | None = None,
    distance_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each query over its text's keys; returns [T, H, D] in q's dtype.

    q_THD: [T, H, D], H a multiple of K; k_TKD, v_TKD: [T, K, D]; any strides. Query head h reads key head h // (H / K).
    sliding_window: a query at place p sees the keys at (p - sliding_window, p + sliding_window) alone. distance_bias:
    float32 [H, 2 M + 1], added to a scaled score by how far the key is behind the query, -M to M; texts have at most
    M + 1 tokens.
    """
    parts = zip(*(x.split(list(texts.lens)) for x in (q_THD, k_TKD, v_TKD)), strict=True)
    return torch.cat([_attend(q, k, v, scale, sliding_window, distance_bias) for q, k, v in parts])


def _attend(
    q_LHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    distance_bias: torch.Tensor | None,
) -> torch.Tensor:
    """One text: [L, H, D]."""
    num_tokens, num_heads, _ = q_LHD.shape
    places_L = torch.arange(num_tokens, device=q_LHD.device)
    behind_LL = places_L - places_L[:, None]
    mask = None
    if distance_bias is not None:
        mask = distance_bias[:, behind_LL + distance_bias.shape[1] // 2].to(q_LHD.dtype)
    if sliding_window is not None:
        hidden_LL = behind_LL.abs() >= sliding_window
        mask = (q_LHD.new_zeros(num_tokens, num_tokens) if mask is None else mask).masked_fill(hidden_LL, -torch.inf)
    q_HLD, k_KLD, v_KLD = (x.transpose(0, 1) for x in (q_LHD, k_LKD, v_LKD))
    has_groups = num_heads != k_LKD.shape[1]
    attended_HLD = F.scaled_dot_product_attention(
        q_HLD[None], k_KLD[None], v_KLD[None], attn_mask=mask, scale=scale, enable_gqa=has_groups
    )[0]
    return attended_HLD.transpose(0, 1)

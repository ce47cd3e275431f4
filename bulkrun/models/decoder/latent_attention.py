"""Latent attention over the paged cache (DeepSeek-V2, arXiv 2405.04434), which keeps one short row of a token.

Neither keys nor values of a token are ever made. A head's score of a latent is its query times the matrix that makes
keys of latents, so the query goes through that matrix first; and as values are sums of latents before they go through
theirs, what a head finds goes through it afterwards (the "absorbed" form of the paper). So to `ops.paged_attention` a
latent is the key and the value that all heads share, with the dimensions that RoPE has turned in front of it.
"""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.latent import LatentConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.attention import Rotary
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import RMSNorm
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata

_EPS = 1e-6  # of the norms within attention, whatever rms_norm_eps is


class LatentHeads(nn.Module):
    """Each head's matrices from a latent to its key and to its value, as one weight [H * (N + V), R].

    N, V are the dimensions of its key and its value, R those of a latent.
    """

    def __init__(self, num_heads: int, latent: LatentConfig) -> None:
        super().__init__()
        self.num_heads, self.key_dim = num_heads, latent.qk_nope_head_dim
        self.weight = empty_parameter(num_heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank)

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """To keys [H, N, R] and to values [H, V, R]."""
        weight_HAR = self.weight.data.unflatten(0, (self.num_heads, -1))
        return weight_HAR[:, : self.key_dim], weight_HAR[:, self.key_dim :]

    def queries_of_latents(self, q_THN: torch.Tensor) -> torch.Tensor:
        """Queries of keys [T, H, N] -> of latents [T, H, R]."""
        return torch.bmm(q_THN.transpose(0, 1), self.matrices[0]).transpose(0, 1)

    def values(self, latent_THR: torch.Tensor) -> torch.Tensor:
        """What heads find, as latents [T, H, R] -> as values [T, H, V]."""
        return torch.bmm(latent_THR.transpose(0, 1), self.matrices[1].transpose(1, 2)).transpose(0, 1)


class LatentAttention(nn.Module):
    """Self-attention of one layer, with the projections to queries and to latents fused."""

    def __init__(self, config: DecoderConfig, latent: LatentConfig, index: int) -> None:
        """`index`: of its latents among the cache's layers."""
        super().__init__()
        self.index, self.latent, self.num_heads = index, latent, config.num_heads
        self.scale = config.attention_scale
        num_queries = config.num_heads * latent.query_dim
        sizes = (latent.q_lora_rank or num_queries, latent.kv_lora_rank, latent.qk_rope_head_dim)
        self.qkv_proj, self._sizes = Linear(config.hidden_size, sum(sizes)), sizes
        self.q_norm = None if latent.q_lora_rank is None else RMSNorm(config, latent.q_lora_rank)
        self.q_b_proj = None if latent.q_lora_rank is None else Linear(latent.q_lora_rank, num_queries)
        self.latent_norm = RMSNorm(config, latent.kv_lora_rank)
        self.heads = LatentHeads(config.num_heads, latent)
        self.o_proj = Linear(config.num_heads * latent.v_head_dim, config.hidden_size)
        for norm in (self.q_norm, self.latent_norm):
            if norm is not None:
                norm.eps = _EPS
        self.paged_attention = ops.paged_attention  # `make_invariant` puts another op of its contract here

    def forward(
        self, x_TE: torch.Tensor, rotary: Rotary | None, kv_cache: KVCache, meta: AttentionMetadata
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's latents to the cache first."""
        k_cache, v_cache = kv_cache.k[self.index], kv_cache.v[self.index]
        qk_TND = self._queries_and_keys(x_TE)
        cos, sin, query_growth = rotary or (None, None, None)
        if query_growth is not None:
            qk_TND[:, : self.num_heads].mul_(query_growth)
        q_THD = ops.norm_rotary_store(qk_TND, None, 0.0, cos, sin, k_cache, None, meta.slot_mapping_T)
        if meta.kv_copies is not None:
            ops.copy_kv(k_cache, v_cache, meta.kv_copies)
        found_THR = self.paged_attention(q_THD, k_cache, v_cache, meta, scale=self.scale, sliding_window=None)
        return self.o_proj(self.heads.values(found_THR).flatten(1))

    def _queries_and_keys(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, H + 1, P + R]: of each head's query, and of the key of all, what RoPE turns and then what it does not."""
        latent, num_heads = self.latent, self.num_heads
        q_TA, latent_TR, turning_TP = self.qkv_proj(x_TE).split(self._sizes, dim=1)
        if self.q_norm is not None and self.q_b_proj is not None:
            q_TA = self.q_b_proj(self.q_norm(q_TA))
        q_THN, q_turning_THP = q_TA.unflatten(1, (num_heads, -1)).split(
            [latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=2
        )
        qk_TND = q_TA.new_empty(q_TA.shape[0], num_heads + 1, latent.key_dim)
        of_turning_TNP, of_latent_TNR = qk_TND.split([latent.qk_rope_head_dim, latent.kv_lora_rank], dim=2)
        of_turning_TNP[:, :num_heads], of_turning_TNP[:, num_heads] = q_turning_THP, turning_TP
        of_latent_TNR[:, :num_heads] = self.heads.queries_of_latents(q_THN)
        of_latent_TNR[:, num_heads] = self.latent_norm(latent_TR)
        return qk_TND

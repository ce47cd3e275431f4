"""Self-attention over the paged cache: the projections, norms and turns around `ops.paged_attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import CenteredQKNorm, HeadQKNorm, PlainQKNorm, ProjectionQKNorm, TurnedQKNorm
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class Rotary(NamedTuple):
    """One rotary embedding of a step's tokens, or what stands in its place in layers without."""

    cos: torch.Tensor | None  # [T, 1, R], see `ops.apply_rotary`; None: nothing turns
    sin: torch.Tensor | None
    query_growth: torch.Tensor | None = None  # what queries are multiplied by [T, 1, 1]; None: 1

    def of_tokens(self, indices: torch.Tensor) -> Rotary:
        """Of some of the tokens, int64 [S]."""
        return Rotary(*(None if part is None else part[indices] for part in self))


class Attention(nn.Module):
    """Self-attention over the paged cache of one layer, with fused QKV."""

    in_float32 = ("sinks",)

    def __init__(self, config: DecoderConfig, layer: int, index: int) -> None:
        """`index`: of its keys and values among the cache's."""
        super().__init__()
        kv = config.layers_kv[index]
        self.index, self.has_gate = index, config.gates_attention
        self.has_own_keys = kv.source == index
        are_values = config.keys_are_values is not None and config.keys_are_values[layer]
        self.keys_are_values = self.has_own_keys and are_values
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, kv.num_heads, kv.head_dim
        heads = config.num_heads * (2 if self.has_gate else 1) + self.num_own_heads
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.qkv_limit = config.qkv_limit
        self.sliding_window = config.sliding_windows[layer]
        self.sinks = empty_parameter(config.num_heads) if config.has_sinks else None
        self.qkv_proj = Linear(config.hidden_size, heads * kv.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * kv.head_dim, config.hidden_size, bias=config.o_bias)
        self.head_gates = Linear(config.hidden_size, config.num_heads) if config.gates_heads else None
        self.paged_attention = ops.paged_attention  # `make_invariant` puts another op of its contract here
        self.qk_norm = self._qk_norm(config, layer)

    @property
    def num_own_heads(self) -> int:
        """Heads of keys, and of values that are not the keys, which the projection has beside its queries."""
        return 0 if not self.has_own_keys else self.num_kv_heads if self.keys_are_values else 2 * self.num_kv_heads

    def _qk_norm(
        self, config: DecoderConfig, layer: int
    ) -> HeadQKNorm | TurnedQKNorm | CenteredQKNorm | PlainQKNorm | ProjectionQKNorm | None:
        if config.qk_norm == "head":
            num_kv_heads = self.num_kv_heads if self.has_own_keys else 0
            num_values = num_kv_heads if config.norms_values else 0
            return HeadQKNorm(config, self.num_heads + num_kv_heads, self.head_dim, num_values=num_values)
        if config.qk_norm == "turned_head":
            return TurnedQKNorm(config)
        if config.qk_norm == "centered_head":
            return CenteredQKNorm(config)
        if config.qk_norm == "plain_head":
            return None if config.ropes[layer] is None else PlainQKNorm(config)
        return ProjectionQKNorm(config) if config.qk_norm == "projection" else None

    def forward(
        self,
        x_TE: torch.Tensor,
        rotary: Rotary | None,
        kv_cache: KVCache,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the cache first, if they are its own."""
        k_cache, v_cache = kv_cache.k[self.index], kv_cache.v[self.index]
        qkv_TND = self.qkv_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        if self.qkv_limit is not None:
            qkv_TND = qkv_TND.clamp_(-self.qkv_limit, self.qkv_limit)
        gate_THD, qkv_TND = qkv_TND.tensor_split((self.num_heads if self.has_gate else 0,), dim=1)
        own_k, own_v = (k_cache, v_cache) if self.has_own_keys else (None, None)
        q_THD = self._store(qkv_TND, rotary, own_k, own_v, meta.slot_mapping_T)
        if self.has_own_keys and meta.kv_copies is not None:
            ops.copy_kv(k_cache, v_cache, meta.kv_copies)
        out_THD = self.paged_attention(
            q_THD, k_cache, v_cache, meta,
            scale=self.scale, sliding_window=self.sliding_window, soft_cap=self.soft_cap, sinks_H=self.sinks,
        )  # fmt: skip
        if self.has_gate:
            out_THD = out_THD * gate_THD.sigmoid()
        elif self.head_gates is not None:
            out_THD = out_THD * self.head_gates(x_TE).sigmoid().unsqueeze(-1)
        return self.o_proj(out_THD.flatten(1))

    def _store(
        self,
        qkv_TND: torch.Tensor,
        rotary: Rotary | None,
        k_cache: torch.Tensor | None,
        v_cache: torch.Tensor | None,
        slot_mapping_T: torch.Tensor,
    ) -> torch.Tensor:
        """Normalize queries and keys, turn them by position, write keys and values; the queries [T, H, D].

        Without caches there are queries alone.
        """
        qk_norm_weight: torch.Tensor | None = None
        eps = 0.0
        if isinstance(self.qk_norm, HeadQKNorm):
            qk_norm_weight, eps = self.qk_norm.weight_ND, self.qk_norm.eps
        elif isinstance(self.qk_norm, TurnedQKNorm):
            qk_norm_weight, eps = self.qk_norm.ones_ND, self.qk_norm.eps
        elif isinstance(self.qk_norm, PlainQKNorm):
            qk_norm_weight, eps = self.qk_norm.ones_ND(qkv_TND), self.qk_norm.eps
        elif self.qk_norm is not None:
            qk_TND = qkv_TND[:, : self.num_heads + self.num_kv_heads]
            qk_TND.copy_(self.qk_norm(qk_TND))
        cos, sin, query_growth = rotary or (None, None, None)
        if query_growth is not None:
            qkv_TND[:, : self.num_heads].mul_(query_growth)
        q_THD = ops.norm_rotary_store(
            qkv_TND, qk_norm_weight, eps, cos, sin, k_cache, v_cache, slot_mapping_T,
            keys_are_values=self.keys_are_values,
        )  # fmt: skip
        return self.qk_norm.scale_queries(q_THD) if isinstance(self.qk_norm, TurnedQKNorm) else q_THD

"""One layer of the decoder: attention over the paged cache and an MLP, with norms where the family has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.delta_net import DeltaNetConfig
from bulkrun.models.config.mamba2 import Mamba2Config
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.config.short_conv import ShortConvConfig
from bulkrun.models.decoder.gated_delta_net import GatedDeltaNet
from bulkrun.models.decoder.layers import (
    MLP,
    HeadQKNorm,
    Linear,
    NoNorm,
    PlainMLP,
    ProjectionQKNorm,
    RMSNorm,
    Scale,
    SparseMLP,
    TurnedQKNorm,
    dense_mlp,
    empty_parameter,
)
from bulkrun.models.decoder.mamba2 import Mamba2
from bulkrun.models.decoder.short_conv import ShortConv
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class Rotary(NamedTuple):
    """One rotary embedding of a step's tokens."""

    cos: torch.Tensor  # [T, 1, R], see `ops.apply_rotary`
    sin: torch.Tensor
    query_growth: torch.Tensor | None = None  # what queries are multiplied by [T, 1, 1]; None: 1


def attend(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None = None,
    paged_attention: Callable[..., torch.Tensor] = ops.paged_attention,
) -> torch.Tensor:
    """Attend over a layer's cache, this step's keys and values included; returns [T, H, D]."""
    if meta.kv_copies is not None:
        ops.copy_kv(k_cache, v_cache, meta.kv_copies)
    return paged_attention(
        q_THD, k_cache, v_cache, meta, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks_H=sinks_H
    )


class Attention(nn.Module):
    """Self-attention over the paged cache of one layer, with fused QKV."""

    in_float32 = ("sinks",)

    def __init__(self, config: DecoderConfig, layer: int, index: int) -> None:
        """`index`: of its keys and values among the cache's."""
        super().__init__()
        self.index, self.has_gate = index, config.gates_attention
        heads = config.num_heads * (2 if self.has_gate else 1) + 2 * config.num_kv_heads
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.sliding_window = config.sliding_windows[layer]
        self.sinks = empty_parameter(config.num_heads) if config.has_sinks else None
        self.qkv_proj = Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.head_gates = Linear(config.hidden_size, config.num_heads) if config.gates_heads else None
        self.paged_attention = ops.paged_attention  # `make_invariant` puts another op of its contract here
        self.qk_norm = _QK_NORMS[config.qk_norm](config) if config.qk_norm != "none" else None

    def forward(
        self,
        x_TE: torch.Tensor,
        rotary: Rotary | None,
        kv_cache: KVCache,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the cache first."""
        k_cache, v_cache = kv_cache.k[self.index], kv_cache.v[self.index]
        qkv_TND = self.qkv_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        gate_THD, qkv_TND = qkv_TND.tensor_split((self.num_heads if self.has_gate else 0,), dim=1)
        q_THD = self._store(qkv_TND, rotary, k_cache, v_cache, meta.slot_mapping_T)
        out_THD = attend(
            q_THD, k_cache, v_cache, meta,
            scale=self.scale, sliding_window=self.sliding_window, soft_cap=self.soft_cap, sinks_H=self.sinks,
            paged_attention=self.paged_attention,
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
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping_T: torch.Tensor,
    ) -> torch.Tensor:
        """Normalize queries and keys, turn them by position, write keys and values; the queries [T, H, D]."""
        qk_norm_weight: torch.Tensor | None = None
        eps = 0.0
        if isinstance(self.qk_norm, HeadQKNorm):
            qk_norm_weight, eps = self.qk_norm.weight, self.qk_norm.eps
        elif isinstance(self.qk_norm, TurnedQKNorm):
            qk_norm_weight, eps = self.qk_norm.ones_ND, self.qk_norm.eps
        elif self.qk_norm is not None:
            qk_TND = qkv_TND[:, : self.num_heads + self.num_kv_heads]
            qk_TND.copy_(self.qk_norm(qk_TND))
        cos, sin, query_growth = rotary or (None, None, None)
        if query_growth is not None:
            qkv_TND[:, : self.num_heads].mul_(query_growth)
        q_THD = ops.norm_rotary_store(qkv_TND, qk_norm_weight, eps, cos, sin, k_cache, v_cache, slot_mapping_T)
        return self.qk_norm.scale_queries(q_THD) if isinstance(self.qk_norm, TurnedQKNorm) else q_THD


class AttentionBesideMamba2(nn.Module):
    """Both look at the same hidden states, and what they find is added up (Falcon-H1)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        assert config.multipliers is not None, "the family that has this has them"
        self.attention, self.mamba = Attention(config, layer, layer), Mamba2(config, layer)
        self.attention_out, self.state_out = config.multipliers.attention_out, config.multipliers.state_out

    def forward(
        self, x_TE: torch.Tensor, rotary: Rotary | None, kv_cache: KVCache, meta: AttentionMetadata
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values, and brings states up to its last tokens."""
        attended_TE = self.attention(x_TE, rotary, kv_cache, meta)
        return attended_TE.mul_(self.attention_out).add_(self.mamba(x_TE, None, kv_cache, meta), alpha=self.state_out)


class Block(NamedTuple):
    """One of the blocks around the residual stream: what it adds is `out(module(norm(residual)))`."""

    norm: RMSNorm | NoNorm
    module: nn.Module  # called with hidden states, its rotary embedding, the KV cache and the metadata of the step
    out: RMSNorm | NoNorm | Scale
    rope: RopeConfig | None = None
    looks_back: bool = False  # at earlier tokens: none of a step's tokens may be left out before it


class DecoderLayer(nn.Module):
    """Attention, or what stands in its place, and MLP around one residual stream; some families have one of both."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        has_norm_before, has_norm_after = config.norms != "post", config.norms != "pre"

        def norm_before() -> RMSNorm | NoNorm:
            return RMSNorm(config, config.hidden_size) if has_norm_before else NoNorm()

        def norm_after() -> RMSNorm | NoNorm | Scale:
            return RMSNorm(config, config.hidden_size) if has_norm_after else _plain_out(config)

        self.rope = config.ropes[layer]
        has_attention, has_mlp = config.mlp_alone is None or not config.mlp_alone[layer], config.mlp_alone is None
        self.attention = _attention(config, layer) if has_attention else None
        if has_attention:
            self.input_norm, self.attention_out = norm_before(), norm_after()
        self.mlp = _mlp(config, layer) if has_mlp or not has_attention else None
        if self.mlp is not None:
            self.mlp_norm, self.mlp_out = norm_before(), norm_after()
            if config.multipliers is not None:
                self.mlp_out = Scale(config.multipliers.mlp_out)

    def blocks(self) -> Iterator[Block]:
        """Those that it has, in their order."""
        if self.attention is not None:
            yield Block(self.input_norm, self.attention, self.attention_out, self.rope, looks_back=True)
        if self.mlp is not None:
            yield Block(self.mlp_norm, self.mlp, self.mlp_out)


def _attention(
    config: DecoderConfig, layer: int
) -> Attention | AttentionBesideMamba2 | GatedDeltaNet | Mamba2 | ShortConv:
    """Attention, or what a layer that keeps a state has in its place or beside it."""
    if config.attends_beside_states:
        return AttentionBesideMamba2(config, layer)
    if config.attends[layer]:
        return Attention(config, layer, sum(config.attends[:layer]))
    kind = config.recurrence
    assert kind is not None, "what does not attend has an MLP alone or keeps a state"
    return _WITH_STATE[type(kind)](config, sum(kind.layers[:layer]))


def _mlp(config: DecoderConfig, layer: int) -> MLP | PlainMLP | SparseMLP:
    is_sparse = config.moe is not None and config.moe.sparse_layers[layer]
    return SparseMLP(config) if is_sparse else dense_mlp(config)


_QK_NORMS: Mapping[str, type[HeadQKNorm | TurnedQKNorm | ProjectionQKNorm]] = {
    "head": HeadQKNorm,
    "turned_head": TurnedQKNorm,
    "projection": ProjectionQKNorm,
}
_WITH_STATE: Mapping[type, type[GatedDeltaNet | Mamba2 | ShortConv]] = {
    DeltaNetConfig: GatedDeltaNet,
    Mamba2Config: Mamba2,
    ShortConvConfig: ShortConv,
}


def _plain_out(config: DecoderConfig) -> NoNorm | Scale:
    return NoNorm() if config.residual_multiplier == 1.0 else Scale(config.residual_multiplier)

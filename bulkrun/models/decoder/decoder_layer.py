"""One layer of the decoder: attention over the paged cache and an MLP, with norms where the family has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.gated_delta_net import GatedDeltaNet
from bulkrun.models.decoder.layers import (
    MLP,
    HeadQKNorm,
    Linear,
    NoNorm,
    ProjectionQKNorm,
    RMSNorm,
    Scale,
    SparseMLP,
    empty_parameter,
)
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the step's tokens


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

    def __init__(self, config: DecoderConfig, layer: int, index: int) -> None:
        """`index`: of its keys and values among the cache's."""
        super().__init__()
        self.index, self.has_gate = index, config.gates_attention
        heads = config.num_heads * (2 if self.has_gate else 1) + 2 * config.num_kv_heads
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.sliding_window = config.sliding_windows[layer]
        self.sinks = empty_parameter(config.num_heads) if config.has_sinks else None  # float32 whatever the model is
        self.qkv_proj = Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.paged_attention = ops.paged_attention  # `make_invariant` puts another op of its contract here
        self.qk_norm: HeadQKNorm | ProjectionQKNorm | None = None
        if config.qk_norm != "none":
            self.qk_norm = HeadQKNorm(config) if config.qk_norm == "head" else ProjectionQKNorm(config)

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
        qk_norm_weight, eps = None, 0.0
        if isinstance(self.qk_norm, HeadQKNorm):
            qk_norm_weight, eps = self.qk_norm.weight, self.qk_norm.eps
        elif self.qk_norm is not None:
            qk_TND = qkv_TND[:, : self.num_heads + self.num_kv_heads]
            qk_TND.copy_(self.qk_norm(qk_TND))
        cos, sin = rotary or (None, None)
        q_THD = ops.norm_rotary_store(qkv_TND, qk_norm_weight, eps, cos, sin, k_cache, v_cache, meta.slot_mapping_T)
        out_THD = attend(
            q_THD, k_cache, v_cache, meta,
            scale=self.scale, sliding_window=self.sliding_window, soft_cap=self.soft_cap, sinks_H=self.sinks,
            paged_attention=self.paged_attention,
        )  # fmt: skip
        if self.has_gate:
            out_THD = out_THD * gate_THD.sigmoid()
        return self.o_proj(out_THD.flatten(1))


class DecoderLayer(nn.Module):
    """Attention, or what stands in its place, and MLP around one residual stream; what each adds passes its `_out`."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        linear_layers = (False,) * config.num_layers if config.delta_net is None else config.delta_net.layers
        index = linear_layers[:layer].count(linear_layers[layer])  # among those of its kind
        has_norm_before, has_norm_after = config.norms != "post", config.norms != "pre"
        self.input_norm = RMSNorm(config, config.hidden_size) if has_norm_before else NoNorm()
        is_linear = linear_layers[layer]
        self.attention = GatedDeltaNet(config, index) if is_linear else Attention(config, layer, index)
        self.attention_out = RMSNorm(config, config.hidden_size) if has_norm_after else _plain_out(config)
        self.mlp_norm = RMSNorm(config, config.hidden_size) if has_norm_before else NoNorm()
        is_sparse = config.moe is not None and config.moe.sparse_layers[layer]
        self.mlp = SparseMLP(config) if is_sparse else MLP(config)
        self.mlp_out = RMSNorm(config, config.hidden_size) if has_norm_after else _plain_out(config)


def _plain_out(config: DecoderConfig) -> NoNorm | Scale:
    return NoNorm() if config.residual_multiplier == 1.0 else Scale(config.residual_multiplier)

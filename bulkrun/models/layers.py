"""The parts of a decoder layer: weights and the ops they go through. Inference only; shapes as in `ops`."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config import ModelConfig
from bulkrun.ops import AttentionMetadata


def empty_parameter(*shape: int) -> nn.Parameter:
    """An uninitialized parameter without gradient; the loader fills it."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """A weight [O, I] and perhaps a bias [O]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        return ops.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the weight out for this device's fastest product; it can only be multiplied with afterwards."""
        self.weight = nn.Parameter(ops.pack_linear_weight(self.weight.data), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a weight [E]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize x + residual; returns (normed, new residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Self-attention over the paged cache of one layer, with fused QKV."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads = config.num_heads + 2 * config.num_kv_heads
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer]
        self.eps = config.rms_norm_eps
        self.qkv_proj = Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        # one row per query and key head, so that one normalization serves both
        norm_heads = config.num_heads + config.num_kv_heads
        self.qk_norm_weight = empty_parameter(norm_heads, config.head_dim) if config.qk_norm else None

    def forward(
        self,
        x_TE: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the cache first."""
        qkv_TND = self.qkv_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        qk_TND, v_TKD = qkv_TND.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.qk_norm_weight is not None:
            qk_TND = ops.rms_norm(qk_TND, self.qk_norm_weight, self.eps)
        qk_TND = ops.apply_rotary(qk_TND, cos, sin)
        q_THD, k_TKD = qk_TND.split((self.num_heads, self.num_kv_heads), dim=1)
        ops.store_kv(k_TKD, v_TKD, k_cache, v_cache, meta.slot_mapping_T)
        if meta.kv_copies is not None:
            ops.copy_kv(k_cache, v_cache, meta.kv_copies)
        out_THD = ops.paged_attention(
            q_THD, k_cache, v_cache, meta, scale=self.scale, sliding_window=self.sliding_window
        )
        return self.o_proj(out_THD.flatten(1))


class MLP(nn.Module):
    """The gated MLP, with fused gate and up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self.down_proj(ops.silu_mul(self.gate_up_proj(x_TE)))


class DecoderLayer(nn.Module):
    """Attention and MLP around one residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

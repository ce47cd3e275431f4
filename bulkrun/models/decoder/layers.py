"""The small parts of a decoder: weights and the ops they go through. Inference only; shapes as in `ops`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun import ops
from bulkrun.models.config.experts import MoEConfig
from bulkrun.models.config.model_config import DecoderConfig


def empty_parameter(*shape: int) -> nn.Parameter:
    """An uninitialized parameter without gradient; the loader fills it."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """A weight [O, I] and perhaps a bias [O]. `rows_dtype`: of what is multiplied, where it is not the weight's own."""

    rows_dtype: torch.dtype | None = None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self.is_tied = False  # the embedding reads the weight as it is
        self.in_float32: tuple[str, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        return ops.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the weight out for this device's fastest product; it can only be multiplied with afterwards."""
        packed = ops.pack_linear_weight(self.weight.data, self.rows_dtype, in_place=not self.is_tied)
        self.weight = nn.Parameter(packed, requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a weight [E], or one per head [N, E]."""

    def __init__(self, config: DecoderConfig, *shape: int) -> None:
        super().__init__()
        self.weight = empty_parameter(*shape)
        self.eps = config.rms_norm_eps
        self.in_float32 = ("weight",) if config.norm_rounds_once else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize x + residual, times the `scale` [1] if there is one; returns (normed, new residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, scale)


class LayerNorm(nn.Module):
    """Normalization of what is left without the mean, with a weight [E] and no bias (Cohere)."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__()
        self.weight, self.eps = empty_parameter(size), config.rms_norm_eps

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return F.layer_norm(x_TE, self.weight.shape, self.weight, None, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize x + residual; returns (normed, new residual)."""
        assert scale is None, "no family with such norms scales its layers"
        residual = x + residual
        return self(residual), residual


class NoNorm(nn.Module):
    """Stands where a family has no norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as it is."""
        return x

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + residual, the same tensor)."""
        residual = x + residual if scale is None else (x + residual) * scale
        return residual, residual


class NormOfBefore:
    """Of an MLP beside attention: what attention took, where the residual stream has what that found by now."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]."""
        normed: torch.Tensor = self.norm(x)
        return normed

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the residual stream normalized as it was, x + residual)."""
        assert scale is None, "layers are scaled behind their last block, and attention is none"
        return self(residual), x + residual


class Scale(nn.Module):
    """What a block adds to the residual stream, times a constant (Granite)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return x * self.factor


class GatedRMSNorm(nn.Module):
    """Each head or group normalized by itself, with one weight [V] for all or one for each [H, V], and a gate."""

    def __init__(self, eps: float, *shape: int, norm_before_gate: bool = True, silu: bool = True) -> None:
        """`norm_before_gate`: the gate is applied to what is normalized; else what it was applied to is normalized.

        `silu`: what a gate becomes; else its sigmoid.
        """
        super().__init__()
        self.weight, self.eps = empty_parameter(*shape), eps
        self.norm_before_gate, self.silu = norm_before_gate, silu

    def forward(self, x_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        """Both [T, H, V] -> [T, H, V]."""
        return ops.gated_rms_norm(
            x_THV, gate_THV, self.weight, self.eps, norm_before_gate=self.norm_before_gate, silu=self.silu
        )


class HeadQKNorm(RMSNorm):
    """Each query and key head normalized by itself: one row of the weight per head, so that one op serves both.

    So are the heads of so many values, where a model has that, as they are.
    """

    def __init__(self, config: DecoderConfig, num_heads: int, head_dim: int, *, num_values: int = 0) -> None:
        super().__init__(config, num_heads, head_dim)
        self._num_values = num_values
        self._with_values: torch.Tensor | None = None

    @property
    def weight_ND(self) -> torch.Tensor:
        """One row for each head that is normalized."""
        if not self._num_values:
            return self.weight
        if self._with_values is None:
            self._with_values = torch.cat((self.weight, self.weight.new_ones(self._num_values, self.weight.shape[1])))
        return self._with_values


class TurnedQKNorm(RMSNorm):
    """Each query and key head normalized behind RoPE (Hunyuan): one weight [D] for all queries, one for all keys.

    RoPE leaves a head's length as it is, so it may be divided by before, as for the other families; and as scores are
    products of queries and keys, what both are multiplied by afterwards is multiplied to queries alone.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, 2, config.head_dim)
        self._num_heads = config.num_heads + config.num_kv_heads
        self._ones_ND: torch.Tensor | None = None

    @property
    def ones_ND(self) -> torch.Tensor:
        """The weight before RoPE, of each query and key head."""
        if self._ones_ND is None:
            self._ones_ND = torch.ones_like(self.weight[0]).repeat(self._num_heads, 1)
        return self._ones_ND

    def scale_queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        """What is left of both weights behind RoPE, [T, H, D] -> the same."""
        return q_THD * (self.weight[0] * self.weight[1])


class CenteredQKNorm(nn.Module):
    """Each query and key head normalized without its mean, with a weight of its own [D] (Command R+)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = empty_parameter(config.num_heads + config.num_kv_heads, config.head_dim)
        self.eps = config.rms_norm_eps

    def forward(self, qk_TND: torch.Tensor) -> torch.Tensor:
        """[T, H + K, D] -> the same."""
        normed_TND = F.layer_norm(qk_TND.float(), qk_TND.shape[-1:], eps=self.eps)
        return (normed_TND * self.weight.float()).to(qk_TND.dtype)


class ProjectionQKNorm(nn.Module):
    """All query heads normalized as one vector, all key heads as another (OLMo 2)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q = RMSNorm(config, config.num_heads * config.head_dim)
        self.k = RMSNorm(config, config.num_kv_heads * config.head_dim)

    def forward(self, qk_TND: torch.Tensor) -> torch.Tensor:
        """[T, H + K, D] -> the same."""
        q_TA, k_TA = qk_TND[:, : self.num_heads].flatten(1), qk_TND[:, self.num_heads :].flatten(1)
        return torch.cat((self.q(q_TA), self.k(k_TA)), dim=1).view(qk_TND.shape)


class MLP(nn.Module):
    """The gated MLP, with fused gate and up."""

    def __init__(self, config: DecoderConfig, size: int | None = None) -> None:
        """`size`: its width, if that is not the config's."""
        super().__init__()
        self.size = size = size or config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.gate = ops.silu_mul if config.activation == "silu" else ops.gelu_mul
        self.gate_multiplier = 1.0 if config.multipliers is None else config.multipliers.mlp_gate

    def forward(self, x_TE: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] -> [T, E]; what the step says of sequences plays no role."""
        gate_up_TI = self.gate_up_proj(x_TE)
        if self.gate_multiplier != 1.0:
            gate_up_TI[:, : self.size].mul_(self.gate_multiplier)
        return self.down_proj(self.gate(gate_up_TI))


class PlainMLP(nn.Module):
    """An MLP without gates (Nemotron, Apertus)."""

    in_float32 = ("alphas",)

    def __init__(self, config: DecoderConfig, size: int | None = None) -> None:
        """`size`: its width, if that is not the config's."""
        super().__init__()
        self.size = size = size or config.intermediate_size
        self.up_proj = Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.alphas = empty_parameter(2) if config.activation == "xielu" else None  # of `ops.xielu`

    def forward(self, x_TE: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] -> [T, E]; what the step says of sequences plays no role."""
        up_TI = self.up_proj(x_TE)
        return self.down_proj(ops.relu_squared(up_TI) if self.alphas is None else ops.xielu(up_TI, self.alphas))


def norm_of(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """The family's kind, of hidden states."""
    return LayerNorm(config, config.hidden_size) if config.are_centered else RMSNorm(config, config.hidden_size)


def dense_mlp(config: DecoderConfig, size: int | None = None) -> MLP | PlainMLP:
    """The family's kind."""
    return MLP(config, size) if config.has_mlp_gates else PlainMLP(config, size)


class ExpertLinear(nn.Module):
    """A weight of all experts [X, O, I] and perhaps a bias [X, O]: one of both that a mixture has. `rows_dtype`: as of
    a `Linear`."""

    rows_dtype: torch.dtype | None = None

    def __init__(self, config: DecoderConfig, moe: MoEConfig, in_features: int, out_features: int) -> None:
        super().__init__()
        # both weights can be packed, or none
        self.mlp_sizes = ops.ExpertSizes(config.hidden_size, moe.intermediate_size, config.has_mlp_gates)
        self.weight = empty_parameter(moe.num_experts, out_features, in_features)
        self.bias = empty_parameter(moe.num_experts, out_features) if moe.has_biases else None

    @property
    def experts(self) -> ops.ExpertWeights:
        """What `ops.fused_experts` takes."""
        return self.weight.data

    def pack(self) -> None:
        """Lay the weight out for this device's fastest product; it can only be multiplied with afterwards."""
        packed = ops.pack_experts(self.weight.data, self.mlp_sizes, self.rows_dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)

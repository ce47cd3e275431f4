"""The norms of a decoder: of the residual stream, of what blocks find, of heads. Inference only; shapes as in `ops`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun import ops
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import empty_parameter


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
    """Normalization of what is left without the mean, with a weight [E] and perhaps a bias [E]."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size) if config.norm_biases else None
        self.eps = config.rms_norm_eps

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return F.layer_norm(x_TE, self.weight.shape, self.weight, self.bias, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize x + residual; returns (normed, new residual)."""
        assert scale is None, "no family with such norms scales its layers"
        residual = x + residual
        return self(residual), residual


class PlainNorm(nn.Module):
    """Root-mean-square normalization without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return F.rms_norm(x_TE.float(), x_TE.shape[-1:], eps=self.eps).to(x_TE.dtype)


class NoNorm(nn.Module):
    """Stands where a family has no norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as it is."""
        return x

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + residual, the same tensor)."""
        assert scale is None, "layers are scaled behind their last block, and a norm follows it"
        residual = x + residual
        return residual, residual


class NormOfBefore:
    """Of an MLP beside attention: of the residual stream as it was, which has what attention found by now."""

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


class PlainQKNorm(nn.Module):
    """Each query and key head normalized by itself, without a weight (Llama 4).

    It does so behind RoPE, which leaves a head's length as it is: so it may be done before, as for the other families.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._num_heads, self.eps = config.num_heads + config.num_kv_heads, config.rms_norm_eps
        self._ones_ND: torch.Tensor | None = None

    def ones_ND(self, qkv_TND: torch.Tensor) -> torch.Tensor:
        """The weight of an op that takes one, of each query and key head."""
        if self._ones_ND is None:
            self._ones_ND = qkv_TND.new_ones(self._num_heads, qkv_TND.shape[2])
        return self._ones_ND


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


def norm_of(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """The family's kind, of hidden states."""
    return LayerNorm(config, config.hidden_size) if config.are_centered else RMSNorm(config, config.hidden_size)


@torch.no_grad()
def fill_norms(model: nn.Module) -> None:
    """Fill the weights of a model's norms with ones: what they are where a family's checkpoints have none."""
    for module in model.modules():
        if isinstance(module, RMSNorm | GatedRMSNorm | LayerNorm | CenteredQKNorm):
            module.weight.fill_(1.0)

"""The small parts of a decoder: weights and the ops they go through. Inference only; shapes as in `ops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist

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


class Scale(nn.Module):
    """What a block adds to the residual stream, times a constant (Granite)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return x * self.factor


class MLP(nn.Module):
    """The gated MLP, with fused gate and up."""

    def __init__(self, config: DecoderConfig, size: int | None = None, sparsity: float = 0.0) -> None:
        """`size`: its width, if that is not the config's. `sparsity`: the part of gates that is to be zero."""
        super().__init__()
        self.size = size = size or config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.gate = ops.silu_mul if config.activation == "silu" else ops.gelu_mul
        self.gate_multiplier = 1.0 if config.multipliers is None else config.multipliers.mlp_gate
        self.cut = NormalDist().inv_cdf(sparsity) if sparsity else None  # in standard deviations

    def forward(self, x_TE: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] -> [T, E]; what the step says of sequences plays no role."""
        gate_up_TI = self.gate_up_proj(x_TE)
        if self.gate_multiplier != 1.0:
            gate_up_TI[:, : self.size].mul_(self.gate_multiplier)
        if self.cut is not None:  # rounded as the gates are: the models were trained with that
            ops.cut_gates_(gate_up_TI[:, : self.size], torch.tensor(self.cut, dtype=x_TE.dtype).item())
        return self.down_proj(self.gate(gate_up_TI))


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu2": ops.relu_squared,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class PlainMLP(nn.Module):
    """An MLP without gates."""

    in_float32 = ("alphas",)

    def __init__(self, config: DecoderConfig, size: int | None = None) -> None:
        """`size`: its width, if that is not the config's."""
        super().__init__()
        self.size = size = size or config.intermediate_size
        self.up_proj = Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.activation = config.activation
        self.alphas = empty_parameter(2) if config.activation == "xielu" else None  # of `ops.xielu`

    def forward(self, x_TE: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] -> [T, E]; what the step says of sequences plays no role."""
        up_TI = self.up_proj(x_TE)
        if self.alphas is not None:
            return self.down_proj(ops.xielu(up_TI, self.alphas))
        return self.down_proj(_ACTIVATIONS[self.activation](up_TI))


def dense_mlp(config: DecoderConfig, size: int | None = None, sparsity: float = 0.0) -> MLP | PlainMLP:
    """The family's kind."""
    return MLP(config, size, sparsity) if config.has_mlp_gates else PlainMLP(config, size)


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

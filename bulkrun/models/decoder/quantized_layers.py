"""What stands where a `Linear` was once its weight is quantized. Inference only; shapes as in `ops`."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.ops.cpu.int8_linear import pack_int8_
from bulkrun.ops.fp8 import FP8
from bulkrun.ops.int8_linear import Int8Weight


class QuantizedLinear(nn.Module):
    """A weight [O, I] of eight bits, a float32 scale per output channel [O, 1], perhaps a bias [O].

    Of experts [X, O, I], [X, O, 1], [X, O]. Weight and scale are uninitialized.
    """

    weight_scale: torch.Tensor

    def __init__(self, plain: Linear | ExpertLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(plain.weight, dtype=dtype), requires_grad=False)
        channels = plain.weight.shape[:-1]
        self.register_buffer("weight_scale", plain.weight.new_empty(*channels, 1, dtype=torch.float32))
        self.bias = plain.bias


class Fp8Linear(QuantizedLinear):
    """In fp8 (E4M3)."""

    def __init__(self, plain: Linear) -> None:
        super().__init__(plain, FP8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], in x's dtype."""
        return ops.fp8_linear(x, self.weight, self.weight_scale, self.bias)


class Fp8ExpertLinear(QuantizedLinear):
    """A matrix of each expert in fp8."""

    def __init__(self, plain: ExpertLinear) -> None:
        super().__init__(plain, FP8)

    @property
    def experts(self) -> ops.ExpertWeights:
        """What `ops.fused_experts` takes."""
        return ops.Fp8Weight(self.weight.data, self.weight_scale)


class Int8Weights(QuantizedLinear):
    """In int8, plain or in panels."""

    def __init__(self, plain: Linear | ExpertLinear) -> None:
        super().__init__(plain, torch.int8)
        self.zeros: torch.Tensor | None = None  # once it is in panels

    @property
    def int8_weight(self) -> Int8Weight:
        """Values, scale and zeros as one."""
        return Int8Weight(self.weight.data, self.weight_scale, self.zeros)

    def pack(self) -> None:
        """Lay the weight out for the compiled product, where there is one."""
        if self.zeros is None:
            values, _, self.zeros = self._packed()
            self.weight = nn.Parameter(values, requires_grad=False)

    def _packed(self) -> Int8Weight:
        raise NotImplementedError


class Int8Linear(Int8Weights):
    """One matrix."""

    def __init__(self, plain: Linear) -> None:
        super().__init__(plain)
        self.int8_linear = ops.int8_linear  # `make_invariant` puts another op of its contract here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], in x's dtype."""
        return self.int8_linear(x, self.int8_weight, self.bias)

    def _packed(self) -> Int8Weight:
        return pack_int8_(self.int8_weight)


class Int8ExpertLinear(Int8Weights):
    """A matrix of each expert."""

    def __init__(self, plain: ExpertLinear) -> None:
        super().__init__(plain)
        self.mlp_sizes = plain.mlp_sizes

    @property
    def experts(self) -> ops.ExpertWeights:
        """What `ops.fused_experts` takes."""
        return self.int8_weight

    def _packed(self) -> Int8Weight:
        return ops.pack_experts(self.int8_weight, *self.mlp_sizes)

"""What stands where a `Linear` was once its weight is quantized. Inference only; shapes as in `ops`."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.four_bits import FourBitScheme
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.ops.cpu.four_bit_linear import pack_four_bits_
from bulkrun.ops.cpu.int8_linear import pack_int8_
from bulkrun.ops.matmul.four_bit_linear import with_int8
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight, in_bits
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.matmul.int8_linear import Int8Weight
from bulkrun.ops.matmul.unpack_codes import CODES_PER_BYTE


class QuantizedLinear(nn.Module):
    """A weight [O, I] of eight bits, a float32 scale per output channel [O, 1], perhaps a bias [O].

    Of experts [X, O, I], [X, O, 1], [X, O]. With several numbers to an item of the weight the last of its dimensions is
    smaller, with several groups of inputs that of the scales larger. Weight and scale are uninitialized.
    """

    weight_scale: torch.Tensor
    numbers_per_item = 1

    def __init__(
        self,
        plain: Linear | ExpertLinear,
        dtype: torch.dtype,
        num_groups: int = 1,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        *channels, size = plain.weight.shape
        items = plain.weight.new_empty(*channels, size // self.numbers_per_item, dtype=dtype)
        self.weight = nn.Parameter(items, requires_grad=False)
        self.register_buffer("weight_scale", plain.weight.new_empty(*channels, num_groups, dtype=scale_dtype))
        self.bias = plain.bias

    def pack(self) -> None:
        """Lay the weight out for the compiled product, where there is one; no longer plain, it is multiplied alone."""


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
        if self.zeros is None:
            values, _, self.zeros = self._packed()
            self.weight = nn.Parameter(values, requires_grad=False)

    def _packed(self) -> Int8Weight:
        raise NotImplementedError


class Int8Linear(Int8Weights):
    """One matrix."""

    def __init__(self, plain: Linear) -> None:
        super().__init__(plain)
        self.multiply = ops.int8_linear  # `make_invariant` puts another op of its contract here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], in x's dtype."""
        return self.multiply(x, self.int8_weight, self.bias)

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
        return ops.pack_experts(self.int8_weight, self.mlp_sizes)


class FourBitWeights(QuantizedLinear):
    """Codes of four bits as a checkpoint stores them, with scales and perhaps zero points of groups of inputs.

    On a CPU only of sizes whose product is compiled. `in_int8`: multiplied as a weight quantized anew would be.
    """

    numbers_per_item = CODES_PER_BYTE
    weight_zero: torch.Tensor | None

    def __init__(self, plain: Linear | ExpertLinear, scheme: FourBitScheme, *, in_int8: bool) -> None:
        scale_dtype = torch.bfloat16 if scheme.are_powers else torch.float32
        super().__init__(plain, torch.uint8, scheme.num_groups(plain.weight.shape[-1]), scale_dtype)
        zero = torch.empty_like(self.weight_scale, dtype=torch.uint8) if scheme.has_zeros else None
        self.register_buffer("weight_zero", zero)
        self.scheme, self.in_int8 = scheme, in_int8
        self.packed: FourBitWeight | None = None

    @property
    def four_bit_weight(self) -> FourBitWeight:
        """The codes and what they stand for, as one."""
        if self.packed is not None:
            return self.packed
        codebook = torch.tensor(self.scheme.codebook, device=self.weight.device)
        return FourBitWeight(self.weight.data, self.weight_scale, self.weight_zero, codebook)

    def pack(self) -> None:
        if self.packed is None:
            plain = with_int8(self.four_bit_weight) if self.in_int8 else self.four_bit_weight
            self.packed = self._packed(plain) if self.weight.is_cpu else in_bits(plain)
            self.weight = nn.Parameter(self.packed.codes, requires_grad=False)
            self.weight_scale, self.weight_zero = self.packed.scale, self.packed.zero

    def _packed(self, plain: FourBitWeight) -> FourBitWeight:
        raise NotImplementedError


class FourBitLinear(FourBitWeights):
    """One matrix."""

    def __init__(self, plain: Linear, scheme: FourBitScheme, *, in_int8: bool) -> None:
        super().__init__(plain, scheme, in_int8=in_int8)
        self.multiply = ops.four_bit_linear  # `make_invariant` puts another op of its contract here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], in x's dtype."""
        return self.multiply(x, self.four_bit_weight, self.bias)

    def _packed(self, plain: FourBitWeight) -> FourBitWeight:
        return pack_four_bits_(plain)


class FourBitExpertLinear(FourBitWeights):
    """A matrix of each expert."""

    def __init__(self, plain: ExpertLinear, scheme: FourBitScheme, *, in_int8: bool) -> None:
        super().__init__(plain, scheme, in_int8=in_int8)
        self.mlp_sizes = plain.mlp_sizes

    @property
    def experts(self) -> ops.ExpertWeights:
        """What `ops.fused_experts` takes."""
        return self.four_bit_weight

    def _packed(self, plain: FourBitWeight) -> FourBitWeight:
        return ops.pack_experts(plain, self.mlp_sizes)

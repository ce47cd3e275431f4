"""What experts of every kind share: pairs of a token and one of its experts sorted by expert, the gate between both
products, and the sum over a token's experts. Contract: `ops.experts.moe`. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import torch

from bulkrun.ops.dispatch import by_device
from bulkrun.ops.experts.clamped_swiglu import ClampedSwiglu
from bulkrun.ops.experts.clamped_swiglu import clamped_swiglu as _clamped_swiglu
from bulkrun.ops.gelu_mul import gelu_mul as _gelu_mul
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight, four_bits_of_expert
from bulkrun.ops.matmul.fp8_linear import Fp8Weight
from bulkrun.ops.matmul.int8_linear import Int8Weight
from bulkrun.ops.relu_squared import relu_squared
from bulkrun.ops.silu_mul import silu_mul as _silu_mul

clamped_swiglu = by_device(_clamped_swiglu)
gelu_mul = by_device(_gelu_mul)
silu_mul = by_device(_silu_mul)
ExpertActivation = ClampedSwiglu | Literal["relu2", "gelu_tanh"] | None  # None: `silu_mul`
Q = TypeVar("Q", Int8Weight, Fp8Weight, FourBitWeight)


class ExpertPairs(NamedTuple):
    """P = T * k pairs of a token and one of its k experts, expert by expert."""

    order_P: torch.Tensor  # int64: each pair's place among those token by token
    token_P: torch.Tensor  # int64
    ends_X: torch.Tensor  # int32: where each expert's pairs end

    @classmethod
    def of(cls, ids_Tk: torch.Tensor, num_experts: int) -> ExpertPairs:
        """Sort them, without making the host wait for a GPU (so not by bincount); an expert's keep their order."""
        expert_P = ids_Tk.flatten()
        order_P = expert_P.to(torch.int16).argsort(stable=True)  # a GPU sorts 16 bits in a quarter of the passes
        counts_X = expert_P.new_zeros(num_experts).scatter_add_(0, expert_P, torch.ones_like(expert_P))
        return cls(order_P, order_P // ids_Tk.shape[1], counts_X.cumsum(0).int())


def sum_by_token(out_PE: torch.Tensor, order_P: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
    """What came out of each pair's expert, summed with its weights in float32; returns [T, E] in its dtype.

    out_PE: pairs in the order of `ExpertPairs`. weights_Tk: float32.
    """
    by_token_PE = torch.empty_like(out_PE).index_copy_(0, order_P, out_PE)
    out_TkE = by_token_PE.unflatten(0, weights_Tk.shape).float()
    return (out_TkE * weights_Tk.unsqueeze(-1)).sum(1).to(out_PE.dtype)


def gated(gate_up: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    """What gates and ups make, [..., 2 I] -> [..., I], or of experts without gates the ups, [..., I] -> [..., I]."""
    if activation is None:
        return silu_mul(gate_up)
    if activation == "gelu_tanh":
        return gelu_mul(gate_up)
    return relu_squared(gate_up) if activation == "relu2" else clamped_swiglu(gate_up, activation)


def expert_by_expert(
    x_TE: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    mlp: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`fused_experts` with `mlp(expert, its tokens [P, E])`, which returns [P, E], for each expert that was chosen."""
    out_TkE = x_TE.new_zeros(*ids_Tk.shape, x_TE.shape[1])
    for expert in sorted(set(ids_Tk.flatten().tolist())):
        token_P, choice_P = (ids_Tk == expert).nonzero(as_tuple=True)
        out_TkE[token_P, choice_P] = mlp(expert, x_TE[token_P])
    total_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    for choice in range(ids_Tk.shape[1]):
        total_TE += out_TkE[:, choice].float() * weights_Tk[:, choice, None]
    return total_TE.to(x_TE.dtype)


def of_expert(weight_XOI: Q, expert: int) -> Q:
    """An expert's matrix [O, I] of plain weights."""
    if isinstance(weight_XOI, FourBitWeight):
        return four_bits_of_expert(weight_XOI, expert)
    return weight_XOI._replace(values=weight_XOI.values[expert], scale=weight_XOI.scale[expert])


def quantized_experts(
    linear: Callable[[torch.Tensor, Q, torch.Tensor | None], torch.Tensor],
    x_TE: torch.Tensor,
    weights: tuple[Q, Q],
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    activation: ExpertActivation,
) -> torch.Tensor:
    """`fused_experts` expert by expert; `linear`: rows through one expert's matrix."""
    gate_up, down = weights

    def mlp(expert: int, x_PE: torch.Tensor) -> torch.Tensor:
        gate_up_bias, down_bias = (None, None) if biases is None else (bias[expert] for bias in biases)
        rows = linear(x_PE, of_expert(gate_up, expert), gate_up_bias)
        return linear(gated(rows, activation), of_expert(down, expert), down_bias)

    return expert_by_expert(x_TE, weights_Tk, ids_Tk, mlp)

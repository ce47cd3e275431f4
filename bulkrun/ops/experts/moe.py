"""Mixture of experts: the experts' gated MLPs over the tokens that were sent to them (`routing`).

This is the contract, and where it is chosen what computes it: torch's grouped product (`grouped_experts`), grouped
products of our own over weights of fp8 and four bits on a GPU (`fp8_experts`, `four_bit_experts`), panels on a CPU with
AVX2 (`cpu.fused_experts`), or expert by expert for weights of int8. Knows no model.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from bulkrun.ops.cpu.fused_experts import (
    can_pack_experts,
    can_pack_int8_experts,
    pack_experts_,
    pack_four_bit_experts_,
    pack_int8_experts_,
)
from bulkrun.ops.cpu.fused_experts import fused_experts as _packed_experts
from bulkrun.ops.dispatch import by_device, uses_triton
from bulkrun.ops.experts.expert_pairs import ExpertActivation, quantized_experts
from bulkrun.ops.experts.expert_sizes import ExpertSizes
from bulkrun.ops.experts.four_bit_experts import four_bit_experts as _four_bit_experts
from bulkrun.ops.experts.fp8_experts import fp8_experts as _fp8_experts
from bulkrun.ops.experts.grouped_experts import grouped_experts
from bulkrun.ops.matmul.four_bit_linear import four_bit_linear
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight
from bulkrun.ops.matmul.fp8_linear import Fp8Weight
from bulkrun.ops.matmul.int8_linear import Int8Weight, int8_linear
from bulkrun.ops.matmul.weight_kinds import AnyWeight, values_of

four_bit_experts = by_device(_four_bit_experts)
fp8_experts = by_device(_fp8_experts)
ExpertWeights = AnyWeight  # [X, O, I], or in panels
E = TypeVar("E", torch.Tensor, Int8Weight, FourBitWeight)
_PACKED_NDIM = 5  # of weights in panels; plain ones have three dimensions


def pack_experts(weight: E, sizes: ExpertSizes, rows_dtype: torch.dtype | None = None) -> E:
    """One of both weights of `fused_experts`, in the layout it is fastest with, or as it is where there is none.

    It may take the memory of the weight, which must not be used afterwards. Of four bits there are only weights that
    can be packed (`cpu.four_bit_linear.can_pack_four_bits`). rows_dtype: see `pack_linear_weight`.
    """
    if are_packed(weight):
        return weight
    if isinstance(weight, Int8Weight):
        return pack_int8_experts_(weight) if can_pack_int8_experts(sizes) else weight
    if isinstance(weight, FourBitWeight):
        return pack_four_bit_experts_(weight)
    return pack_experts_(weight) if can_pack_experts(weight, sizes, rows_dtype) else weight


def are_packed(weight: ExpertWeights) -> bool:
    """Whether experts' weights are laid out for a product of our own."""
    return values_of(weight).ndim == _PACKED_NDIM


def waits_for_gpu(weight: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether the host waits for a GPU in `fused_experts` over such weights, so that no graph can hold the step.

    dtype: of what goes through them.

    Not in fp8 or four bits (`in_bits`), nor where torch has a grouped kernel: in bf16, on compute capability 9.x and
    10.x (Hopper, and Blackwell's large ones).
    """
    if isinstance(weight, Fp8Weight) or (isinstance(weight, FourBitWeight) and weight.form != "table"):
        return not uses_triton(values_of(weight))
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(values_of(weight).device)[0] not in (9, 10)


def fused_experts(
    x_TE: torch.Tensor,
    gate_up_XIE: ExpertWeights,
    down_XEI: ExpertWeights,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: ExpertActivation = None,
) -> torch.Tensor:
    """Each token through its k experts, summed with its weights in float32; returns [T, E] in x's dtype.

    gate_up_XIE: [X, 2 I, E], gate in the first half of an expert's rows. down_XEI: [X, E, I]. weights_Tk: float32.
    ids_Tk: int64, the k experts of a token all different. E and I are multiples of 8, which torch's product asks for.
    The weights may both come from `pack_experts`, and both be of int8 or of fp8, with any sizes: then rows are rounded
    to that before each product. Or both of four bits (`four_bit_linear`). biases: of both weights, [X, 2 I] and [X, E].
    `activation`: how gates and ups meet instead of `silu_mul`; with "relu2" there are no gates, and the first weight is
    [X, I, E].
    """
    if are_packed(gate_up_XIE):
        assert activation != "relu2", "experts without gates are not packed"
        assert not isinstance(gate_up_XIE, Fp8Weight) and not isinstance(down_XEI, Fp8Weight), "nor is fp8"
        return _packed_experts(x_TE, gate_up_XIE, down_XEI, weights_Tk, ids_Tk, biases, activation)
    if isinstance(gate_up_XIE, Int8Weight):
        assert isinstance(down_XEI, Int8Weight), "both are quantized, or none"
        return quantized_experts(int8_linear, x_TE, (gate_up_XIE, down_XEI), weights_Tk, ids_Tk, biases, activation)
    if isinstance(gate_up_XIE, Fp8Weight):
        assert isinstance(down_XEI, Fp8Weight), "both are quantized, or none"
        return fp8_experts(x_TE, gate_up_XIE, down_XEI, weights_Tk, ids_Tk, biases, activation)
    if isinstance(gate_up_XIE, FourBitWeight) and gate_up_XIE.int8 is not None:
        assert isinstance(down_XEI, FourBitWeight), "both are quantized, or none"
        return quantized_experts(four_bit_linear, x_TE, (gate_up_XIE, down_XEI), weights_Tk, ids_Tk, biases, activation)
    if isinstance(gate_up_XIE, FourBitWeight):
        assert isinstance(down_XEI, FourBitWeight), "both are quantized, or none"
        return four_bit_experts(x_TE, gate_up_XIE, down_XEI, weights_Tk, ids_Tk, biases, activation)
    assert isinstance(down_XEI, torch.Tensor), "both are quantized, or none"
    return grouped_experts(x_TE, gate_up_XIE, down_XEI, weights_Tk, ids_Tk, biases, activation)

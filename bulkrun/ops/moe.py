"""Mixture of experts: which experts a token goes to, and the experts' gated MLPs over the tokens they got.

This is the contract and the pure-torch reference: tokens are sorted by expert and go through torch's grouped product,
which reads the weights of the experts that were chosen, each once; those of four bits are unpacked for it. Weights of
int8 go expert by expert, those of fp8 on a GPU through a grouped product of our own (`fp8_experts`). On a CPU with
AVX-512 weights are laid out in panels of our own (`cpu.fused_experts`). Knows no model.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F

from bulkrun.ops.clamped_swiglu import ClampedSwiglu
from bulkrun.ops.cpu.fused_experts import (
    can_pack_experts,
    can_pack_int8_experts,
    pack_experts_,
    pack_four_bit_experts_,
    pack_int8_experts_,
)
from bulkrun.ops.cpu.fused_experts import fused_experts as _packed_experts
from bulkrun.ops.dispatch import by_device, uses_triton
from bulkrun.ops.expert_pairs import ExpertPairs, gated, quantized_experts
from bulkrun.ops.expert_pairs import sum_by_token as _sum_by_token
from bulkrun.ops.four_bit_linear import FourBitWeight, four_bit_linear, unpack
from bulkrun.ops.fp8_experts import fp8_experts as _fp8_experts
from bulkrun.ops.fp8_linear import Fp8Weight
from bulkrun.ops.int8_linear import Int8Weight, int8_linear
from bulkrun.ops.weight_kinds import AnyWeight, values_of

_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has it by the second name only

fp8_experts = by_device(_fp8_experts)
sum_by_token = by_device(_sum_by_token)
ExpertWeights = AnyWeight  # [X, O, I], or in panels
E = TypeVar("E", torch.Tensor, Int8Weight, FourBitWeight)
_PACKED_NDIM = 5  # of weights in panels; plain ones have three dimensions


def route_top_k(logits_TX: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` likeliest of X experts for each token: weights float32 [T, k], ids int64 [T, k].

    The softmax is over all experts, in float32; `renormalize` makes the kept weights sum to 1.
    """
    weights_Tk, ids_Tk = logits_TX.float().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return weights_Tk, ids_Tk


def pack_experts(weight: E, hidden_size: int, intermediate_size: int) -> E:
    """One of both weights of `fused_experts`, in the layout it is fastest with, or as it is where there is none.

    It may take the memory of the weight, which must not be used afterwards. Of four bits there are only weights that
    can be packed (`cpu.four_bit_linear.can_pack_four_bits`).
    """
    if are_packed(weight):
        return weight
    if isinstance(weight, Int8Weight):
        return pack_int8_experts_(weight) if can_pack_int8_experts(hidden_size, intermediate_size) else weight
    if isinstance(weight, FourBitWeight):
        return pack_four_bit_experts_(weight)
    return pack_experts_(weight) if can_pack_experts(weight, hidden_size, intermediate_size) else weight


def are_packed(weight: ExpertWeights) -> bool:
    """Whether experts' weights are laid out for a product of our own."""
    return values_of(weight).ndim == _PACKED_NDIM


def waits_for_gpu(weight: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether the host waits for a GPU in `fused_experts` over such weights, so that no graph can hold the step.

    dtype: of what goes through them.

    Not in fp8, nor where torch has a grouped kernel: in bf16, on compute capability 9.x and 10.x (Hopper, and
    Blackwell's large ones).
    """
    if isinstance(weight, Fp8Weight):
        return not uses_triton(weight.values)
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(values_of(weight).device)[0] not in (9, 10)


def fused_experts(
    x_TE: torch.Tensor,
    gate_up_XIE: ExpertWeights,
    down_XEI: ExpertWeights,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    swiglu: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """Each token through its k experts, summed with its weights in float32; returns [T, E] in x's dtype.

    gate_up_XIE: [X, 2 I, E], gate in the first half of an expert's rows. down_XEI: [X, E, I]. weights_Tk: float32.
    ids_Tk: int64, the k experts of a token all different. E and I are multiples of 8, which torch's product asks for.
    The weights may both come from `pack_experts`, and both be of int8 or of fp8, with any sizes: then rows are rounded
    to that before each product. Or both of four bits (`four_bit_linear`). biases: of both weights, [X, 2 I] and [X, E].
    `swiglu`: how gates and ups meet instead of `silu_mul`.
    """
    if are_packed(gate_up_XIE):
        return _packed_experts(x_TE, gate_up_XIE, down_XEI, weights_Tk, ids_Tk, biases, swiglu)
    if isinstance(gate_up_XIE, Int8Weight):
        assert isinstance(down_XEI, Int8Weight), "both are quantized, or none"
        return quantized_experts(int8_linear, x_TE, (gate_up_XIE, down_XEI), weights_Tk, ids_Tk, biases, swiglu)
    if isinstance(gate_up_XIE, Fp8Weight):
        assert isinstance(down_XEI, Fp8Weight), "both are quantized, or none"
        return fp8_experts(x_TE, gate_up_XIE, down_XEI, weights_Tk, ids_Tk, biases, swiglu)
    if isinstance(gate_up_XIE, FourBitWeight) and gate_up_XIE.int8 is not None:
        assert isinstance(down_XEI, FourBitWeight), "both are quantized, or none"
        return quantized_experts(four_bit_linear, x_TE, (gate_up_XIE, down_XEI), weights_Tk, ids_Tk, biases, swiglu)
    pairs = ExpertPairs.of(ids_Tk, len(values_of(gate_up_XIE)))
    gate_up_PI = _grouped_mm(x_TE[pairs.token_P], _numbers(gate_up_XIE, x_TE).transpose(1, 2), offs=pairs.ends_X)
    if biases is not None:
        gate_up_PI += biases[0][ids_Tk.flatten()[pairs.order_P]]
    down_XEI = _numbers(down_XEI, x_TE)
    down_PE = _grouped_mm(gated(gate_up_PI, swiglu), down_XEI.transpose(1, 2), offs=pairs.ends_X)
    if biases is not None:
        down_PE += biases[1][ids_Tk.flatten()[pairs.order_P]]
    return sum_by_token(down_PE, pairs.order_P, weights_Tk)


def _numbers(weight: ExpertWeights, like: torch.Tensor) -> torch.Tensor:
    """Of plain weights in the dtype they are multiplied in."""
    if isinstance(weight, FourBitWeight):
        return unpack(weight, like.dtype)
    assert isinstance(weight, torch.Tensor), "both are quantized, or none"
    return weight

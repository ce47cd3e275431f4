"""Mixture of experts: which experts a token goes to, and the experts' gated MLPs over the tokens they got.

This is the contract and the pure-torch reference: tokens are sorted by expert and go through torch's grouped product,
which reads the weights of the experts that were chosen, each once. Weights of 8 or 4 bits go expert by expert. On a
CPU with AVX-512 weights are laid out in panels of our own (`cpu.fused_experts`). Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F

from bulkrun.ops.clamped_swiglu import ClampedSwiglu
from bulkrun.ops.clamped_swiglu import clamped_swiglu as _clamped_swiglu
from bulkrun.ops.cpu.fused_experts import (
    can_pack_experts,
    can_pack_int8_experts,
    pack_experts_,
    pack_four_bit_experts_,
    pack_int8_experts_,
)
from bulkrun.ops.cpu.fused_experts import fused_experts as _packed_experts
from bulkrun.ops.cpu.panel_matrix import panels_of
from bulkrun.ops.dispatch import by_device
from bulkrun.ops.four_bit_linear import FourBitWeight, four_bit_linear, four_bits_of_expert
from bulkrun.ops.int8_linear import Int8Weight, int8_linear
from bulkrun.ops.silu_mul import silu_mul as _silu_mul

_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has it by the second name only

clamped_swiglu = by_device(_clamped_swiglu)
silu_mul = by_device(_silu_mul)
ExpertWeights = torch.Tensor | Int8Weight | FourBitWeight  # [X, O, I], or in panels
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
    can be packed (`cpu.fused_experts.can_pack_four_bit_experts`).
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
    return panels_of(weight).ndim == _PACKED_NDIM


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
    The weights may both come from `pack_experts`, and both be of int8, with any sizes: then rows are rounded to int8
    before each product. Or both of four bits (`four_bit_linear`). biases: of both weights, [X, 2 I] and [X, E].
    `swiglu`: how gates and ups meet instead of `silu_mul`.
    """
    if are_packed(gate_up_XIE):
        return _packed_experts(x_TE, gate_up_XIE, down_XEI, weights_Tk, ids_Tk, biases, swiglu)
    if not isinstance(gate_up_XIE, torch.Tensor) or not isinstance(down_XEI, torch.Tensor):
        return _quantized_experts(x_TE, (gate_up_XIE, down_XEI), weights_Tk, ids_Tk, biases, swiglu)
    num_tokens, top_k = ids_Tk.shape
    expert_P = ids_Tk.flatten()
    order_P = expert_P.argsort(stable=True)  # P = T * k (token, expert) pairs, expert by expert
    counts_X = expert_P.new_zeros(gate_up_XIE.shape[0]).scatter_add_(0, expert_P, torch.ones_like(expert_P))
    ends_X = counts_X.cumsum(0).int()  # not bincount, which makes the host wait for a GPU
    gate_up_PI = _grouped_mm(x_TE[order_P // top_k], gate_up_XIE.transpose(1, 2), offs=ends_X)
    if biases is not None:
        gate_up_PI += biases[0][expert_P[order_P]]
    down_PE = _grouped_mm(gated(gate_up_PI, swiglu), down_XEI.transpose(1, 2), offs=ends_X)
    if biases is not None:
        down_PE += biases[1][expert_P[order_P]]
    out_PE = torch.empty_like(down_PE).index_copy_(0, order_P, down_PE)
    out_TkE = out_PE.unflatten(0, (num_tokens, top_k)).float()
    return (out_TkE * weights_Tk.unsqueeze(-1)).sum(1).to(x_TE.dtype)


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


def product_of_expert(weight_XOI: ExpertWeights, expert: int) -> Callable[..., torch.Tensor]:
    """The product of rows and a bias with an expert's matrix [O, I] of plain quantized weights."""
    if isinstance(weight_XOI, FourBitWeight):
        return partial(four_bit_linear, weight=four_bits_of_expert(weight_XOI, expert))
    assert isinstance(weight_XOI, Int8Weight), "both are quantized, or none"
    return partial(int8_linear, weight=Int8Weight(weight_XOI.values[expert], weight_XOI.scale[expert]))


def _quantized_experts(
    x_TE: torch.Tensor,
    plain: tuple[ExpertWeights, ExpertWeights],
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    swiglu: ClampedSwiglu | None,
) -> torch.Tensor:
    def mlp(expert: int, x_PE: torch.Tensor) -> torch.Tensor:
        gate_up, down = (product_of_expert(weight, expert) for weight in plain)
        gate_up_bias, down_bias = (None, None) if biases is None else (bias[expert] for bias in biases)
        return down(gated(gate_up(x_PE, bias=gate_up_bias), swiglu), bias=down_bias)

    return expert_by_expert(x_TE, weights_Tk, ids_Tk, mlp)


def gated(gate_up: torch.Tensor, swiglu: ClampedSwiglu | None) -> torch.Tensor:
    """What gates and ups make: [..., 2 I] -> [..., I]."""
    return silu_mul(gate_up) if swiglu is None else clamped_swiglu(gate_up, swiglu)

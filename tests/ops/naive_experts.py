"""Experts whose weights and inputs are rounded to 8 bits: a naive loop over experts, and what it is asked over."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bulkrun import ops

Weights = tuple[torch.Tensor, torch.Tensor]  # gates and ups [X, 2 I, E], downs [X, E, I]; or their biases


def naive_experts(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x_TE: torch.Tensor,
    weights: Weights,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: Weights | None,
    activation: ops.ExpertActivation,
) -> torch.Tensor:
    """float64 [T, E]. `product` rounds rows and weight and gives float64; gates and ups are rounded as an op would."""
    gate_up_bias, down_bias = biases or (torch.zeros(weights[0].shape[:2]), torch.zeros(weights[1].shape[:2]))
    out_TE = torch.zeros(x_TE.shape, dtype=torch.float64)
    for expert in ids_Tk.unique().tolist():
        tokens, choices = (ids_Tk == expert).nonzero(as_tuple=True)
        both = product(x_TE[tokens], weights[0][expert]) + gate_up_bias[expert].double()
        gated = activated(both.to(x_TE.dtype).double(), activation, x_TE.dtype)
        down = product(gated.to(x_TE.dtype), weights[1][expert]) + down_bias[expert].double()
        out_TE.index_add_(0, tokens, weights_Tk[tokens, choices, None].double() * down)
    return out_TE


def activated(both: torch.Tensor, activation: ops.ExpertActivation, dtype: torch.dtype) -> torch.Tensor:
    """What comes of gates and ups, or ups alone, in float64; SiLU and GELU are rounded to `dtype` as ops round them."""
    if activation == "relu2":
        return both.clamp(min=0) ** 2
    gate, up = both.chunk(2, dim=-1)
    if activation is None:
        return F.silu(gate).to(dtype).double() * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").to(dtype).double() * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def random_weights(num_experts: int, sizes: tuple[int, int], *, has_gates: bool = True) -> Weights:
    """Of experts of these hidden and intermediate sizes."""
    hidden, inner = sizes
    generator = torch.Generator().manual_seed(hidden)
    shapes = (num_experts, inner * (2 if has_gates else 1), hidden), (num_experts, hidden, inner)
    gate_up, down = (torch.randn(shape, generator=generator) / shape[2] ** 0.5 for shape in shapes)
    return gate_up, down


def random_biases(num_experts: int, sizes: tuple[int, int], dtype: torch.dtype, *, has_gates: bool = True) -> Weights:
    """Of the same."""
    generator = torch.Generator().manual_seed(1)
    outputs = sizes[1] * (2 if has_gates else 1), sizes[0]
    gate_up, down = (torch.randn(num_experts, n, generator=generator).to(dtype) for n in outputs)
    return gate_up, down


def routed(num_tokens: int, num_experts: int, top_k: int) -> Weights:
    """Weights float32 and ids of each token's experts."""
    logits_TX = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    logits_TX[num_tokens // 2 :, 0] = 9.0  # one expert gets many
    return ops.route_top_k(logits_TX, top_k, renormalize=True)

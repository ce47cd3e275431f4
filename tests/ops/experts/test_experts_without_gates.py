"""Experts whose activation is the square of what is above zero, in every kind of weights, beside a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.matmul.fp8_linear import Fp8Weight
from bulkrun.ops.matmul.int8_linear import Int8Weight, quantize_int8
from tests.ops.naive_experts import routed

HIDDEN, INNER = 40, 24


def plain_weights(num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_experts)
    up = torch.randn(num_experts, INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    return up, torch.randn(num_experts, HIDDEN, INNER, generator=generator) / INNER**0.5


def naive(x_TE: torch.Tensor, up: torch.Tensor, down: torch.Tensor, asked: tuple[torch.Tensor, torch.Tensor]):
    out_TE = torch.zeros_like(x_TE, dtype=torch.float64)
    for token, (weights, ids) in enumerate(zip(*(one.tolist() for one in asked), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            ups = (up[expert].double() @ x_TE[token].double()).clamp(min=0)
            out_TE[token] += weight * (down[expert].double() @ ups**2)
    return out_TE


def in_rows(quantize, kind, weight: torch.Tensor):
    values, scale = quantize(weight.flatten(0, 1))
    return kind(values.view(weight.shape), scale.view(*weight.shape[:2], 1))


@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(5, 2, 0), (5, 2, 1), (3, 3, 33), (16, 4, 20)])
@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.04), ("fp8", 0.15)])
def test_experts_equal_the_naive_loop(
    num_experts: int, top_k: int, num_tokens: int, kind: str, tolerance: float
) -> None:
    """8 bits of inputs and weights are off by what rounding them makes of random numbers."""
    weights, asked = plain_weights(num_experts), routed(num_tokens, num_experts, top_k)
    x_TE = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    exact = naive(x_TE, *weights, asked)
    if kind == "int8":
        weights = tuple(in_rows(quantize_int8, Int8Weight, weight) for weight in weights)
    elif kind == "fp8":
        weights = tuple(in_rows(ops.quantize_rows, Fp8Weight, weight) for weight in weights)
    else:
        weights, x_TE = tuple(weight.to(getattr(torch, kind)) for weight in weights), x_TE.to(getattr(torch, kind))
    ours = ops.fused_experts(x_TE, *weights, *asked, None, "relu2")
    size = exact.abs().max().item() if num_tokens else 0.0
    torch.testing.assert_close(ours.double(), exact, atol=tolerance * size, rtol=0)

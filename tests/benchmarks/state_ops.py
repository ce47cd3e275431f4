"""The ops of layers with a state at the sizes of models, over random numbers: for `cpu_states` and `gpu_ops`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch

from bulkrun import ops
from tests.ops.linear_attention.steps import Part, make_meta, num_tokens

Op = Callable[[], object]
TAPS = 4


class StateLayer(NamedTuple):
    """One model's: the op that carries its states, and their sizes."""

    model: str
    op: Literal["state_space", "gated_delta_rule", "selective_scan"]
    heads: int
    head_dim: int
    size: int  # rows of a head's state
    groups: int  # of heads that share what is written and read; key heads of the rule
    decays: int = 1  # of a head: one, or one for each of its rows


LAYERS = (
    StateLayer("granite-4.0-h-tiny", "state_space", 48, 64, 128, 1),
    StateLayer("falcon-h1", "state_space", 32, 128, 256, 2),
    StateLayer("nemotron-h", "state_space", 128, 64, 16, 8),
    StateLayer("qwen3.5-9b", "gated_delta_rule", 32, 128, 128, 16),
    StateLayer("kimi-linear-48b-a3b", "gated_delta_rule", 32, 128, 128, 32, 128),
    StateLayer("falcon-mamba-7b", "selective_scan", 128, 64, 16, 1),
)


def new_states(layer: StateLayer, num_seqs: int, device: str) -> torch.Tensor:
    """Float32 [S, H, N, P]."""
    return torch.randn(num_seqs, layer.heads, layer.size, layer.head_dim, device=device)


def layer_ops(layer: StateLayer, state: torch.Tensor, parts: list[Part], dtype: torch.dtype) -> dict[str, Op]:
    """By name: the convolution, what carries states, and the norm behind it where there is one."""
    device, inner = state.device, layer.heads * layer.head_dim
    meta, num_groups = make_meta(parts, device), 0 if layer.op == "selective_scan" else layer.groups

    def of_tokens(*sizes: int) -> torch.Tensor:
        return torch.randn(num_tokens(parts), *sizes, device=device).to(dtype)

    x_TC = of_tokens(inner + 2 * num_groups * layer.size)
    taps = torch.randn(TAPS, x_TC.shape[1], device=device).to(dtype)
    before = torch.zeros(len(parts), TAPS - 1, x_TC.shape[1], dtype=dtype, device=device)
    made: dict[str, Op] = {"causal_conv": partial(ops.causal_conv, x_TC, taps, None, before, meta, silu=True)}
    carry = {"selective_scan": _scan, "state_space": _space, "gated_delta_rule": _rule}[layer.op]
    made[layer.op] = partial(carry(layer, x_TC, of_tokens), state, meta)
    if layer.op != "selective_scan":
        made["gated_rms_norm"] = _norm(layer, of_tokens)
    return made


def _scan(layer: StateLayer, x_TC: torch.Tensor, of_tokens: Callable[..., torch.Tensor]) -> Callable[..., object]:
    inner, device = x_TC.shape[1], x_TC.device
    rates = -torch.rand(layer.size, inner, device=device), *torch.randn(2, inner, device=device)
    b_TN, c_TN, dt_TC, gate_TC = of_tokens(layer.size), of_tokens(layer.size), of_tokens(inner), of_tokens(inner)
    return partial(ops.selective_scan, x_TC, dt_TC, b_TN, c_TN, gate_TC, *rates)


def _space(layer: StateLayer, x_TC: torch.Tensor, of_tokens: Callable[..., torch.Tensor]) -> Callable[..., object]:
    return partial(ops.state_space, x_TC, of_tokens(layer.heads), *torch.randn(3, layer.heads, device=x_TC.device))


def _rule(layer: StateLayer, x_TC: torch.Tensor, of_tokens: Callable[..., torch.Tensor]) -> Callable[..., object]:
    num_decays, device = layer.decays * layer.heads, x_TC.device
    rates = torch.randn(layer.heads, device=device), torch.randn(num_decays, device=device)
    return partial(ops.gated_delta_rule, x_TC, of_tokens(layer.heads + num_decays), *rates)


def _norm(layer: StateLayer, of_tokens: Callable[..., torch.Tensor]) -> Op:
    """Of each head, behind a rule; of each group of heads behind a space."""
    is_rule = layer.op == "gated_delta_rule"
    num_groups = layer.heads if is_rule else layer.groups
    groups_TGE = of_tokens(num_groups, layer.heads * layer.head_dim // num_groups)
    weight = groups_TGE[0, 0].clone()
    return partial(ops.gated_rms_norm, groups_TGE, groups_TGE, weight, 1e-6, norm_before_gate=is_rule)

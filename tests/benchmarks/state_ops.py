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
    device, total = state.device, num_tokens(parts)
    meta, inner = make_meta(parts, device), layer.heads * layer.head_dim
    num_channels = inner if layer.op == "selective_scan" else inner + 2 * layer.groups * layer.size

    def of_tokens(*sizes: int) -> torch.Tensor:
        return torch.randn(total, *sizes, device=device).to(dtype)

    x_TC, taps = of_tokens(num_channels), torch.randn(TAPS, num_channels, device=device).to(dtype)
    before = torch.zeros(len(parts), TAPS - 1, num_channels, dtype=dtype, device=device)
    made: dict[str, Op] = {"causal_conv": partial(ops.causal_conv, x_TC, taps, None, before, meta, silu=True)}
    if layer.op == "selective_scan":
        rates = -torch.rand(layer.size, inner, device=device), *torch.randn(2, inner, device=device)
        b_TN, c_TN, dt_TC, gate_TC = of_tokens(layer.size), of_tokens(layer.size), of_tokens(inner), of_tokens(inner)
        return made | {layer.op: partial(ops.selective_scan, x_TC, dt_TC, b_TN, c_TN, gate_TC, *rates, state, meta)}
    a_log_H, dt_bias_H, d_H = torch.randn(3, layer.heads, device=device)
    dt_TH, heads_THP = of_tokens(layer.heads), of_tokens(layer.heads, layer.head_dim)
    is_rule = layer.op == "gated_delta_rule"
    if is_rule:
        ba_TG, dt_bias = of_tokens((1 + layer.decays) * layer.heads), dt_bias_H.repeat_interleave(layer.decays)
        made[layer.op] = partial(ops.gated_delta_rule, x_TC, ba_TG, a_log_H, dt_bias, state, meta)
    else:
        made[layer.op] = partial(ops.state_space, x_TC, dt_TH, a_log_H, dt_bias_H, d_H, state, meta)
    groups = heads_THP if is_rule else heads_THP.view(total, layer.groups, -1)
    weight = groups[0, 0].clone()
    norm = partial(ops.gated_rms_norm, groups, groups, weight, 1e-6, norm_before_gate=is_rule)
    return made | {"gated_rms_norm": norm}

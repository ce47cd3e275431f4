"""Tensor names of attention, and where each goes: projections, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.attention import Attention
from bulkrun.models.decoder.norms import CenteredQKNorm, HeadQKNorm, ProjectionQKNorm, TurnedQKNorm
from bulkrun.models.loading.row_orders import (
    FUSED_QKV,
    GATES_APART,
    QKV_BY_KEY_HEAD,
    QKV_BY_SHARD,
    gates_first,
    halves_first,
    halves_swapped,
    qkv_order,
)
from bulkrun.models.loading.target import Orders, Target, norm_target, parts_of, whole

_NORM_OF_EACH_HEAD = ("StableLmForCausalLM",)  # a tensor, and not all in one


def attention_targets(prefix: str, attention: Attention, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    """Those of a layer; their names begin with the prefix."""
    yield from parts_of(prefix, attention.qkv_proj, *_parts(attention, config))
    yield from parts_of(prefix, attention.o_proj, {"o_proj": config.hidden_size})
    if config.norm_weights:
        yield from _qk_norm_targets(prefix, attention, config)
    if attention.head_gates is not None:
        yield f"{prefix}g_proj.weight", whole(attention.head_gates.weight)
    if attention.sinks is not None:
        yield f"{prefix}sinks", whole(attention.sinks)


def _parts(attention: Attention, config: DecoderConfig) -> tuple[dict[str, int], Orders]:
    """The tensors that queries, keys, values and gates are stored as: rows of each, and their order where it is not
    ours."""
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    if config.architecture in (*FUSED_QKV, *QKV_BY_KEY_HEAD, *QKV_BY_SHARD):
        order = qkv_order(config)
        return {"qkv_proj": q_size + 2 * kv_size}, {} if order is None else {"qkv_proj": order}
    parts: dict[str, int] = {"q_proj": q_size}
    orders: dict[str, torch.Tensor] = {}
    if attention.has_own_keys:
        parts |= {"k_proj": kv_size} if attention.keys_are_values else {"k_proj": kv_size, "v_proj": kv_size}
    if attention.has_gate and config.architecture in GATES_APART:
        parts = {"gate_proj": q_size, **parts}
    elif attention.has_gate:
        parts["q_proj"], orders["q_proj"] = 2 * q_size, gates_first(config)
    if config.turns_neighbours or config.turns_backwards:
        turned = halves_first if config.turns_neighbours else halves_swapped
        orders["q_proj"], orders["k_proj"] = turned(config, config.num_heads), turned(config, config.num_kv_heads)
    return parts, orders


def _qk_norm_targets(prefix: str, attention: Attention, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    names, norm = ("q_norm", "k_norm"), attention.qk_norm
    if isinstance(norm, HeadQKNorm):
        for name, view in zip(names, norm.weight.data.tensor_split((config.num_heads,)), strict=True):
            if len(view):
                yield f"{prefix}{name}.weight", Target(view, (attention.head_dim,), config.norm_offset)
    elif isinstance(norm, TurnedQKNorm):
        for name, view in zip(names, norm.weight.data, strict=True):
            yield f"{prefix}{name}.weight", Target(view, (config.head_dim,))
    elif isinstance(norm, CenteredQKNorm):
        for name, view in zip(names, _of_heads(norm, config), strict=True):
            yield from _head_norms(f"{prefix}{name}.", view, config)
    elif isinstance(norm, ProjectionQKNorm):
        yield f"{prefix}q_norm.weight", norm_target(norm.q, config)
        yield f"{prefix}k_norm.weight", norm_target(norm.k, config)


def _of_heads(norm: CenteredQKNorm, config: DecoderConfig) -> tuple[torch.Tensor, ...]:
    """The weights of queries [H, ...] and of keys, with dimensions that turn together side by side."""
    weight_ND = norm.weight.data
    if config.turns_neighbours:
        weight_ND = weight_ND.unflatten(1, (2, -1)).transpose(1, 2)
    return weight_ND.tensor_split((config.num_heads,))


def _head_norms(prefix: str, weights: torch.Tensor, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    if config.architecture not in _NORM_OF_EACH_HEAD:
        yield f"{prefix}weight", Target(weights, (len(weights), config.head_dim))
        return
    for head, weight_D in enumerate(weights):
        yield f"{prefix}norms.{head}.weight", Target(weight_D, (config.head_dim,))

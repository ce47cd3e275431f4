"""Llama 4's config.json in the words of the other families. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.layer_kinds import CHUNKED, FULL, rope_layers

_Keys = Mapping[str, Any]
LLAMA4_KEYS: _Keys = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "attention_bias": False,
    "attention_chunk_size": None,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "layer_types": None,
    "no_rope_layers": None,
    "qk_norm": None,
    "moe_intermediate_size": None,
    "shared_expert_intermediate_size": None,
    "num_experts": None,
    "num_experts_per_tok": 1,
    "norm_topk_prob": None,
    "mlp_only_layers": None,
}


class QueryGrowth(NamedTuple):
    """Of queries in layers without RoPE: `rotary_frequencies.query_growth`, of the number of tokens so far."""

    beta: float
    num_tokens: int  # that one step of it takes


def of_llama4(raw: _Keys) -> _Keys:
    """Layers with RoPE see chunks, and each so many is sparse, where no lists say otherwise; two widths of MLPs.

    Raises ModelError for lists and numbers that are none.
    """
    size, layers = raw["intermediate_size"], layers_of(raw)
    chunk_size, interval = raw.get("attention_chunk_size", 8192), raw.get("no_rope_layer_interval", 4)
    dense_size, num_experts = raw.get("intermediate_size_mlp", 16_384), raw.get("num_local_experts", 16)
    numbers = {"intermediate_size": size, "intermediate_size_mlp": dense_size, "num_local_experts": num_experts}
    for name, value in {**numbers, "no_rope_layer_interval": interval}.items():
        check_number(name, value, int)
    listed = raw.get("no_rope_layers") or None  # an empty list says nothing
    has_rope = rope_layers({**raw, "no_rope_layer_interval": interval, "no_rope_layers": listed})
    kinds = [CHUNKED if has and chunk_size is not None else FULL for has in has_rope]
    sparse = _sparse_layers(raw, layers)
    return {
        **raw,
        "no_rope_layers": [*map(int, has_rope)],
        "attention_chunk_size": chunk_size,
        "layer_types": kinds if raw.get("layer_types") is None else raw["layer_types"],
        "qk_norm": "plain_head" if raw.get("use_qk_norm", True) else "none",
        "intermediate_size": dense_size,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "num_local_experts": num_experts if sparse else None,
        "norm_topk_prob": False,  # whatever the file says, as in transformers
        "mlp_only_layers": [layer for layer in layers if layer not in sparse],
    }


def _sparse_layers(raw: _Keys, layers: range) -> list[int]:
    listed, step = raw.get("moe_layers"), raw.get("interleave_moe_layer_step", 1)
    if listed is None:
        check_number("interleave_moe_layer_step", step, int)
        return list(layers[step - 1 :: step])
    if not isinstance(listed, list | tuple):
        raise ModelError(f"key 'moe_layers' is {listed!r}, not a list of layers; download the model again")
    return [layer for layer in layers if layer in listed]


def growth_of(keys: _Keys) -> QueryGrowth | None:
    """What the keys of a config.json say of it, if anything. Raises ModelError for what is no number."""
    if not keys.get("attn_temperature_tuning"):
        return None
    check_number("attn_scale", keys["attn_scale"], float)
    check_number("floor_scale", keys["floor_scale"], int)
    return QueryGrowth(float(keys["attn_scale"]), keys["floor_scale"])

"""config.json of families with words of their own, in those that families have in common. Torch-free.

Those of which some layers keep a state stand in `hybrid_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of

_Keys = Mapping[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"


def of_ernie(raw: _Keys) -> _Keys:
    """ERNIE 4.5: one key for the biases of all projections."""
    has_biases = bool(raw.get("use_bias", False))
    return {**raw, "attention_bias": has_biases, "mlp_bias": has_biases}


def of_ernie_moe(raw: _Keys) -> _Keys:
    """ERNIE 4.5's mixtures: names of their own; every so many layers are sparse, between a first and a last one.

    Raises ModelError for biases, which no published file asks for and which its head would have too.
    """
    if raw.get("use_bias"):
        raise ModelError("use_bias true is not supported in a mixture of experts; false is")
    size, num_shared = raw.get("moe_intermediate_size", 1536), raw.get("moe_num_shared_experts", 2)
    interval, first = raw.get("moe_layer_interval", 1), raw.get("moe_layer_start_index", 1)
    for name, value in (("moe_intermediate_size", size), ("moe_num_shared_experts", num_shared)):
        check_number(name, value, int)
    check_number("moe_layer_interval", interval, int)
    layers = layers_of(raw)
    last = raw.get("moe_layer_end_index", -1)
    last = len(layers) - 1 if last == -1 else last
    return {
        **raw,
        "num_experts": raw.get("moe_num_experts", 64),
        "num_experts_per_tok": raw.get("moe_k", 6),
        "shared_expert_intermediate_size": num_shared * size,
        "mlp_only_layers": [layer for layer in layers if (layer + 1) % interval or not first <= layer <= last],
    }


def of_exaone(raw: _Keys) -> _Keys:
    """EXAONE 4: layers may be told by a word, L for those with a window and G for the others, which is repeated.

    The last layer has none, whatever its letter is.
    """
    pattern = raw.get("sliding_window_pattern")
    if not isinstance(pattern, str) or raw.get("layer_types") is not None:
        return raw
    if not pattern or {*pattern} - {*"LG"}:
        raise ModelError(
            f"key 'sliding_window_pattern' is {pattern!r}, not a word of L and G; download the model again"
        )
    layers = layers_of(raw)
    kinds = [_SLIDING if pattern[layer % len(pattern)] == "L" else _FULL for layer in layers]
    return {**raw, "layer_types": [*kinds[:-1], _FULL]}


def of_hunyuan(raw: _Keys) -> _Keys:
    """Hunyuan: what its files call dynamic RoPE has another base frequency, by `alpha`, and nothing else."""
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    kind, alpha = rope.get("rope_type") or rope.get("type"), rope.get("alpha")
    if kind != "dynamic" or not alpha:
        return raw
    check_number("alpha", alpha, float)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    theta *= alpha ** (head_dim / (head_dim - 2))
    return {**raw, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def of_olmoe(raw: _Keys) -> _Keys:
    """OLMoE: queries, keys and values may be kept within limits, which no published file asks for."""
    if raw.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv {raw['clip_qkv']} is not supported; null is")
    return raw


def of_glm_moe(raw: _Keys) -> _Keys:
    """GLM-4.5 to 4.7."""
    sizes = {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return of_routed_experts({**sizes, **raw})


def of_routed_experts(keys: _Keys) -> dict[str, Any]:
    """Experts by DeepSeek's words, which others took over, beside shared ones of their width; dense layers first."""
    for name in ("moe_intermediate_size", "n_shared_experts"):
        check_number(name, keys[name], int)
    return {
        **keys,
        "num_experts": keys["n_routed_experts"],
        "shared_expert_intermediate_size": keys["n_shared_experts"] * keys["moe_intermediate_size"],
        "mlp_only_layers": list(layers_of(keys)[: keys["first_k_dense_replace"]]),
    }

"""config.json of mixtures of experts with words of their own, in those that families have in common. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.family_files import of_exaone, of_hunyuan, with_full_fourths
from bulkrun.models.config.layer_kinds import of_layers

_Keys = Mapping[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"


def of_ernie_moe(raw: _Keys) -> _Keys:
    """ERNIE 4.5's mixtures: names of their own; every so many layers are sparse, between a first and a last one.

    Raises ModelError for biases, which no published file asks for and which its head would have too, and for weights of
    experts that are divided by no less than a number.
    """
    if (raw.get("moe_norm_min") or 0.0) > 1e-6:
        raise ModelError(f"moe_norm_min {raw['moe_norm_min']} is not supported; 1e-12 is")
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


def _of_counted_experts(keys: _Keys) -> dict[str, Any]:
    """The same, where they are counted by the words of others."""
    counts = {"n_routed_experts": keys["num_experts"], "n_shared_experts": keys["num_shared_experts"]}
    return of_routed_experts({**keys, **counts})


def of_dots(raw: _Keys) -> _Keys:
    """dots.llm1."""
    sizes = {"moe_intermediate_size": 1408, "n_routed_experts": None, "n_shared_experts": None}
    return of_routed_experts({**sizes, "first_k_dense_replace": 0, **raw})


def of_solar(raw: _Keys) -> _Keys:
    """Solar Open: all layers are sparse, whatever the file says of dense ones."""
    sizes = {"moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1}
    return of_routed_experts({**sizes, **raw, "first_k_dense_replace": 0})


def of_exaone_moe(raw: _Keys) -> _Keys:
    """K-EXAONE: layers by a word as in EXAONE 4; which are dense is told by a list, or how many come first."""
    sizes = {"moe_intermediate_size": 1024, "num_shared_experts": 1, "first_k_dense_replace": 1, "num_experts": 64}
    return with_dense_layers(_of_counted_experts({**sizes, **of_exaone(raw)}))


def of_hunyuan3(raw: _Keys) -> _Keys:
    """Hunyuan 3: its first layer is dense where no list says otherwise."""
    sizes = {"moe_intermediate_size": 1536, "num_shared_experts": 1, "num_experts": 192}
    scale = {"routed_scaling_factor": raw.get("router_scaling_factor", 2.826)}
    return with_dense_layers(_of_counted_experts({**sizes, **raw, **scale, "first_k_dense_replace": 1}))


def of_hunyuan_moe(raw: _Keys) -> _Keys:
    """Hunyuan's first mixture: as its dense ones; a number for each layer, where it is the same one for all.

    Experts and the shared one are as wide as MLPs, whatever else the file has of their width, as in transformers.
    """
    size = raw["intermediate_size"]
    return {
        **of_hunyuan(raw),
        "num_experts": _of_all_layers(raw, "num_experts", 1),
        "num_experts_per_tok": _of_all_layers(raw, "moe_topk", 1),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
    }


def _of_all_layers(raw: _Keys, name: str, default: int) -> Any:
    value = raw.get(name, default)
    if not isinstance(value, list):
        return value
    if len({*map(str, value)}) != 1:
        raise ModelError(f"{name} {value} is not supported; one number for all layers is")
    return value[0]


def of_granite_shared(raw: _Keys) -> _Keys:
    """Granite's mixtures with a shared MLP beside experts, if it has a width."""
    return {**raw, "shared_expert_intermediate_size": raw.get("shared_intermediate_size") or None}


def of_granite_moe_swash(raw: _Keys) -> _Keys:
    """Granite Swash with experts."""
    return of_granite_shared(with_full_fourths(raw))


def of_minimax(raw: _Keys) -> _Keys:
    """MiniMax M2: so many dimensions of a head turn. Raises ModelError for scores of another kind."""
    if raw.get("scoring_func", "sigmoid") != "sigmoid":
        raise ModelError(f"scoring_func {raw['scoring_func']!r} is not supported; sigmoid is")
    if raw.get("rotary_dim") is None or raw.get("partial_rotary_factor") is not None:
        return raw
    head_dim = raw.get("head_dim", 128)
    for name, value in (("rotary_dim", raw["rotary_dim"]), ("head_dim", head_dim)):
        check_number(name, value, int)
    return {**raw, "partial_rotary_factor": raw["rotary_dim"] / head_dim}


def of_mellum(raw: _Keys) -> _Keys:
    """Mellum 2: no layer has a window, and all are sparse, where lists do not say otherwise."""
    kinds = raw.get("layer_types")
    keys = {**raw, "layer_types": [_FULL] * len(layers_of(raw)) if kinds is None else kinds}
    return with_dense_layers(keys)


def of_qwen2_moe(raw: _Keys) -> _Keys:
    """Qwen1.5's and Qwen2's mixtures: with windows, of the first layers each second one has one."""
    keys = {**raw, "attention_bias": raw.get("qkv_bias", True)}
    if raw.get("layer_types") is not None or not raw.get("use_sliding_window"):
        return keys
    limit = raw.get("max_window_layers", 28)
    check_number("max_window_layers", limit, int)
    kinds = [_FULL if layer % 2 or layer >= limit else _SLIDING for layer in layers_of(raw)]
    return {**keys, "layer_types": kinds}


def of_afmoe(raw: _Keys) -> _Keys:
    """Trinity (Arcee): experts beside shared ones but for the first layers; embeddings may be scaled.

    Raises ModelError for biases, which no published file asks for and which the gates of attention would not have.
    """
    if raw.get("attention_bias"):
        raise ModelError("attention_bias true is not supported; false is")
    keys = {"moe_intermediate_size": 1408, "num_experts": 64, "num_shared_experts": 2, "num_dense_layers": 1, **raw}
    keys |= {
        "first_k_dense_replace": keys["num_dense_layers"],
        "routed_scaling_factor": keys.get("route_scale", 1.0),
        "sliding_window_pattern": keys.get("global_attn_every_n_layers", 4),
    }
    check_number("hidden_size", raw["hidden_size"], int)
    scale = raw["hidden_size"] ** 0.5 if raw.get("mup_enabled") else 1.0
    return _of_counted_experts(keys) | {"embedding_multiplier": scale}


def of_flint(raw: _Keys) -> _Keys:
    """Flint: windows but for the first two layers, each fourth one and the last; the first two are dense."""
    last, kinds, dense = len(layers_of(raw)) - 1, raw.get("layer_types"), raw.get("mlp_only_layers")
    if kinds is None:
        sees_all = [layer < 2 or layer % 4 == 1 or layer == last for layer in layers_of(raw)]
        kinds = [_FULL if sees else _SLIDING for sees in sees_all]
    return {**raw, "layer_types": kinds, "mlp_only_layers": [0, 1] if dense is None else dense}


def with_dense_layers(keys: _Keys) -> dict[str, Any]:
    """Layers that a list calls dense are, whatever else the file says of them."""
    if keys.get("mlp_layer_types") is None:
        return {**keys}
    kinds = of_layers(keys, "mlp_layer_types")
    return {**keys, "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == "dense"]}

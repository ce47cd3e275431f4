"""config.json of families with layer normalization, in the words that families have in common. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.expert_files import with_dense_layers
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.layer_kinds import of_layers

_Keys = Mapping[str, Any]
_GPT_2 = {  # what the first of them called their sizes
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
_SCORES, _STRATEGIES = ("softmax", "sigmoid"), ("average", "sum")
_ALIKE = {"num_key_value_heads": None, "head_dim": None}  # keys without a meaning: heads are the width's


def with_layer_norm_eps(raw: _Keys) -> _Keys:
    """The number in norms."""
    return _renamed(raw, {"layer_norm_eps": "rms_norm_eps"})


def of_codegen(raw: _Keys) -> _Keys:
    """GPT-J and CodeGen: GPT-2's words, and so many dimensions of a head turn, by one base frequency."""
    keys = {"hidden_size": 4096, "num_attention_heads": 16, "rotary_dim": 64, **_renamed(raw, _GPT_2)}
    for name in ("hidden_size", "num_attention_heads", "rotary_dim"):
        check_number(name, keys[name], int)
    head_dim = keys["hidden_size"] // keys["num_attention_heads"]
    inner = keys.get("n_inner") or 4 * keys["hidden_size"]
    rope = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0}
    turning = keys["rotary_dim"] / head_dim
    return {**keys, **_ALIKE, **rope, "intermediate_size": inner, "partial_rotary_factor": turning}


def of_cohere(raw: _Keys) -> _Keys:
    """Cohere: logits are multiplied, and the number in its norms has a name of its own.

    So has how far a model reaches, where its files say for how many positions it was trained.
    """
    scale, trained = raw.get("logit_scale", 0.0625), raw.get("max_position_embeddings", 8192)
    reached = raw.get("model_max_length") or trained
    for name, value in (("max_position_embeddings", trained), ("model_max_length", reached)):
        check_number(name, value, int)
    check_number("logit_scale", scale, float)
    return {
        **raw,
        "logits_scaling": 1 / scale,
        "rms_norm_eps": raw.get("layer_norm_eps", 1e-5),
        "max_position_embeddings": max(trained, reached),
    }


def of_cohere_moe(raw: _Keys) -> _Keys:
    """Command A+: which of its first layers are dense, and have RoPE; what shared experts find may be averaged in.

    Raises ModelError for scores of experts, and ways to add up, that transformers does not know either.
    """
    for name, known in {"expert_selection_fn": _SCORES, "shared_expert_combination_strategy": _STRATEGIES}.items():
        if raw.get(name, known[0]) not in known:
            raise ModelError(f"{name} {raw[name]!r} is not supported; {' and '.join(known)} are")
    scores, num_shared = raw.get("expert_selection_fn", "softmax"), raw.get("num_shared_experts") or 0
    keys = {**of_cohere(raw), **_layers_of_cohere_moe(raw)}
    size, dense_size = raw["intermediate_size"], raw.get("prefix_dense_intermediate_size") or raw["intermediate_size"]
    return {
        **keys,
        "mlp_sizes": [dense_size] * len(keys["layer_types"]),
        "shared_expert_intermediate_size": num_shared * size or None,
        "averages_shared_expert": raw.get("shared_expert_combination_strategy", "average") == "average",
        "expert_scores": scores,
        "norm_topk_prob": scores == "softmax" or raw.get("norm_topk_prob", True),  # of those chosen alone
        "are_centered": raw.get("rms_norm_eps") is None,
        "rms_norm_eps": raw.get("rms_norm_eps") or keys["rms_norm_eps"],
    }


def _layers_of_cohere_moe(raw: _Keys) -> _Keys:
    """Kinds of attention, which layers turn, and which are dense: the first ones may be of a kind of their own."""
    layers, num_dense = layers_of(raw), raw.get("first_k_dense_replace") or 0
    every, every_dense = raw.get("sliding_window_pattern", 4), raw.get("prefix_dense_sliding_window_pattern", 1)
    for name, value in (("sliding_window_pattern", every), ("prefix_dense_sliding_window_pattern", every_dense)):
        check_number(name, value, int)
    if raw.get("layer_types") is not None:
        kinds = of_layers(raw, "layer_types")
    else:
        ends = [(i + 1) % every_dense if i < num_dense else (i - num_dense + 1) % every for i in layers]
        kinds = ["sliding_attention" if end else "full_attention" for end in ends]
    dense = with_dense_layers({**raw, "mlp_only_layers": list(range(num_dense))})["mlp_only_layers"]
    turns = [
        (kind == "sliding_attention" and raw.get("sliding_window", 4096) is not None)
        or (layer in dense and every_dense == 1)
        for layer, kind in enumerate(kinds)
    ]
    return {"layer_types": kinds, "mlp_only_layers": dense, "no_rope_layers": turns}


def of_falcon(raw: _Keys) -> _Keys:
    """Falcon: from 40B on key heads of groups and a norm for each block, before one key head for all.

    Raises ModelError for the ones whose scores have biases by distance instead of RoPE.
    """
    if raw.get("alibi"):
        raise ModelError("alibi true is not supported; Falcon models with RoPE are")
    names = {"n_embed": "hidden_size", "layer_norm_epsilon": "rms_norm_eps", "activation": "hidden_act"}
    keys = _renamed(raw, names)
    check_number("hidden_size", keys["hidden_size"], int)
    is_new, has_bias = bool(raw.get("new_decoder_architecture")), bool(raw.get("bias"))
    has_one_key_head = not is_new and raw.get("multi_query", True)
    return {
        **keys,
        "head_dim": None,
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * keys["hidden_size"],
        "num_key_value_heads": 1 if has_one_key_head else raw.get("num_kv_heads"),
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "norms": _norms_of_falcon(raw, is_new=is_new),
    }


def _norms_of_falcon(raw: _Keys, *, is_new: bool) -> str:
    if not is_new:
        return "beside" if raw.get("parallel_attn", True) else "pre"
    return "beside_own" if raw.get("num_ln_in_parallel_attn") in (None, 2) else "beside"


def of_gpt_neox(raw: _Keys) -> _Keys:
    """GPT-NeoX: its own names for RoPE; an MLP may be behind attention."""
    names = {"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    norms = "beside_own" if raw.get("use_parallel_residual", True) else "pre"
    return {**_renamed(raw, names), **_ALIKE, "norms": norms}


def of_nemotron4(raw: _Keys) -> _Keys:
    """Nemotron-4: the number in norms."""
    return _renamed(raw, {"norm_eps": "rms_norm_eps"})


def of_olmo(raw: _Keys) -> _Keys:
    """OLMo 1: the number in norms is in its code."""
    return {**raw, "rms_norm_eps": 1e-5}


def of_phi(raw: _Keys) -> _Keys:
    """Phi. Raises ModelError for norms of heads, which no published file asks for."""
    if raw.get("qk_layernorm"):
        raise ModelError("qk_layernorm true is not supported; false is")
    return with_layer_norm_eps(raw)


def of_stablelm(raw: _Keys) -> _Keys:
    """StableLM: biases and norms of heads, and whether the MLP stands beside attention."""
    names = {"layer_norm_eps": "rms_norm_eps", "use_qkv_bias": "attention_bias", "qk_layernorm": "use_qk_norm"}
    return {**_renamed(raw, names), "norms": "beside" if raw.get("use_parallel_residual") else "pre"}


def of_starcoder(raw: _Keys) -> _Keys:
    """StarCoder2: one key for the biases of all projections."""
    has_biases = bool(raw.get("use_bias", True))
    keys = _renamed(raw, {"norm_epsilon": "rms_norm_eps"})
    return {**keys, "attention_bias": has_biases, "mlp_bias": has_biases}


def _renamed(raw: _Keys, names: Mapping[str, str]) -> dict[str, Any]:
    """The same keys, those of a family under the common names; the number in norms has no name but its own."""
    others = {name: value for name, value in raw.items() if name not in names and name != "rms_norm_eps"}
    return others | {ours: raw[theirs] for theirs, ours in names.items() if theirs in raw}

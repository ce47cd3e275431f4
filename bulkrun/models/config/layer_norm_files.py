"""config.json of families with layer normalization, in the words that families have in common. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number

_Keys = Mapping[str, Any]
_GPT_2 = {  # what the first of them called their sizes
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
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
    """The same keys, those of a family under the common names."""
    return {names.get(name, name): value for name, value in raw.items()}

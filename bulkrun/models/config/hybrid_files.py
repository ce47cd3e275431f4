"""config.json of models of which some layers keep a state, in the words that families have in common. Torch-free.

Each function gives the file's keys with `linear_layers` beside them: of each layer whether it keeps a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.layer_kinds import of_layers

_Keys = Mapping[str, Any]
_FULL, _LINEAR = "full_attention", "linear_attention"  # transformers' words for the two
_SLIDING = "sliding_attention"
_NEMOTRON_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", _LINEAR: "mamba", _FULL: "attention"}
_NEMOTRON_MAMBA: Mapping[str, tuple[str, Any]] = {  # Granite's names: its own, what holds where the file has none
    "mamba_n_heads": ("mamba_num_heads", 128),
    "mamba_d_head": ("mamba_head_dim", 64),
    "mamba_d_state": ("ssm_state_size", 128),
    "mamba_n_groups": ("n_groups", 8),
    "mamba_d_conv": ("conv_kernel", 4),
    "mamba_conv_bias": ("use_conv_bias", True),
    "mamba_proj_bias": ("use_bias", False),
}
_LFM3_ROPE: _Keys = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def of_qwen(raw: _Keys) -> _Keys:
    """Qwen3-Next and Qwen3.5: a list of layer types, or every so many layers attend."""
    interval = raw.get("full_attention_interval", 4)
    check_number("full_attention_interval", interval, int)
    kinds = [_LINEAR if (layer + 1) % interval else _FULL for layer in layers_of(raw)]
    return {**raw, "linear_layers": _linear_layers(raw, kinds, _LINEAR)}


def of_olmo_hybrid(raw: _Keys) -> _Keys:
    """OLMo Hybrid: every fourth layer attends; positions play no role where RoPE's base frequency is null."""
    num_layers = len(layers_of(raw))
    kinds = [_LINEAR if layer % 4 != 3 else _FULL for layer in range(num_layers)]
    kinds = kinds if _FULL in kinds else [*kinds[:-1], _FULL]
    key_heads = raw.get("linear_num_key_heads") or raw["num_attention_heads"]
    key_head_dim = raw.get("linear_key_head_dim") or int(0.75 * raw["hidden_size"] / key_heads)
    rope = {"rope_theta": raw.get("rope_theta", 10_000.0), **(raw.get("rope_parameters") or {})}
    return {
        **raw,
        "rope_theta": rope["rope_theta"] or 10_000.0,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": raw.get("linear_num_value_heads") or raw["num_attention_heads"],
        "linear_key_head_dim": key_head_dim,
        "linear_value_head_dim": raw.get("linear_value_head_dim") or 2 * key_head_dim,
        "position_embedding_type": "none" if rope["rope_theta"] is None else "rope",
        "linear_layers": _linear_layers(raw, kinds, _LINEAR),
    }


def of_lfm2(raw: _Keys) -> _Keys:
    """LFM2: names of its own, the layers that attend by number, and an MLP narrower than it says."""
    layers = layers_of(raw)
    attends = raw.get("full_attn_idxs")
    kinds = [_FULL if attends is None or layer in attends else "conv" for layer in layers]
    return {
        **raw,
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
        "intermediate_size": _lfm2_width(raw),
        "linear_layers": _linear_layers(raw, kinds, "conv"),
    }


def of_lfm2_moe(raw: _Keys) -> _Keys:
    """The mixtures among LFM2: the first layers are dense, as wide as the file says."""
    dense = list(layers_of(raw)[: raw.get("num_dense_layers", 2)])
    return {**of_lfm2({**raw, "block_auto_adjust_ff_dim": False}), "mlp_only_layers": dense}


def of_lfm3(raw: _Keys) -> _Keys:
    """LFM3: as LFM2, and layers with a window whose RoPE is another one."""
    for key in ("use_sandwich_norm", "use_attention_gate"):
        if not raw.get(key, True):
            raise ModelError(f"{key} false is not supported; take a checkpoint with it")
    layers = layers_of(raw)
    kinds = ["conv", *(("full_attention", "conv", "sliding_attention", "conv")[(i - 2) % 4] for i in layers[1:])]
    found = {**raw, "layer_types": raw.get("layer_types") or kinds}
    return {
        **found,
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "rope_parameters": raw.get("rope_parameters") or _LFM3_ROPE,
        "sliding_layers": [kind == _SLIDING for kind in of_layers(found, "layer_types")],
        "linear_layers": _linear_layers(found, kinds, "conv", _FULL, _SLIDING),
    }


def of_granite(raw: _Keys) -> _Keys:
    """Granite 4.0: Mamba 2 in most layers or none, a shared MLP in each, and perhaps experts beside it."""
    return {
        **raw,
        "mamba_d_head": _mamba_head_dim(raw),
        "intermediate_size": raw.get("shared_intermediate_size", 1024),
        "shared_expert_intermediate_size": raw.get("shared_intermediate_size", 1024),
        "moe_intermediate_size": raw["intermediate_size"],
        "linear_layers": _linear_layers(raw, [_LINEAR] * len(layers_of(raw)), "mamba", "attention", _FULL),
    }


def of_bamba(raw: _Keys) -> _Keys:
    """Bamba: Mamba 2 but for the layers that attend, by number; half of their heads' dimensions turn."""
    attends = raw.get("attn_layer_indices") or ()
    kinds = [_FULL if layer in attends else _LINEAR for layer in layers_of(raw)]
    return {
        **raw,
        "mamba_d_head": _mamba_head_dim(raw),
        "partial_rotary_factor": 0.5,  # whatever the file says, as in transformers
        "linear_layers": _linear_layers({**raw, "layer_types": None}, kinds, _LINEAR),
    }


def of_falcon(raw: _Keys) -> _Keys:
    """Falcon-H1: attention and Mamba 2 beside each other in each layer, and multipliers of everything.

    What queries, keys and values are multiplied by is left to the scale of scores and to what attention finds. Raises
    ModelError for biases, which no published file asks for and which would be multiplied by less.
    """
    for name in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
        if raw.get(name):
            raise ModelError(f"{name} true is not supported in Falcon-H1; false is")
    before, keys = raw.get("attention_in_multiplier", 1.0), raw.get("key_multiplier", 1.0)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    state_in, gate_and_out = raw.get("ssm_in_multiplier", 1.0), raw.get("mlp_multipliers") or (1.0, 1.0)
    inner_size = raw.get("mamba_d_ssm", 1024)
    return {
        **raw,
        "mamba_d_head": _mamba_head_dim(raw, inner_size),
        "linear_layers": [True for _ in layers_of(raw)],
        "attention_multiplier": before * before * keys / head_dim**0.5,
        "attention_out": before * raw.get("attention_out_multiplier", 1.0),
        "state_out": raw.get("ssm_out_multiplier", 1.0),
        "state_parts": [state_in * one for one in raw.get("ssm_multipliers") or (1.0,) * 5],
        "mlp_gate": gate_and_out[0],
        "mlp_out": gate_and_out[1],
        "logits_scaling": 1.0 / raw.get("lm_head_multiplier", 1.0),
    }


def of_nemotron(raw: _Keys) -> _Keys:
    """Nemotron-H: each layer is one block, named by a letter or a word.

    transformers keeps the steps of prompts, and not those of outputs, above `time_step_min`; the code that the models
    were published with has no such limit. Raises ModelError for experts in groups and behind a narrower projection.
    """
    kinds = _nemotron_blocks(raw)
    if raw.get("moe_latent_size") or raw.get("n_group", 1) != 1:
        raise ModelError("moe_latent_size, and n_group other than 1, are not supported")
    return {
        **raw,
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "head_dim": raw.get("head_dim", raw.get("attention_head_dim", 128)),
        "hidden_act": raw.get("mlp_hidden_act", "relu2"),
        "position_embedding_type": "none",
        "linear_layers": [kind == "mamba" for kind in kinds],
        "mlp_alone": [kind in ("mlp", "moe") for kind in kinds],
        "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind != "moe"],
        "num_experts": raw.get("n_routed_experts", 8) if "moe" in kinds else 0,
        "shared_expert_intermediate_size": raw.get("moe_shared_expert_intermediate_size", 7688),
        **{ours: raw.get(theirs, default) for ours, (theirs, default) in _NEMOTRON_MAMBA.items()},
    }


def _mamba_head_dim(raw: _Keys, inner_size: int | None = None) -> int:
    """Of Mamba heads that `auto` makes as wide as all are together. Raises ModelError for others that are not."""
    inner_size = inner_size or raw.get("mamba_expand", 2) * raw["hidden_size"]
    num_heads, head_dim = raw.get("mamba_n_heads", 128), raw.get("mamba_d_head", "auto")
    head_dim = inner_size // num_heads if head_dim == "auto" else head_dim
    if num_heads * head_dim != inner_size:
        raise ModelError(f"{num_heads} Mamba heads of {head_dim} are not the {inner_size} that mamba_expand makes them")
    return int(head_dim)


def _nemotron_blocks(raw: _Keys) -> list[str]:
    """Each layer's: mamba, attention, mlp or moe. Raises ModelError for others, and where none attends."""
    pattern = raw.get("hybrid_override_pattern")
    given = raw.get("layers_block_type") or raw.get("layer_types") or pattern
    if given is None:
        raise ModelError("neither layers_block_type nor hybrid_override_pattern says what each layer is")
    kinds = [_NEMOTRON_BLOCKS.get(kind, kind) for kind in given]
    if others := {*kinds} - {*_NEMOTRON_BLOCKS.values()}:
        raise ModelError(f"layer type {min(others)!r} is not supported; mamba, attention, mlp and moe are")
    if "attention" not in kinds:
        raise ModelError(f"none of {len(kinds)} layers has attention, and at least one must have it")
    return kinds


def _lfm2_width(raw: _Keys) -> int:
    """The width of its MLPs: two thirds of what the file says, rounded up, where the file says that it be so."""
    width: int = raw["block_ff_dim"] if "block_ff_dim" in raw else raw["intermediate_size"]
    if not raw.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), raw.get("block_multiple_of", 256)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _linear_layers(raw: _Keys, default: Sequence[str], linear: str, *attends: str) -> tuple[bool, ...]:
    """By the file's layer types, or those that hold where it has none.

    `linear`, `attends`: what it calls layers with a state and layers that attend. Raises ModelError for types that are
    neither, and where no layer attends.
    """
    attends = attends or (_FULL,)
    kinds = default if raw.get("layer_types") is None else of_layers(raw, "layer_types")
    if others := {*kinds} - {linear, _LINEAR, *attends}:
        raise ModelError(f"layer type {min(others)!r} is not supported; {linear} and {attends[0]} are")
    if not {*kinds} & {*attends}:
        raise ModelError(f"none of {len(kinds)} layers has {attends[0]}, and at least one must have it")
    return tuple(kind not in attends for kind in kinds)

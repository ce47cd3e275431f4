"""config.json of models with Mamba's state spaces, in the words that families have in common. Torch-free.

Each function gives the file's keys with `linear_layers` beside them, as those of `hybrid_files` do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.hybrid_files import FULL, LINEAR, linear_layers

_Keys = Mapping[str, Any]
_NEMOTRON_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", LINEAR: "mamba", FULL: "attention"}
_NEMOTRON_MAMBA: Mapping[str, tuple[str, Any]] = {  # Granite's names: its own, what holds where the file has none
    "mamba_n_heads": ("mamba_num_heads", 128),
    "mamba_d_head": ("mamba_head_dim", 64),
    "mamba_d_state": ("ssm_state_size", 128),
    "mamba_n_groups": ("n_groups", 8),
    "mamba_d_conv": ("conv_kernel", 4),
    "mamba_conv_bias": ("use_conv_bias", True),
    "mamba_proj_bias": ("use_bias", False),
}
_OWN_NAMES_OF_MAMBA: Mapping[str, str] = {  # what Jamba and Granite call otherwise
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "time_step_rank": "mamba_dt_rank",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "layer_norm_epsilon": "rms_norm_eps",
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
}
_SIZES_OF_MAMBA = ("state_size", "conv_kernel", "time_step_rank", "n_groups")
_MAMBA2_HEADS = {"num_heads": 128, "head_dim": 64}


def of_granite(raw: _Keys) -> _Keys:
    """Granite 4.0: Mamba 2 in most layers or none, a shared MLP in each, and perhaps experts beside it."""
    return {
        **raw,
        "mamba_d_head": _mamba_head_dim(raw),
        "intermediate_size": raw.get("shared_intermediate_size", 1024),
        "shared_expert_intermediate_size": raw.get("shared_intermediate_size", 1024),
        "moe_intermediate_size": raw["intermediate_size"],
        "linear_layers": linear_layers(raw, [LINEAR] * len(layers_of(raw)), "mamba", "attention", FULL),
    }


def of_bamba(raw: _Keys) -> _Keys:
    """Bamba: Mamba 2 but for the layers that attend, by number; half of their heads' dimensions turn."""
    attends = raw.get("attn_layer_indices") or ()
    kinds = [FULL if layer in attends else LINEAR for layer in layers_of(raw)]
    return {
        **raw,
        "mamba_d_head": _mamba_head_dim(raw),
        "partial_rotary_factor": 0.5,  # whatever the file says, as in transformers
        "linear_layers": linear_layers({**raw, "layer_types": None}, kinds, LINEAR),
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


def of_jamba(raw: _Keys) -> _Keys:
    """Jamba: every so many layers attend, and every so many have experts, from one on. Raises ModelError for others."""
    attends, sparse = _every(raw, "attn", 8, 4), _every(raw, "expert", 2, 1)
    expand, hidden_size = raw.get("mamba_expand", 2), raw["hidden_size"]
    check_number("mamba_expand", expand, int)
    check_number("hidden_size", hidden_size, int)
    kinds = [FULL if has_attention else LINEAR for has_attention in attends]
    num_experts = raw.get("num_local_experts", raw.get("num_experts", 16))
    return {
        **{key: value for key, value in raw.items() if key != "num_local_experts"},
        "position_embedding_type": "none",
        "mamba_inner_size": expand * hidden_size,
        "num_experts": 0 if num_experts == 1 else num_experts,  # of one it is a dense MLP
        "norm_topk_prob": False,  # whatever the file says, as in transformers
        "mlp_only_layers": [layer for layer, has_experts in enumerate(sparse) if not has_experts],
        "linear_layers": linear_layers({**raw, "layer_types": None}, kinds, LINEAR),
    }


def of_mamba(raw: _Keys) -> _Keys:
    """Mamba: each layer is one block that keeps a state, and none attends."""
    expand, hidden_size = raw.get("expand", 2), raw.get("hidden_size", 768)
    check_number("expand", expand, float)
    check_number("hidden_size", hidden_size, int)
    inner_size = raw.get("intermediate_size") or int(expand * hidden_size)
    return {**_states_alone(raw, 32, inner_size), "mamba_inner_size": inner_size}


def of_mamba2(raw: _Keys) -> _Keys:
    """Mamba 2 alone, as Mamba."""
    for name, size in _MAMBA2_HEADS.items():
        check_number(name, raw.get(name, size), int)
    return _states_alone(raw, 64, math.prod(raw.get(name, size) for name, size in _MAMBA2_HEADS.items()))


def of_nemotron(raw: _Keys) -> _Keys:
    """Nemotron-H: each layer is one block, named by a letter or a word.

    transformers keeps the steps of prompts, and not those of outputs, above `time_step_min`; the code that the models
    were published with has no such limit. Raises ModelError for experts in groups and behind a narrower projection, and
    for another activation behind convolutions.
    """
    kinds = _nemotron_blocks(raw)
    if raw.get("moe_latent_size") or raw.get("n_group", 1) != 1:
        raise ModelError("moe_latent_size, and n_group other than 1, are not supported")
    if raw.get("mamba_hidden_act", "silu") != "silu":
        raise ModelError(f"mamba_hidden_act {raw['mamba_hidden_act']!r} is not supported; silu is")
    sizes = {theirs: int for theirs, default in _NEMOTRON_MAMBA.values() if not isinstance(default, bool)}
    _check_own(raw, {**sizes, "layer_norm_epsilon": float})
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


def _every(raw: _Keys, kind: str, period: int, offset: int) -> list[bool]:
    """Which layers have what Jamba says that every so many have. Raises ModelError for a period that is none."""
    period, offset = raw.get(f"{kind}_layer_period", period), raw.get(f"{kind}_layer_offset", offset)
    check_number(f"{kind}_layer_period", period, int)
    return [layer % period == offset for layer in layers_of(raw)]


def _states_alone(raw: _Keys, num_layers: int, inner_size: int) -> dict[str, Any]:
    """Of a model whose layers are one block each that keeps a state: so many, where the file says nothing."""
    _check_own(raw, {**dict.fromkeys(_SIZES_OF_MAMBA, int), "layer_norm_epsilon": float})
    others = {name: value for name, value in raw.items() if name not in _OWN_NAMES_OF_MAMBA and name != "rms_norm_eps"}
    keys = others | {ours: raw[theirs] for theirs, ours in _OWN_NAMES_OF_MAMBA.items() if theirs in raw}
    num_layers = len(layers_of({"num_hidden_layers": num_layers, **keys}))
    heads = {"num_attention_heads": 1, "num_key_value_heads": None, "head_dim": 2}  # of none
    return {
        **keys,
        **heads,
        "intermediate_size": inner_size,
        "position_embedding_type": "none",
        "linear_layers": [True] * num_layers,
        "mlp_alone": [False] * num_layers,
    }


def _check_own(raw: _Keys, kinds: Mapping[str, type[int] | type[float]]) -> None:
    """Raise ModelError for what is no number of its kind, by the file's own name: behind this it has another one."""
    for name, kind in kinds.items():
        if name in raw and (name, raw[name]) != ("time_step_rank", "auto"):
            check_number(name, raw[name], kind)


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

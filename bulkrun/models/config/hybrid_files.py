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
FULL, LINEAR = "full_attention", "linear_attention"  # transformers' words for the two
_SLIDING = "sliding_attention"
_LFM3_ROPE: _Keys = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def of_qwen(raw: _Keys) -> _Keys:
    """Qwen3-Next and Qwen3.5: a list of layer types, or every so many layers attend."""
    interval = raw.get("full_attention_interval", 4)
    check_number("full_attention_interval", interval, int)
    kinds = [LINEAR if (layer + 1) % interval else FULL for layer in layers_of(raw)]
    return {**raw, "linear_layers": linear_layers(raw, kinds, LINEAR)}


def of_olmo_hybrid(raw: _Keys) -> _Keys:
    """OLMo Hybrid: every fourth layer attends; positions play no role where RoPE's base frequency is null."""
    num_layers = len(layers_of(raw))
    kinds = [LINEAR if layer % 4 != 3 else FULL for layer in range(num_layers)]
    kinds = kinds if FULL in kinds else [*kinds[:-1], FULL]
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
        "linear_layers": linear_layers(raw, kinds, LINEAR),
    }


def of_lfm2(raw: _Keys) -> _Keys:
    """LFM2: names of its own, the layers that attend by number, and an MLP narrower than it says."""
    layers = layers_of(raw)
    attends = raw.get("full_attn_idxs")
    kinds = [FULL if attends is None or layer in attends else "conv" for layer in layers]
    return {
        **raw,
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
        "intermediate_size": _lfm2_width(raw),
        "linear_layers": linear_layers(raw, kinds, "conv"),
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
        "rms_norm_eps": raw.get("norm_eps", raw.get("rms_norm_eps", 1e-5)),
        "rope_parameters": raw.get("rope_parameters") or _LFM3_ROPE,
        "sliding_layers": [kind == _SLIDING for kind in of_layers(found, "layer_types")],
        "linear_layers": linear_layers(found, kinds, "conv", FULL, _SLIDING),
    }


def _lfm2_width(raw: _Keys) -> int:
    """The width of its MLPs: two thirds of what the file says, rounded up, where the file says that it be so."""
    width: int = raw["block_ff_dim"] if "block_ff_dim" in raw else raw["intermediate_size"]
    if not raw.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), raw.get("block_multiple_of", 256)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def linear_layers(raw: _Keys, default: Sequence[str], linear: str, *attends: str) -> tuple[bool, ...]:
    """By the file's layer types, or those that hold where it has none.

    `linear`, `attends`: what it calls layers with a state and layers that attend. Raises ModelError for types that are
    neither, and where no layer attends.
    """
    attends = attends or (FULL,)
    kinds = default if raw.get("layer_types") is None else of_layers(raw, "layer_types")
    if others := {*kinds} - {linear, LINEAR, *attends}:
        raise ModelError(f"layer type {min(others)!r} is not supported; {linear} and {attends[0]} are")
    if not {*kinds} & {*attends}:
        raise ModelError(f"none of {len(kinds)} layers has {attends[0]}, and at least one must have it")
    return tuple(kind not in attends for kind in kinds)

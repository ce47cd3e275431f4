"""Gemma 4's config.json in the words of the other families: layers differ in heads, keys and MLPs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.layer_kinds import of_layers
from bulkrun.models.config.layer_kv import layers_kv

_Keys = Mapping[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_VOCAB_SIZE = 262_144


def of_gemma4(raw: _Keys) -> _Keys:
    """Gemma 4 with what its small models and its mixture have beside the others."""
    found = {**of_gemma4_unified(raw), "num_experts": None}
    size, vocab_size = raw.get("hidden_size_per_layer_input", 256), raw.get("vocab_size_per_layer_input", _VOCAB_SIZE)
    if size:
        check_number("hidden_size_per_layer_input", size, int)
        check_number("vocab_size_per_layer_input", vocab_size, int)
        if vocab_size < raw.get("vocab_size", _VOCAB_SIZE):
            raise ModelError(
                f"vocab_size_per_layer_input is {vocab_size}, less than the vocabulary; download the model again"
            )
        found |= {"layer_input_size": size, "layer_input_vocab_size": vocab_size}
    if raw.get("enable_moe_block"):
        check_number("num_experts", raw.get("num_experts"), int)
        found |= {"num_experts": raw["num_experts"], "num_experts_per_tok": raw.get("top_k_experts")}
    return found


def of_gemma4_unified(raw: _Keys) -> _Keys:
    """Layers of full attention have heads of their own, the last layers keys of earlier ones and wider MLPs.

    Queries meet keys as they are, whatever the file says.
    """
    layers = layers_of(raw)
    kinds = [_SLIDING if (layer + 1) % 6 else _FULL for layer in layers]
    if raw.get("layer_types"):
        kinds = of_layers(raw, "layer_types")
    found = {**raw, "layer_types": [*kinds[:-1], _FULL]}  # the last one, whatever the file says
    if raw.get("use_bidirectional_attention") == "vision":  # of pictures, which are none of ours
        found["use_bidirectional_attention"] = None
    shapes = found | {"architectures": ["Gemma4ForCausalLM"]}
    heads, head_dim = raw.get("num_key_value_heads", 4), raw.get("head_dim", 256)
    kept = layers_kv(shapes, len(layers), heads, head_dim)
    is_shared = [kept is not None and kept[layer].source != layer for layer in layers]
    return found | {
        "query_pre_attn_scalar": 1,
        "layers_kv": kept,
        "keys_are_values": [bool(raw.get("attention_k_eq_v")) and kind == _FULL for kind in found["layer_types"]],
        "mlp_sizes": _mlp_sizes(raw, is_shared),
    }


def _mlp_sizes(raw: _Keys, is_shared: list[bool]) -> list[int]:
    """Each layer's: twice as wide, if the file says so, where keys are another layer's."""
    size, is_wide = raw["intermediate_size"], bool(raw.get("use_double_wide_mlp"))
    check_number("intermediate_size", size, int)
    return [2 * size if is_wide and shared else size for shared in is_shared]

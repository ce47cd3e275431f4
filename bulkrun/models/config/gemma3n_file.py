"""Gemma 3n's config.json in the words of the other families. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.layer_kinds import of_layers
from bulkrun.models.config.layer_kv import layers_kv

_Keys = Mapping[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULTS: _Keys = {  # transformers', of which the sizes are E4B's
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_kv_shared_layers": 15,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}
_OWN_SIZES = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "altup_num_inputs", "laurel_rank")
_FIXED = {"altup_active_idx": 0, "altup_correct_scale": True}  # in all published files
_NUM_SPARSE, _SPARSITY = 10, 0.95  # of layers, where the file does not say and there are more


def of_gemma3n(raw: _Keys) -> _Keys:
    """Widths and sparsity of MLPs may be each layer's own; queries meet keys as they are, whatever the file says.

    Raises ModelError for what no published file asks for.
    """
    raw = {**_DEFAULTS, **raw}
    for name, expected in _FIXED.items():
        if raw.get(name, expected) != expected:
            raise ModelError(f"{name} {raw[name]!r} is not supported; {expected} is")
    for name in _OWN_SIZES:
        check_number(name, raw[name], int)
    if raw["altup_num_inputs"] == 1:
        raise ModelError("altup_num_inputs 1 is not supported; two residual streams or more are")
    layers = layers_of(raw)
    kinds = [_SLIDING if (layer + 1) % 5 else _FULL for layer in layers]
    raw["layer_types"] = of_layers(raw, "layer_types") if raw.get("layer_types") else kinds
    shapes = raw | {"architectures": ["Gemma3nForCausalLM"]}
    sizes = _mlp_sizes(raw)
    return raw | {
        "query_pre_attn_scalar": 1,
        "layers_kv": layers_kv(shapes, len(layers), raw["num_key_value_heads"], raw["head_dim"]),
        "intermediate_size": max(sizes),
        "mlp_sizes": sizes,
        "mlp_sparsities": _mlp_sparsities(raw),
        "layer_input_size": raw["hidden_size_per_layer_input"],
        "layer_input_vocab_size": raw["vocab_size_per_layer_input"],
    }


def _mlp_sizes(raw: _Keys) -> list[int]:
    """Each layer's: one for all, or a list."""
    size, layers = raw["intermediate_size"], layers_of(raw)
    sizes = of_layers(raw, "intermediate_size") if isinstance(size, list) else [size for _ in layers]
    for one in sizes:
        check_number("intermediate_size", one, int)
    return sizes


def _mlp_sparsities(raw: _Keys) -> list[float]:
    """Which part of each layer's gates is to be zero."""
    name, layers = "activation_sparsity_pattern", layers_of(raw)
    if raw.get(name) is None:
        num_sparse = _NUM_SPARSE if len(layers) > _NUM_SPARSE else 0
        return [_SPARSITY if layer < num_sparse else 0.0 for layer in layers]
    values = of_layers(raw, name)
    for value in values:
        if not (isinstance(value, int | float) and 0 <= value < 1):
            raise ModelError(f"key {name!r} has {value!r}, not a part of 1; download the model again")
    return [float(value) for value in values]

"""Which of a decoder's layers have a window, and which turn their queries and keys. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number


def sliding_windows(keys: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window; None: full attention."""
    if "linear_layers" in keys and not keys.get("sliding_layers"):
        return (None,) * keys["num_hidden_layers"]
    window = keys.get("sliding_window")
    if not keys.get("use_sliding_window", True):
        window = None
    if window is not None:
        check_number("sliding_window", window, int)
    return tuple(window if slides else None for slides in _slides(keys))


def windows_both_ways(keys: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window where tokens see later ones too: those less than so many positions away, on either side.

    Gemma's files count both sides as one. Raises ModelError for windows of others, which are not known.
    """
    windows = sliding_windows(keys)
    if not keys.get("use_bidirectional_attention") and any(windows):
        raise ModelError("windows of attention that is_causal false makes both ways are not supported here")
    return tuple(None if window is None else window // 2 + 1 for window in windows)


def _slides(keys: Mapping[str, Any]) -> list[bool]:
    """Which layers have the window, where there is one."""
    layers = range(keys["num_hidden_layers"])
    if keys.get("sliding_layers"):
        return list(keys["sliding_layers"])
    if keys.get("layer_types") is not None:
        return [_is_sliding(kind) for kind in of_layers(keys, "layer_types")]
    if "max_window_layers" in keys:
        return [layer >= keys["max_window_layers"] for layer in layers]
    if "sliding_window_pattern" in keys:
        return [(layer + 1) % keys["sliding_window_pattern"] != 0 for layer in layers]
    if "no_rope_layers" in keys:
        return [not has_rope for has_rope in rope_layers(keys)]
    return [True for _ in layers]


def of_layers(keys: Mapping[str, Any], name: str) -> list[Any]:
    """A key's list with a value for each layer. One of a model that was cut by its number of layers may go on.

    Raises ModelError for a shorter one.
    """
    num_layers, values = keys["num_hidden_layers"], list(keys[name])
    if len(values) < num_layers:
        raise ModelError(f"key {name!r} has {len(values)} values for {num_layers} layers; download the model again")
    return values[:num_layers]


def _is_sliding(layer_type: str) -> bool:
    if layer_type not in ("full_attention", "sliding_attention"):
        raise ModelError(f"layer type {layer_type!r} is not supported; full_attention and sliding_attention are")
    return layer_type == "sliding_attention"


def rope_layers(keys: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers turn their queries and keys."""
    num_layers = keys["num_hidden_layers"]
    if keys.get("position_embedding_type", "rope") != "rope":
        return (False,) * num_layers
    if keys.get("rope_in_windows_alone") and keys.get("sliding_window") is not None:
        return tuple(_slides(keys))
    if "linear_layers" in keys and not keys.get("attends_beside_states"):
        return tuple(not is_linear for is_linear in keys["linear_layers"])
    if keys.get("no_rope_layers") is not None:  # despite its name, 1 is for layers with RoPE
        return tuple(bool(has_rope) for has_rope in of_layers(keys, "no_rope_layers"))
    interval = keys.get("no_rope_layer_interval", num_layers + 1)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))

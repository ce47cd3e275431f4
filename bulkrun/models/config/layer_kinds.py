"""Which of a decoder's layers have a window, and how they turn their queries and keys. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number
from bulkrun.models.config.latent import LatentConfig
from bulkrun.models.config.layer_kv import LayerKV
from bulkrun.models.config.rope import RopeConfig
from bulkrun.windows import Chunks, Window

FULL, CHUNKED = "full_attention", "chunked_attention"


def sliding_windows(keys: Mapping[str, Any]) -> tuple[Window | None, ...]:
    """Each layer's window, or chunks; None: full attention."""
    if "attention_chunk_size" in keys:
        return _chunks(keys)
    window = keys.get("sliding_window")
    if not keys.get("use_sliding_window", True):
        window = None
    if window is not None:
        check_number("sliding_window", window, int)
    return tuple(window if slides else None for slides in _slides(keys))


def _chunks(keys: Mapping[str, Any]) -> tuple[Chunks | None, ...]:
    """Of Llama 4: each layer's."""
    kinds, size = of_layers(keys, "layer_types"), keys["attention_chunk_size"]
    for kind in kinds:
        if kind not in (FULL, CHUNKED):
            raise ModelError(f"layer type {kind!r} is not supported; {FULL} and {CHUNKED} are")
    if CHUNKED in kinds:
        check_number("attention_chunk_size", size, int)
    return tuple(Chunks(size) if kind == CHUNKED else None for kind in kinds)


def windows_both_ways(keys: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window where tokens see later ones too: those less than so many positions away, on either side.

    Gemma's files count both sides as one. Raises ModelError for windows of others, which are not known.
    """
    windows = sliding_windows(keys)
    if not keys.get("use_bidirectional_attention") and any(windows):
        raise ModelError("windows of attention that is_causal false makes both ways are not supported here")
    return tuple(window // 2 + 1 if isinstance(window, int) else None for window in windows)


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

    Raises ModelError for a shorter one, and for what is no list.
    """
    num_layers, values = keys["num_hidden_layers"], keys[name]
    if not isinstance(values, list | tuple):
        raise ModelError(f"key {name!r} is {values!r}, not a list of a value for each layer; download the model again")
    if len(values) < num_layers:
        raise ModelError(f"key {name!r} has {len(values)} values for {num_layers} layers; download the model again")
    return list(values[:num_layers])


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


def layer_ropes(
    raw: Mapping[str, Any],
    of_file: Mapping[str, Any],
    keys: Mapping[str, Any],
    windows: tuple[Window | None, ...],
    head_dim: int,
) -> tuple[RopeConfig | None, ...]:
    """Each layer's rotary embedding: one for all, except where windowed layers have their own or layers have none.

    OLMo 3's windowed layers have the file's `rope_theta` without its scaling, as in the code that it was published
    with. transformers 5 reads the key for the other layers alone and gives these its default, which is what the
    published files say. Granite Swash may name each layer's base frequency, 0 for none.
    """
    if keys.get("layer_rope_theta") is not None:
        thetas = of_layers(keys, "layer_rope_theta")
        return tuple(
            _rope({**of_file, "rope_theta": theta}, keys, theta, head_dim) if theta else None for theta in thetas
        )
    has_rope = rope_layers(keys)
    if "rope_local_base_freq" not in keys:
        rope = _rope(of_file, keys, keys["rope_theta"], head_dim)
        return tuple(rope if has else None for has in has_rope)
    nested = raw.get("rope_parameters") or {}
    full = _rope(of_file, keys, keys["rope_theta"], head_dim)
    local_theta = keys["rope_local_base_freq"] or keys["rope_theta"]
    local = _rope(nested.get("sliding_attention") or {}, keys, local_theta, head_dim)
    ropes = [full if window is None else local for window in windows]
    return tuple(rope if has else None for rope, has in zip(ropes, has_rope, strict=True))


def of_heads(
    ropes: tuple[RopeConfig | None, ...], layers: tuple[LayerKV, ...] | None, latent: LatentConfig | None
) -> tuple[RopeConfig | None, ...]:
    """The same, each of its layer's heads where layers differ in them, or of the part of heads that turns."""
    if latent is not None:
        return tuple(rope and dataclasses.replace(rope, head_dim=latent.qk_rope_head_dim) for rope in ropes)
    if layers is None:
        return ropes
    pairs = zip(ropes, layers, strict=True)
    return tuple(rope and dataclasses.replace(rope, head_dim=kv.head_dim) for rope, kv in pairs)


def of_one_length(ropes: tuple[RopeConfig | None, ...]) -> tuple[RopeConfig | None, ...]:
    """The same where norms behind them undo what scaled ones multiply a head by."""
    return tuple(rope and dataclasses.replace(rope, attention_factor=1.0) for rope in ropes)


def _rope(rope: Mapping[str, Any], keys: Mapping[str, Any], theta: float, head_dim: int) -> RopeConfig:
    rope = {"partial_rotary_factor": keys.get("partial_rotary_factor"), **rope}
    config = RopeConfig.from_dict(rope, theta=theta, max_position_embeddings=keys["max_position_embeddings"])
    if config.partial_rotary_factor != 1.0 and "partial_rotary_factor" not in keys:
        raise ModelError(f"partial_rotary_factor {config.partial_rotary_factor} is not supported; 1.0 is")
    config.check_fits(head_dim)
    beta = rope.get("llama_4_scaling_beta") if keys.get("grows_queries") else None
    if not beta:
        return config
    check_number("llama_4_scaling_beta", beta, float)
    if not config.original_max_position_embeddings:
        raise ModelError("llama_4_scaling_beta needs yarn's original_max_position_embeddings; download the model again")
    return dataclasses.replace(config, query_growth=float(beta))

"""config.json of families with words of their own, in those that families have in common. Torch-free.

Mixtures of experts stand in `expert_files`, those of which some layers keep a state in `hybrid_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number, layers_of

_Keys = Mapping[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"


def of_ernie(raw: _Keys) -> _Keys:
    """ERNIE 4.5: one key for the biases of all projections."""
    has_biases = bool(raw.get("use_bias", False))
    return {**raw, "attention_bias": has_biases, "mlp_bias": has_biases}


def of_exaone(raw: _Keys) -> _Keys:
    """EXAONE 4: layers may be told by a word, L for those with a window and G for the others, which is repeated.

    The last layer has none, whatever its letter is.
    """
    pattern = raw.get("sliding_window_pattern")
    if not isinstance(pattern, str) or raw.get("layer_types") is not None:
        return raw
    if not pattern or {*pattern} - {*"LG"}:
        raise ModelError(
            f"key 'sliding_window_pattern' is {pattern!r}, not a word of L and G; download the model again"
        )
    layers = layers_of(raw)
    kinds = [_SLIDING if pattern[layer % len(pattern)] == "L" else _FULL for layer in layers]
    return {**raw, "layer_types": [*kinds[:-1], _FULL]}


def of_hunyuan(raw: _Keys) -> _Keys:
    """Hunyuan: what its files call dynamic RoPE has another base frequency, by `alpha`, and nothing else."""
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    kind, alpha = rope.get("rope_type") or rope.get("type"), rope.get("alpha")
    if kind != "dynamic" or not alpha:
        return raw
    check_number("alpha", alpha, float)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    theta *= alpha ** (head_dim / (head_dim - 2))
    return {**raw, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def with_full_fourths(raw: _Keys) -> _Keys:
    """Each fourth layer sees everything, from the first one on, where no list says otherwise."""
    if raw.get("layer_types") is not None:
        return raw
    return {**raw, "layer_types": [_SLIDING if layer % 4 else _FULL for layer in layers_of(raw)]}


def of_hyperclovax(raw: _Keys) -> _Keys:
    """HyperCLOVA X: Granite's words, but logits are multiplied and not divided.

    Raises ModelError for what no published file asks for.
    """
    for name, expected in {"use_post_norm": True, "residual_multiplier": 1.0}.items():
        if raw.get(name, expected) != expected:
            raise ModelError(f"{name} {raw[name]!r} is not supported; {expected} is")
    scaling, head_dim = raw.get("logits_scaling", 1.0), _head_dim(raw)
    check_number("logits_scaling", scaling, float)
    scale = raw.get("attention_multiplier")
    return {**raw, "logits_scaling": 1 / scaling, "attention_multiplier": head_dim**-0.5 if scale is None else scale}


def _head_dim(raw: _Keys) -> int:
    """Raises KeyError and ModelError for sizes that are missing or none."""
    if raw.get("head_dim") is not None:
        check_number("head_dim", raw["head_dim"], int)
        return int(raw["head_dim"])
    for name in ("hidden_size", "num_attention_heads"):
        check_number(name, raw[name], int)
    return int(raw["hidden_size"] // raw["num_attention_heads"])

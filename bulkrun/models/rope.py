"""The rotary embedding that a config.json asks for. Torch-free; `rotary_frequencies` turns it into numbers.

transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`. Both are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and long-context scaling of a model's rotary embedding."""

    theta: float = _DEFAULT_THETA
    rope_type: str = "default"
    factor: float = 1.0  # how many times the context was stretched
    original_max_position_embeddings: int = 0  # llama3, yarn: the context before that
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read the rope keys of a parsed config.json. Raises ModelError for a variant that is not in ROPE_TYPES."""
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ModelError(f"rope type {rope_type!r} is not supported; these are: {', '.join(ROPE_TYPES)}")
        partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise ModelError(f"partial_rotary_factor {partial} is not supported; 1.0 is")
        theta = float(rope.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_THETA)
        if rope_type == "default":
            return cls(theta=theta)
        original = (
            raw.get("original_max_position_embeddings")
            or rope.get("original_max_position_embeddings")
            or max_position_embeddings
        )
        factor = rope.get("factor") or max_position_embeddings / original
        return cls(
            theta=theta,
            rope_type=rope_type,
            factor=float(factor),
            original_max_position_embeddings=int(original),
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_yarn_attention_factor(rope, factor) if rope_type == "yarn" else 1.0,
        )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

"""The rotary embedding that a config.json asks for. Torch-free; `rotary_frequencies` turns it into numbers.

transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`, as model cards still do
for longer contexts. All are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_OLD_NAMES = {"su": "longrope"}
_NO_KEYS: Mapping[str, Any] = {}
_BESIDE_SCALING = ("partial_rotary_factor", "rope_theta")  # in the same keys, but not of the scaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and long-context scaling of a model's rotary embedding."""

    theta: float = 10_000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that turn
    factor: float = 1.0  # how many times the context was stretched
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope: the context before that
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosines and sines
    query_growth: float = 0.0  # yarn of Ministral 3: `rotary_frequencies.query_growth`, with this beta
    short_factor: tuple[float, ...] = ()  # longrope: divides each frequency, in contexts up to the original one
    head_dim: int | None = None  # of the heads that it turns, where a model has heads of several; None: the model's

    @classmethod
    def from_dict(cls, rope: Mapping[str, Any], *, theta: float, max_position_embeddings: int) -> RopeConfig:
        """Read one set of rope keys; `theta` is what holds where they name none.

        `max_position_embeddings` is the context after stretching. Raises ModelError for a variant not in ROPE_TYPES.
        """
        rope_type = _type_of(rope)
        if rope_type not in ROPE_TYPES:
            raise ModelError(f"rope type {rope_type!r} is not supported; these are: {', '.join(ROPE_TYPES)}")
        theta = float(rope.get("rope_theta") or theta)
        partial = float(rope.get("partial_rotary_factor") or 1.0)
        if rope_type in ("default", "dynamic"):  # which changes frequencies only beyond max_position_embeddings
            return cls(theta=theta, partial_rotary_factor=partial)
        if rope_type == "proportional":  # slower pairs stand still, and the others turn as if none did
            return cls(theta=theta, rope_type=rope_type, partial_rotary_factor=partial, factor=rope.get("factor", 1.0))
        original = rope.get("original_max_position_embeddings") or max_position_embeddings
        factor = rope.get("factor") or max_position_embeddings / original
        return cls(
            theta=theta,
            rope_type=rope_type,
            partial_rotary_factor=partial,
            factor=float(factor),
            original_max_position_embeddings=int(original),
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_attention_factor(rope, rope_type, factor, original),
            short_factor=tuple(rope.get("short_factor", ())),
        )

    def check_fits(self, head_dim: int) -> None:
        """Raise ModelError unless whole pairs of a head's dimensions turn, with longrope's factors one for each."""
        turning = int(head_dim * self.partial_rotary_factor)
        if not 0 < turning <= head_dim or turning % 2:
            raise ModelError(
                f"partial_rotary_factor {self.partial_rotary_factor} turns {turning} of a head's {head_dim} "
                "dimensions, and they turn in pairs; fix it"
            )
        if self.rope_type == "longrope" and len(self.short_factor) != turning // 2:
            raise ModelError(
                f"longrope's short_factor has {len(self.short_factor)} numbers, and {turning // 2} pairs of a head's "
                "dimensions turn; take the list of the model's own config.json"
            )

    @property
    def stretched_positions(self) -> int:
        """The original context times the factor; 0 for rope types other than linear and yarn."""
        return int(self.factor * self.original_max_position_embeddings) if self.rope_type in ("linear", "yarn") else 0


def rope_keys(raw: Mapping[str, Any], default: Mapping[str, Any] = _NO_KEYS) -> Mapping[str, Any]:
    """The rope keys of a parsed config.json, wherever its version of transformers put them, under today's names.

    Where windowed layers have their own: those of the others. `default`: of a file that has none.
    """
    parameters = raw.get("rope_parameters") or {}
    if not parameters and not raw.get("rope_scaling"):
        parameters = default
    rope = _scaled(parameters.get("full_attention") or parameters, raw.get("rope_scaling") or {})
    for name in _BESIDE_SCALING:
        if not rope.get(name) and raw.get(name) is not None:
            rope[name] = raw[name]
    if raw.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    return rope


def _scaled(parameters: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Both in one: `rope_scaling` wins, as in transformers. Somebody added it to stretch the context.

    Of another scaling nothing is left where it names its type; the base frequency is the model's own. There
    transformers 5 differs: where `rope_scaling` names none it takes a top-level `rope_theta`, or the architecture's
    default, and forgets the one that the model was trained with.
    """
    is_whole = scaling.get("rope_type") or scaling.get("type")
    kept = {name: value for name, value in parameters.items() if not is_whole or name in _BESIDE_SCALING}
    return kept | dict(scaling)


def max_positions(rope: Mapping[str, Any], given: int) -> int:
    """How far sequences reach with these rope keys, in a model whose config.json gives so many positions.

    yarn: as far as its factor takes the original context, since model cards add it and leave the number as it was.
    longrope changes every frequency once a sequence passes the original context, keys that are in a cache included:
    what a token's key is would depend on tokens after it. So it ends there.
    """
    rope_type, original = _type_of(rope), rope.get("original_max_position_embeddings")
    if rope_type == "longrope":
        return min(given, int(original or given))
    if rope_type == "yarn" and original and rope.get("factor"):
        return max(given, int(float(rope["factor"]) * original))
    return given


def _type_of(rope: Mapping[str, Any]) -> str:
    name = rope.get("rope_type") or rope.get("type") or "default"
    return "longrope" if "short_factor" in rope else _OLD_NAMES.get(name, name)


def _attention_factor(rope: Mapping[str, Any], rope_type: str, factor: float, original: int) -> float:
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope_type == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(factor, rope["mscale"]) / mscale(factor, rope["mscale_all_dim"])
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """What yarn multiplies by in a stretched context (Peng et al., arXiv 2309.00071), as much as `weight` says."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

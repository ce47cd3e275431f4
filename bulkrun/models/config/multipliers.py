"""Constants that embeddings, scores and a model's blocks are multiplied by. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.models.config.family import Family, check_number

_NAMES = ("attention_out", "state_out", "mlp_gate", "mlp_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Of what blocks find, and of the gates of MLPs before their activation (maximal update parametrization)."""

    attention_out: float
    state_out: float
    mlp_gate: float
    mlp_out: float


def multipliers_of(keys: Mapping[str, Any]) -> Multipliers | None:
    """Those that the keys of a config.json ask for, if any. Raises ModelError for what is no number above 0."""
    if "mlp_gate" not in keys:
        return None
    for name in _NAMES:
        check_number(name, keys[name], float)
    return Multipliers(**{name: float(keys[name]) for name in _NAMES})


def attention_scale(keys: Mapping[str, Any], head_dim: int) -> float:
    """Of the products of queries and keys."""
    if "attention_multiplier" in keys:
        return float(keys["attention_multiplier"])
    return 1.0 / math.sqrt(keys.get("query_pre_attn_scalar", head_dim))


def embedding_multiplier(keys: Mapping[str, Any], family: Family) -> float:
    """Of embeddings."""
    return float(keys["hidden_size"] ** 0.5 if family.scales_embeddings else keys.get("embedding_multiplier", 1.0))

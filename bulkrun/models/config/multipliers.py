"""Constants that a model's blocks are multiplied by (maximal update parametrization: Falcon-H1). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.models.config.family import check_number

_NAMES = ("attention_out", "state_out", "mlp_gate", "mlp_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Of what blocks find, and of the gates of MLPs before their activation."""

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

"""The short convolutions that a config.json asks for in the place of attention (LFM2). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number
from bulkrun.models.config.recurrence import Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig(Recurrence):
    """Sizes of gated convolutions: what a layer keeps of a sequence is their last inputs alone."""

    hidden_size: int
    has_biases: bool  # the convolution and both projections

    @property
    def conv_dim(self) -> int:
        """One channel for each number of a hidden state."""
        return self.hidden_size

    def projection_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """Inputs with a gate before and one after the convolution; the output."""
        return [(3 * hidden_size, hidden_size), (hidden_size, hidden_size)]


def short_conv_of(keys: Mapping[str, Any]) -> ShortConvConfig:
    """The convolutions that the keys of a config.json ask for. Raises ModelError for a width that is none."""
    check_number("conv_L_cache", keys["conv_L_cache"], int)
    if keys["conv_L_cache"] < 2:
        raise ModelError(f"key 'conv_L_cache' is {keys['conv_L_cache']}, and a convolution sees at least 2 tokens")
    return ShortConvConfig(
        hidden_size=keys["hidden_size"],
        has_biases=bool(keys["conv_bias"]),
        conv_width=keys["conv_L_cache"],
        layers=tuple(keys["linear_layers"]),
    )

"""The Mamba 2 layers that a config.json asks for in the place of attention. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number
from bulkrun.models.config.recurrence import Recurrence

_SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(Recurrence):
    """Sizes of Mamba 2's state spaces."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # of heads that share what is written to their states and what is read
    has_conv_bias: bool
    has_biases: bool  # both projections
    has_norm: bool = True  # behind the gate, or before it; else there is the gate alone
    norm_before_gate: bool = False
    part_multipliers: tuple[float, ...] | None = None  # of gates, inputs, what writes, what reads, and steps

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Of what the first projection gives: gates, inputs, what writes, what reads, and steps."""
        group_size = self.num_groups * self.state_size
        return self.inner_size, self.inner_size, group_size, group_size, self.num_heads

    @property
    def inner_size(self) -> int:
        """Of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Of all heads their inputs, of all groups what writes and what reads."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """A matrix for each head."""
        return self.num_heads, self.state_size, self.head_dim

    def projection_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """Gates, what goes through the convolution, a step for each head; the output."""
        outputs = self.inner_size + self.conv_dim + self.num_heads
        return [(outputs, hidden_size), (hidden_size, self.inner_size)]


def mamba2_of(keys: Mapping[str, Any]) -> Mamba2Config:
    """The layers that the keys of a config.json ask for, by Granite's names.

    Raises ModelError for sizes that do not fit, and for steps that are kept within limits.
    """
    for name in _SIZES:
        check_number(name, keys[name], int)
    num_heads, head_dim, state_size, num_groups, conv_width = (keys[name] for name in _SIZES)
    if num_heads % num_groups or conv_width < 2:
        raise ModelError(
            f"Mamba 2 of {num_heads} heads in {num_groups} groups behind a convolution over {conv_width} tokens is not "
            "supported; heads must be a multiple of groups, and tokens at least 2"
        )
    limits = [_number(one) for one in keys["time_step_limit"] or (0.0, math.inf)]
    if limits != [0.0, math.inf]:
        raise ModelError(f"key 'time_step_limit' is {limits}; only steps without limits, [0, Infinity], are supported")
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=num_groups,
        has_conv_bias=bool(keys["mamba_conv_bias"]),
        has_biases=bool(keys["mamba_proj_bias"]),
        has_norm=bool(keys.get("mamba_rms_norm", True)),
        norm_before_gate=bool(keys.get("mamba_norm_before_gate", False)),
        part_multipliers=tuple(keys["state_parts"]) if "state_parts" in keys else None,
        conv_width=conv_width,
        layers=tuple(keys["linear_layers"]),
    )


def _number(given: Any) -> Any:
    """What transformers 5 writes as an object, because JSON has no infinity."""
    return float(given["__float__"]) if isinstance(given, Mapping) else given

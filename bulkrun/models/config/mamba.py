"""The Mamba layers (the first kind) that a config.json asks for in the place of attention. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number
from bulkrun.models.config.recurrence import Recurrence

MambaNorms = Literal["none", "plain", "learned"]  # of steps in short, of what writes and of what reads
_SIZES = ("mamba_inner_size", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank")
_CHANNELS = 64  # that are worked on together, where they are so many


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(Recurrence):
    """Sizes of Mamba's selective state spaces."""

    inner_size: int  # channels
    state_size: int  # numbers of each
    step_rank: int  # numbers that the channels' steps are made of
    has_conv_bias: bool
    has_biases: bool  # the projections in and out
    norms: MambaNorms
    norm_eps: float  # of plain ones

    @property
    def conv_dim(self) -> int:
        """All channels."""
        return self.inner_size

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Consecutive channels stand as columns of one matrix."""
        together = math.gcd(self.inner_size, _CHANNELS)
        return self.inner_size // together, self.state_size, together

    @property
    def low_sizes(self) -> tuple[int, int, int]:
        """Of what tells how a token changes the state: its steps in short, what writes, what reads."""
        return self.step_rank, self.state_size, self.state_size

    def projection_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """Channels and their gates; the output."""
        return [(2 * self.inner_size, hidden_size), (hidden_size, self.inner_size)]


def mamba_of(keys: Mapping[str, Any]) -> MambaConfig:
    """The layers that the keys of a config.json ask for, by Jamba's names.

    Raises ModelError for sizes and numbers that are none.
    """
    rank = keys["mamba_dt_rank"]
    keys = {**keys, "mamba_dt_rank": math.ceil(keys["hidden_size"] / 16) if rank == "auto" else rank}
    for name in _SIZES:
        check_number(name, keys[name], int)
    check_number("mixer_rms_eps", keys["mixer_rms_eps"], float)
    if keys["mamba_d_conv"] < 2:
        raise ModelError("Mamba behind a convolution over 1 token is not supported; over at least 2 it is")
    return MambaConfig(
        inner_size=keys["mamba_inner_size"],
        state_size=keys["mamba_d_state"],
        step_rank=keys["mamba_dt_rank"],
        has_conv_bias=bool(keys["mamba_conv_bias"]),
        has_biases=bool(keys["mamba_proj_bias"]),
        norms=keys["mamba_norms"],
        norm_eps=float(keys["mixer_rms_eps"]),
        conv_width=keys["mamba_d_conv"],
        layers=tuple(keys["linear_layers"]),
    )

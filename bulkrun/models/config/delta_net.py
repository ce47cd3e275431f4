"""The gated delta nets that a config.json asks for in the place of attention. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number
from bulkrun.models.config.recurrence import Recurrence

_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig(Recurrence):
    """Sizes of gated delta nets (Qwen3.5, OLMo Hybrid), and in what they differ."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    beta_scale: float = 1.0  # see `ops.gated_delta_rule`
    norm_eps: float | None = None  # of the gated norm; None: as of the other norms

    @property
    def key_dim(self) -> int:
        """Of all key heads, which is that of all query heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """A matrix for each value head."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    def projection_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """Queries, keys, values and gates; the output."""
        return [(self.conv_dim + self.value_dim, hidden_size), (hidden_size, self.value_dim)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaConfig(DeltaNetConfig):
    """Of delta nets that forget channel by channel (Kimi Linear): as many key heads as value heads, of one size."""

    def projection_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """Queries, keys and values; the output. What decays and gates are made of is never quantized."""
        return [(self.conv_dim, hidden_size), (hidden_size, self.value_dim)]


def delta_net_of(keys: Mapping[str, Any], kind: type[DeltaNetConfig] = DeltaNetConfig) -> DeltaNetConfig:
    """The delta nets that the keys of a config.json ask for. Raises ModelError for sizes that do not fit."""
    for name in _SIZES:
        check_number(name, keys[name], int)
    num_key_heads, num_value_heads, key_head_dim, value_head_dim, conv_width = (keys[name] for name in _SIZES)
    if num_value_heads % num_key_heads or conv_width < 2:
        raise ModelError(
            f"delta nets of {num_value_heads} value heads over {num_key_heads} key heads behind a convolution over "
            f"{conv_width} tokens are not supported; value heads must be a multiple of key heads, and tokens at least 2"
        )
    return kind(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=key_head_dim,
        value_head_dim=value_head_dim,
        conv_width=conv_width,
        layers=tuple(keys["linear_layers"]),
        beta_scale=2.0 if keys.get("linear_allow_neg_eigval") else 1.0,
        norm_eps=keys.get("linear_norm_eps"),
    )


def kimi_delta_of(keys: Mapping[str, Any]) -> DeltaNetConfig:
    """The same, whose channels forget each at its own pace."""
    return delta_net_of(keys, KimiDeltaConfig)

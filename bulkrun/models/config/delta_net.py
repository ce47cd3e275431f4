"""The gated delta nets that a config.json asks for in the place of attention. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number
from bulkrun.models.config.layer_kinds import linear_layers

_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
STATE_ITEMSIZE = 4  # float32: what is added to it a thousand times must not be rounded each time


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Sizes of the layers that keep a state of one size for each sequence, and which layers these are."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int  # tokens that the convolution before it sees, the token itself included
    layers: tuple[bool, ...]  # per layer; the others have attention

    @property
    def key_dim(self) -> int:
        """Of all key heads, which is that of all query heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """What one layer keeps of a sequence: the convolution's last inputs, and a matrix for each value head."""
        conv = self.conv_width - 1, self.conv_dim
        return conv, (self.num_value_heads, self.key_head_dim, self.value_head_dim)

    def bytes_per_sequence(self, itemsize: int) -> int:
        """Bytes of one sequence's states over all layers; `itemsize` of the model's dtype."""
        conv, delta = self.state_shapes
        return sum(self.layers) * (math.prod(conv) * itemsize + math.prod(delta) * STATE_ITEMSIZE)

    @property
    def conv_dim(self) -> int:
        """Channels that go through the convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim


def delta_net_of(keys: Mapping[str, Any]) -> DeltaNetConfig | None:
    """The delta nets that the keys of a config.json ask for, if any. Raises ModelError for sizes that do not fit."""
    if "full_attention_interval" not in keys:
        return None
    for name in _SIZES:
        check_number(name, keys[name], int)
    num_key_heads, num_value_heads, key_head_dim, value_head_dim, conv_width = (keys[name] for name in _SIZES)
    if num_value_heads % num_key_heads or conv_width < 2:
        raise ModelError(
            f"delta nets of {num_value_heads} value heads over {num_key_heads} key heads behind a convolution over "
            f"{conv_width} tokens are not supported; value heads must be a multiple of key heads, and tokens at least 2"
        )
    return DeltaNetConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=key_head_dim,
        value_head_dim=value_head_dim,
        conv_width=conv_width,
        layers=linear_layers(keys),
    )

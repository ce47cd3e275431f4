"""What every kind of layer has that keeps a state of one size for each sequence in the place of keys. Torch-free."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

STATE_ITEMSIZE = 4  # float32: what is added to it a thousand times must not be rounded each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence(ABC):
    """A convolution over the last tokens and perhaps a matrix per head; which layers have it."""

    conv_width: int  # tokens that the convolution sees, the token itself included
    layers: tuple[bool, ...]  # per layer; the others have attention

    @property
    @abstractmethod
    def conv_dim(self) -> int:
        """Channels that go through the convolution."""

    @property
    def matrix_shape(self) -> tuple[int, int, int] | None:
        """Heads, rows and columns of the matrices that a layer keeps of a sequence, if it keeps any."""
        return None

    @abstractmethod
    def projection_shapes(self, hidden_size: int) -> list[tuple[int, int]]:
        """Outputs and inputs of a layer's projections, those aside that are never quantized."""

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of what a layer keeps of a sequence: the convolution's last inputs."""
        return self.conv_width - 1, self.conv_dim

    def bytes_per_sequence(self, itemsize: int) -> int:
        """Bytes of one sequence's states over all layers; `itemsize` of the model's dtype."""
        matrix = 0 if self.matrix_shape is None else math.prod(self.matrix_shape) * STATE_ITEMSIZE
        return sum(self.layers) * (math.prod(self.conv_shape) * itemsize + matrix)

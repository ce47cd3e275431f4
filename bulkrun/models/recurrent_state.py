"""What a layer of linear attention keeps of each sequence: of one size, in the sequence's permanent row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.host_memory import untouched_zeros

_STATE_DTYPE = torch.float32  # what is added to it a thousand times must not be rounded each time


@dataclass(slots=True)
class RecurrentState:
    """One layer's, of all rows. A sequence that begins finds there what the one before left, and takes it for zeros."""

    conv_RWC: torch.Tensor  # the last inputs of its convolution, in the model's dtype
    delta_RHDV: torch.Tensor  # a matrix for each value head, float32

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_rows: int, dtype: torch.dtype, device: torch.device | str
    ) -> list[RecurrentState]:
        """One for each layer of linear attention. On a CPU only rows that are used take memory.

        Raises what the allocator raises: torch.OutOfMemoryError on a GPU, OSError on a CPU.
        """
        shapes = _shapes(config)
        if shapes is None:
            return []
        num_layers, conv, delta = shapes
        device = torch.device(device)
        return [
            cls(_zeros((num_rows, *conv), dtype, device), _zeros((num_rows, *delta), _STATE_DTYPE, device))
            for _ in range(num_layers)
        ]

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows to others, int64 each; none is in both."""
        for rows in (self.conv_RWC, self.delta_RHDV):
            rows.index_copy_(0, target, rows[source])


def bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the states of one sequence take over all layers; 0 where there are none."""
    shapes = _shapes(config)
    if shapes is None:
        return 0
    num_layers, conv, delta = shapes
    return num_layers * (math.prod(conv) * dtype.itemsize + math.prod(delta) * _STATE_DTYPE.itemsize)


def _shapes(config: ModelConfig) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """How many layers have a state, and of one row the convolution's part and that of the delta rule."""
    net = config.delta_net if isinstance(config, DecoderConfig) else None
    if net is None:
        return None
    conv, delta = (net.conv_width - 1, net.conv_dim), (net.num_value_heads, net.key_head_dim, net.value_head_dim)
    return sum(net.layers), conv, delta


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return untouched_zeros(shape, dtype, huge_pages=True)
    return torch.zeros(shape, dtype=dtype, device=device)

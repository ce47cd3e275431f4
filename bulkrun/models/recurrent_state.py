"""What a layer of linear attention keeps of each sequence: of one size, in the sequence's permanent row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.models.config.delta_net import STATE_ITEMSIZE
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.host_memory import untouched_zeros

_STATE_DTYPE = torch.float32
assert _STATE_DTYPE.itemsize == STATE_ITEMSIZE


@dataclass(slots=True)
class RecurrentState:
    """One layer's, of all rows. A sequence that begins finds there what the one before left, and takes it for zeros."""

    conv_RWC: torch.Tensor  # the last inputs of its convolution, in the model's dtype
    delta_RHDV: torch.Tensor  # a matrix for each value head, float32

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        num_layers: int | None = None,
    ) -> list[RecurrentState]:
        """One for each layer of linear attention, or so many. On a CPU only rows that are used take memory.

        Raises what the allocator raises: torch.OutOfMemoryError on a GPU, OSError on a CPU.
        """
        net = config.delta_net if isinstance(config, DecoderConfig) else None
        if net is None:
            return []
        conv, delta = net.state_shapes
        device = torch.device(device)
        return [
            cls(_zeros((num_rows, *conv), dtype, device), _zeros((num_rows, *delta), _STATE_DTYPE, device))
            for _ in range(sum(net.layers) if num_layers is None else num_layers)
        ]

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows to others, int64 each; none is in both."""
        for rows in (self.conv_RWC, self.delta_RHDV):
            rows.index_copy_(0, target, rows[source])


def bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the states of one sequence take over all layers; 0 where there are none."""
    net = config.delta_net if isinstance(config, DecoderConfig) else None
    return 0 if net is None else net.bytes_per_sequence(dtype.itemsize)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return untouched_zeros(shape, dtype, huge_pages=True)
    return torch.zeros(shape, dtype=dtype, device=device)

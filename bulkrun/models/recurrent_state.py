"""What a layer that attends to nothing keeps of each sequence: of one size, in the sequence's permanent row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.recurrence import STATE_ITEMSIZE
from bulkrun.models.host_memory import untouched_zeros

_STATE_DTYPE = torch.float32
assert _STATE_DTYPE.itemsize == STATE_ITEMSIZE


@dataclass(slots=True)
class RecurrentState:
    """One layer's, of all rows. A sequence that begins finds there what the one before left, and takes it for zeros."""

    conv_RWC: torch.Tensor  # the last inputs of its convolution, in the model's dtype
    matrix_RHDV: torch.Tensor | None  # a matrix for each head, float32; some kinds have none

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
        """One for each layer that keeps one, or so many. On a CPU only rows that are used take memory.

        Raises what the allocator raises: torch.OutOfMemoryError on a GPU, OSError on a CPU.
        """
        kind = config.recurrence if isinstance(config, DecoderConfig) else None
        if kind is None:
            return []
        device, matrix = torch.device(device), kind.matrix_shape
        return [
            cls(
                _zeros((num_rows, *kind.conv_shape), dtype, device),
                None if matrix is None else _zeros((num_rows, *matrix), _STATE_DTYPE, device),
            )
            for _ in range(config.num_state_layers if num_layers is None else num_layers)
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a row has."""
        return [rows for rows in (self.conv_RWC, self.matrix_RHDV) if rows is not None]

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows to others, int64 each; none is in both."""
        for rows in self.tensors:
            rows.index_copy_(0, target, rows[source])


def bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the states of one sequence take over all layers; 0 where there are none."""
    kind = config.recurrence if isinstance(config, DecoderConfig) else None
    return 0 if kind is None else kind.bytes_per_sequence(dtype.itemsize)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return untouched_zeros(shape, dtype, huge_pages=True)
    return torch.zeros(shape, dtype=dtype, device=device)

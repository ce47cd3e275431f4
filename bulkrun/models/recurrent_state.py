"""What a layer of linear attention keeps of each sequence: of one size, in the sequence's permanent row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def copy_rows(states: Sequence[RecurrentState], copies: Iterable[tuple[int, int]]) -> None:
    """Copy rows to others in every layer, (source, target) each; no row is a source and a target.

    A launch for many tensors, and no memory besides: of a large model one row takes 49 MiB.
    """
    pairs = [*copies]
    for tensors in ([state.conv_RWC for state in states], [state.delta_RHDV for state in states]):
        targets = [rows[target] for rows in tensors for _, target in pairs]
        torch._foreach_copy_(targets, [rows[source] for rows in tensors for source, _ in pairs])


def bytes_per_row(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the states of one sequence take over all layers; 0 where there are none."""
    net = config.delta_net if isinstance(config, DecoderConfig) else None
    return 0 if net is None else net.bytes_per_sequence(dtype.itemsize)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return untouched_zeros(shape, dtype, huge_pages=True)
    return torch.zeros(shape, dtype=dtype, device=device)

"""The way of small host lists to the device: packed, in one copy that nobody waits for.

On a GPU the copy goes from pinned memory, or it would wait for the device. The pinned buffers are torch's: its
allocator hands one out again only when the copies from it are over, so that a step's buffer is never that of a step
under way and two or three of them go round. Knows no sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch


class HostStaging:
    """Sends lists of numbers to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"

    def send(self, *lists: Sequence[int]) -> list[torch.Tensor]:
        """Each list as an int64 tensor; all of them in one copy."""
        packed: list[int] = []
        sizes: list[int] = []
        for values in lists:
            padding = [0] * (len(values) % 2)  # to 16 bytes, or kernels would be compiled for odd addresses too
            packed += [*values, *padding]
            sizes += [len(values), len(padding)]
        return list(self._copy(array("q", packed), torch.int64).split(sizes)[::2])

    def send_array(self, values: array[int] | array[float], dtype: torch.dtype) -> torch.Tensor:
        """An array whose items are of `dtype`."""
        return self._copy(values, dtype)

    def send_tensor(self, host: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory."""
        return host.pin_memory().to(self._device, non_blocking=True) if self._pinned else host

    def _copy(self, values: array[int] | array[float], dtype: torch.dtype) -> torch.Tensor:
        if not values:
            return torch.empty(0, dtype=dtype, device=self._device)
        assert values.itemsize == dtype.itemsize, "the array's items are of another size"
        return self.send_tensor(torch.frombuffer(values, dtype=dtype))

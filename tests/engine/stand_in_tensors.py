"""Tensors of the stand-in for a CUDA device, and of the host for copies to it."""

from __future__ import annotations

import math
from typing import Any

import torch

_CUDA = torch.device("cuda", 0)


class DeviceTensor(torch.Tensor):
    """A tensor of the stand-in; ops on such give such."""

    device = property(lambda self: _CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


class PinnedTensor(torch.Tensor):
    """A tensor of the host in page-locked memory, from which a copy can be left to the device."""


def is_on_device(tensor: object) -> bool:
    """Whether it is a tensor of the stand-in."""
    return isinstance(tensor, DeviceTensor)


def on_device(result: Any) -> Any:
    """What an op gave, its tensors as the stand-in's."""
    if isinstance(result, torch.Tensor):
        return result if is_on_device(result) else result.as_subclass(DeviceTensor)
    if isinstance(result, (tuple, list)) and tensors_in(result):
        return type(result)(map(on_device, result))
    return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors of nested arguments."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def spoil(tensor: torch.Tensor) -> None:
    """NaN, or what is as wrong in any other type."""
    with torch._C.DisableTorchFunction():
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            tensor.fill_(math.nan)
        elif tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(1 if tensor.dtype is torch.bool else 0xFF)
        else:
            tensor.fill_(-1_234_567 if tensor.dtype.itemsize >= 4 else -12_345)

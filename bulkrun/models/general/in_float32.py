"""A model that computes in float32 whatever its weights are stored in, without room for a second copy of them.

Half-precision weights are float32 numbers too, so nothing about them changes: only the rounding between them is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_Spares = defaultdict[torch.Size, list[torch.Tensor]]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While it lasts, each layer has its weights in float32 as long as it runs, and so has everything beside them."""
    spares: _Spares = defaultdict(list)
    with ExitStack() as stack:
        for module, has_all in _parts(model):
            weights = _Weights([*module.parameters(recurse=has_all), *module.buffers(recurse=has_all)], spares)
            stack.callback(weights.restore)  # after an error, too
            stack.callback(module.register_forward_pre_hook(weights.widen).remove)
            stack.callback(module.register_forward_hook(weights.restore).remove)
        yield


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Layers, with all that is in them (a layer may read a part's weight itself), and other modules by themselves."""
    yield module, False
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, True) for layer in child)
        else:
            yield from _parts(child)


class _Weights:
    """The weights of one part of a model: stored, or in float32 for as long as it runs.

    Layers hand their float32 tensors on: new memory takes longer to get than to fill.
    """

    def __init__(self, tensors: list[torch.Tensor], spares: _Spares) -> None:
        self._tensors = [one for one in tensors if one.is_floating_point() and one.dtype != torch.float32]
        self._spares = spares
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widen(self, *_: Any) -> None:
        for tensor in self._tensors:
            spares = self._spares[tensor.shape]
            wide = spares.pop() if spares else torch.empty_like(tensor.data, dtype=torch.float32)
            self._stored.append((tensor, tensor.data))
            tensor.data = wide.copy_(tensor.data)

    def restore(self, *_: Any) -> None:
        while self._stored:
            tensor, data = self._stored.pop()
            self._spares[tensor.shape].append(tensor.data)
            tensor.data = data

"""Where a checkpoint's tensors go in the decoder's fused parameters: the views of one projection's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.decoder.norms import RMSNorm
from bulkrun.models.decoder.quantized_layers import FourBitWeights, QuantizedLinear
from bulkrun.ops.matmul.fp8 import raw_bytes


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes: a view of a parameter, broadcast over heads for the q and k norms.

    A view of as many numbers in other dimensions takes them in the tensor's order.
    """

    view: torch.Tensor
    shape: tuple[int, ...]  # what the checkpoint must hold
    offset: float = 0.0  # added to what it holds
    scale: torch.Tensor | None = None  # of each row, float32, where the view is quantized: its shape, but 1 for a row
    zero: torch.Tensor | None = None  # of codes: where their zero points go
    order: torch.Tensor | None = None  # int64: which of the tensor's rows each row of the view takes; None: its own

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """What a tensor holds for its rows, as the view has them."""
        if self.order is None:
            return rows
        return raw_bytes(rows)[self.order.to(rows.device)].view(rows.dtype)  # a GPU picks no rows of fp8

    @property
    def takes_codes(self) -> bool:
        """Whether the view is of codes of four bits, two to a byte, with scales of groups of inputs."""
        return self.view.dtype == torch.uint8

    def store_scales(self, scale: torch.Tensor, zero: torch.Tensor | None) -> None:
        """Put the scales and zero points of codes in their places: as many numbers, in the view's order."""
        assert self.scale is not None, "codes mean nothing without"
        self.scale.copy_(scale.reshape(self.scale.shape))
        if self.zero is not None and zero is not None:
            self.zero.copy_(zero.reshape(self.zero.shape))


class Places(NamedTuple):
    """The parts of a projection's weight, with the rows of outputs in the same dimensions."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    numbers: int  # in each item of the weight

    def each(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> Places:
        """What is chosen of every part."""
        scale, zero = (None if part is None else choose(part) for part in self[1:3])
        return Places(choose(self.weight), scale, zero, self.numbers)

    def target(self, shape: tuple[int, ...] | None = None, order: torch.Tensor | None = None) -> Target:
        """Where a tensor of this shape goes, or one of the weight's own, whose rows it may have in another order."""
        own = (*self.weight.shape[:-1], self.weight.shape[-1] * self.numbers)
        return Target(self.weight, shape or own, scale=self.scale, zero=self.zero, order=order)


Orders = Mapping[str, torch.Tensor]  # of the rows of a projection's parts, by their names
_AS_STORED: Orders = {}


def whole(parameter: nn.Parameter) -> Target:
    """For a tensor of the parameter's own shape."""
    return Target(parameter.data, tuple(parameter.shape))


def norm_target(norm: RMSNorm, config: DecoderConfig) -> Target:
    """For a norm's weight, which some families store less a constant."""
    return Target(norm.weight.data, tuple(norm.weight.shape), config.norm_offset)


def parts_of(
    prefix: str, fused: Linear | QuantizedLinear, sizes: Mapping[str, int], orders: Orders = _AS_STORED
) -> Iterator[tuple[str, Target]]:
    """The parts of a fused projection: consecutive rows of its weight and bias."""
    yield from weights_of(prefix, places_of(fused), sizes, orders)
    if fused.bias is not None:
        for name, part in zip(sizes, fused.bias.data.split(list(sizes.values())), strict=True):
            yield f"{prefix}{name}.bias", Target(part, tuple(part.shape), order=orders.get(name))


def weights_of(
    prefix: str, fused: Places, sizes: Mapping[str, int], orders: Orders = _AS_STORED
) -> Iterator[tuple[str, Target]]:
    """Consecutive rows of a weight, as many as each part has."""
    first = 0
    for name, size in sizes.items():
        rows = slice(first, first + size)
        yield f"{prefix}{name}.weight", fused.each(itemgetter(rows)).target(order=orders.get(name))
        first += size


def places_of(projection: Linear | ExpertLinear | QuantizedLinear) -> Places:
    """The weight, with what belongs to it where it is quantized."""
    weight = projection.weight.data
    if not isinstance(projection, QuantizedLinear):
        return Places(weight, None, None, 1)
    zero = projection.weight_zero if isinstance(projection, FourBitWeights) else None
    return Places(weight, projection.weight_scale, zero, projection.numbers_per_item)

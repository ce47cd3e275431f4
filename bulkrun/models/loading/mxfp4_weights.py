"""Experts' weights in MXFP4 as gpt-oss stores them: which tensors belong together, and their numbers into the model.

A weight [X, O, I] lies in two tensors: X.._blocks uint8 [X, O, I / 32, 16], two numbers to a byte, the first in the low
bits, and X.._scales uint8 [X, O, I / 32], the exponent of each block plus 127. A number is a sign, two bits of exponent
and one of mantissa (E2M1). Times its block's power of two that is a bfloat16, without rounding. The weight is
dequantized as it is read, some rows at a time. Format: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.mxfp4_quantization import BLOCK, CODEBOOK, METHOD
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.loading.expert_names import PACKED_EXPERTS
from bulkrun.models.loading.stored_quantized import FIX, not_quantized, store_dequantized
from bulkrun.models.loading.target import Target

_SCALES = "_scales"
_BIAS = 127  # of the stored exponents
_PIECE_NUMBERS = 2**18  # dequantized at a time


class Mxfp4Scale(NamedTuple):
    """The exponents of a weight's blocks, as they are stored: uint8 [X, O, I / 32]."""

    exponents: torch.Tensor

    def store(self, blocks: torch.Tensor, target: Target) -> None:
        """Dequantize a weight, given its blocks, to where it belongs, or keep it as it is where that is its place."""
        if target.takes_codes:
            target.view.copy_(blocks.view(target.view.shape))
            target.store_scales(self._scales(), None)
            return
        device = target.view.device
        stored = blocks.to(device, non_blocking=True), self.exponents.to(device)
        scales = [None] * len(blocks) if target.scale is None else list(target.scale)
        for view, scale, packed, exponents in zip(target.view, scales, *stored, strict=True):
            store_dequantized(_pieces(packed, exponents, view), Target(view, tuple(view.shape), scale=scale))

    def _scales(self) -> torch.Tensor:
        """float32, as the exponents lie."""
        return torch.ones(self.exponents.shape).ldexp_(self.exponents.int() - _BIAS)


class Mxfp4Weight(NamedTuple):
    """The tensors of a weight."""

    blocks: StoredTensor
    scales: StoredTensor


class Mxfp4Weights(NamedTuple):
    """A checkpoint's tensors by name, those of blocks with the shape of what they stand for."""

    tensors: Mapping[str, StoredTensor]
    scales: Mapping[str, Mxfp4Weight]  # by the name of the blocks
    has_cache_scales: bool = False

    def in_file(self, one: StoredTensor) -> StoredTensor:
        """What is to be read for one of the tensors."""
        packed = self.scales.get(one.name)
        return one if packed is None else packed.blocks

    def read_scales(self, wanted: Collection[str]) -> dict[str, Mxfp4Scale]:
        """What these weights are dequantized with, by name."""
        owners = {packed.scales.name: name for name, packed in self.scales.items() if name in wanted}
        stored = [self.scales[name].scales for name in owners.values()]
        return {owners[one.name]: Mxfp4Scale(scales) for one, scales in read_tensors(stored, lambda _: None)}


def mxfp4_weights(tensors: Mapping[str, StoredTensor], path: Path) -> Mxfp4Weights:
    """Sort a checkpoint's tensors. Raises ModelError where nothing is packed, or scales are missing or misshapen."""
    blocks = [one for name, one in tensors.items() if name.endswith(PACKED_EXPERTS)]
    if tensors and not blocks:
        raise not_quantized(path, METHOD, f"no tensor is called *{PACKED_EXPERTS}")
    scales = {one.name: Mxfp4Weight(one, _scales_of(one, tensors, path)) for one in blocks}
    used = {packed.scales.name for packed in scales.values()}
    plain = {name: one for name, one in tensors.items() if name not in used}
    plain |= {one.name: one._replace(shape=(*one.shape[:2], one.shape[2] * BLOCK)) for one in blocks}
    return Mxfp4Weights(plain, scales)


def _scales_of(blocks: StoredTensor, tensors: Mapping[str, StoredTensor], path: Path) -> StoredTensor:
    """The tensor of a weight's exponents; blocks and exponents are known to fit each other."""
    if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[3] != BLOCK // 2:
        raise ModelError(
            f"{path}: tensor {blocks.name} is {blocks.dtype} {list(blocks.shape)}, not blocks of {BLOCK // 2} bytes "
            f"[experts, outputs, blocks, {BLOCK // 2}]; {FIX}"
        )
    name = blocks.name.removesuffix(PACKED_EXPERTS) + _SCALES
    scales = tensors.get(name)
    if scales is None:
        raise ModelError(f"{path}: tensor {blocks.name} has no {name} beside it; {FIX}")
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
        raise ModelError(
            f"{path}: tensor {name} is {scales.dtype} {list(scales.shape)}, but the exponents of {blocks.name} are "
            f"torch.uint8 {list(blocks.shape[:3])}; {FIX}"
        )
    return scales


def _pairs(device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, bfloat16 in one int32 [256]: one look-up gives both."""
    numbers, byte = torch.tensor(CODEBOOK, dtype=torch.bfloat16, device=device), torch.arange(256, device=device)
    return torch.stack((numbers[byte & 15], numbers[byte >> 4]), -1).view(torch.int32).flatten()


def _pieces(packed: torch.Tensor, exponents: torch.Tensor, like: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """An expert's weight in bfloat16, some of its rows at a time, in the order of the place where it belongs."""
    rows, pairs = like.shape[:-1], _pairs(packed.device)  # of gates and ups two dimensions: there they are interleaved
    parts = packed.view(*rows, -1, BLOCK // 2), exponents.view(*rows, -1)
    step = max(1, _PIECE_NUMBERS // like[0].numel())
    for first in range(0, len(like), step):
        piece = slice(first, first + step)
        yield piece, _numbers(parts[0][piece], parts[1][piece], pairs)


def _numbers(packed: torch.Tensor, exponents: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """bfloat16 [..., I] of blocks [..., I / 32, 16] and their exponents."""
    numbers = pairs.index_select(0, packed.flatten().int()).view(torch.bfloat16).view(-1, BLOCK)
    one = torch.ones(exponents.numel(), dtype=torch.bfloat16, device=packed.device)
    return numbers.mul_(one.ldexp(exponents.flatten().int() - _BIAS)[:, None]).view(*packed.shape[:-2], -1)

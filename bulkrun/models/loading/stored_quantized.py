"""Weights of 8 bits as checkpoints store them: which tensor scales which, and both into the model's memory.

A scale belongs to a row of a weight, to all of it, or to a block; whatever it is called, it is multiplied with. Where
rows have one each and the weight's place is of its type, the bytes stay as they are. The rest is dequantized, rows at a
time: in float32, then rounded once to the model's dtype or quantized anew. Scales are read before the weights; they are
a thousandth of them. Knows no formats (`config.stored_quantization`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.stored_quantization import StoredQuantization
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.loading.quantization import store_quantized
from bulkrun.models.loading.target import Target
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.settings import Quantization

_DTYPES: Mapping[Quantization, torch.dtype] = {"fp8": FP8, "int8": torch.int8}
_SUFFIXES = ("_scale", "_scale_inv")  # after a weight's name; the second is DeepSeek's, and no inverse of it
_OF_INPUTS = re.compile(r"\.(input_(scale(_ub)?|zero_point)|activation_scale)$")  # ours are found for each token
_OF_CACHE = re.compile(r"\.([qkv]_scale|kv_scale|prob_(output_)?scale|[qkv]_proj\.(output|[kv])_scale)$")
_PIECE_NUMBERS = 2**22  # dequantized at a time
FIX = "download the model again, or use its bfloat16, float16 or float32 checkpoint"


class StoredScale(NamedTuple):
    """The scales of a weight [O, I]."""

    grid: torch.Tensor  # float32 [O, 1], [1, 1] or, with blocks, [blocks of rows, blocks of columns]
    block_size: tuple[int, int] | None

    def store(self, weight: torch.Tensor, target: Target) -> None:
        """Put the weight, 8 bits [O, I], where it belongs: as bytes in a place of its type if rows have scales."""
        device = target.view.device
        grid, weight = self.grid.to(device), weight.to(device, non_blocking=True)
        if target.view.dtype == weight.dtype and target.scale is not None and self.block_size is None:
            target.view.copy_(target.ordered(weight))
            target.scale.copy_(target.ordered(grid.expand(len(weight), 1)))
        else:
            store_dequantized(_dequantized(weight, StoredScale(grid, self.block_size)), target)


class StoredWeights(NamedTuple):
    """A checkpoint's tensors by name, without those that belong to the quantization of others."""

    tensors: Mapping[str, StoredTensor]
    scales: Mapping[str, StoredTensor]  # by the name of the tensor of 8 bits that they scale
    block_size: tuple[int, int] | None
    has_cache_scales: bool

    def in_file(self, one: StoredTensor) -> StoredTensor:
        """What is to be read for one of the tensors: itself."""
        return one

    def read_scales(self, wanted: Collection[str]) -> dict[str, StoredScale]:
        """The scales of these tensors, of those that have some, by name."""
        owners = {scale.name: name for name, scale in self.scales.items() if name in wanted}
        stored = [self.scales[name] for name in owners.values()]
        return {
            owners[one.name]: StoredScale(scale.float().reshape(_grid_shape(scale, self.block_size)), self.block_size)
            for one, scale in read_tensors(stored, lambda _: None)
        }


def with_scales(tensors: Mapping[str, StoredTensor], stored: StoredQuantization | None, path: Path) -> StoredWeights:
    """Sort a checkpoint's tensors; `stored` is what config.json says of them.

    Raises ModelError where the two contradict each other, or a scale is missing or of another shape than its weight's.
    """
    quantized = [one for one in tensors.values() if _is_quantized(one, stored)]
    if stored is None and not quantized:
        return StoredWeights(tensors, {}, None, False)
    if stored is None:
        raise ModelError(
            f"{path}: tensor {quantized[0].name} holds {quantized[0].dtype}, and config.json has no "
            f"quantization_config that says how it is meant; {FIX}"
        )
    if not quantized and tensors:
        raise not_quantized(path, stored.method, _without_quantized(tensors, stored))
    scales = {one.name: _scale_of(one, tensors, stored, path) for one in quantized}
    used = {scale.name for scale in scales.values()}
    kept, has_cache_scales = without_other_scales({name: one for name, one in tensors.items() if name not in used})
    _refuse_idle_scales(kept, path)
    return StoredWeights(kept, scales, stored.block_size, has_cache_scales)


def not_quantized(path: Path, method: str, lack: str) -> ModelError:
    """The error for a checkpoint that is not what its config.json says; `lack`: what there is not."""
    return ModelError(
        f"{path}: config.json says that weights are quantized with {method}, but {lack}; remove quantization_config "
        "from config.json if they have been dequantized, or download the model again"
    )


def store_dequantized(pieces: Iterable[tuple[slice, torch.Tensor]], target: Target) -> None:
    """Put a weight's rows where they belong, rounded to the place's dtype or, where it has scales, quantized anew."""
    if target.order is not None:
        pieces = [(slice(None), target.ordered(torch.cat([piece for _, piece in pieces])))]
    for rows, piece in pieces:
        if target.scale is None:
            target.view[rows].copy_(piece)
        else:
            store_quantized(piece, target.view[rows], target.scale[rows])


def without_other_scales(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], bool]:
    """The tensors without the scales of inputs, keys and values, which are not used; were there any of the last?"""
    rest = {name: one for name, one in tensors.items() if not _OF_INPUTS.search(name)}
    kept = {name: one for name, one in rest.items() if not _OF_CACHE.search(name)}
    return kept, len(kept) < len(rest)


def _dequantized(weight: torch.Tensor, scale: StoredScale) -> Iterator[tuple[slice, torch.Tensor]]:
    """The weight in float32, some whole blocks of rows at a time."""
    num_rows, num_columns = weight.shape
    grid = scale.grid if scale.block_size is not None else scale.grid.expand(num_rows, 1)
    block_rows, block_columns = scale.block_size or (1, num_columns)
    step = max(1, _PIECE_NUMBERS // (block_rows * num_columns))  # in blocks
    for first in range(0, len(grid), step):
        rows = slice(first * block_rows, min((first + step) * block_rows, num_rows))
        piece = weight[rows].float()
        by_row = grid[first : first + step].repeat_interleave(block_rows, 0)[: len(piece)]
        in_columns = by_row if grid.shape[1] == 1 else by_row.repeat_interleave(block_columns, 1)[:, :num_columns]
        yield rows, piece.mul_(in_columns)


def _is_quantized(one: StoredTensor, stored: StoredQuantization | None) -> bool:
    """By its type; one of whole numbers is a weight only where config.json says that there are such."""
    is_weight = one.dtype.is_floating_point or (stored is not None and one.name.endswith(".weight"))
    return one.dtype.itemsize == 1 and is_weight


def _scale_of(
    weight: StoredTensor, tensors: Mapping[str, StoredTensor], stored: StoredQuantization, path: Path
) -> StoredTensor:
    """The tensor with the scales of one of 8 bits, known to fit it."""
    if weight.dtype != _DTYPES[stored.kind] or len(weight.shape) != 2:
        raise ModelError(
            f"{path}: tensor {weight.name} holds {weight.dtype} {list(weight.shape)}, and what is read in 8 bits are "
            f"matrices of {_DTYPES[stored.kind]}; {FIX}"
        )
    names = [weight.name + suffix for suffix in _SUFFIXES]
    scale = next((tensors[name] for name in names if name in tensors), None)
    if scale is None:
        missing = " or ".join(names)
        raise ModelError(f"{path}: tensor {weight.name} holds {stored.kind}, and its {missing} is missing; {FIX}")
    num_rows, num_columns = weight.shape
    shapes: list[tuple[int, ...]] = [(num_rows, 1), (num_rows,), (1,), (1, 1), ()]
    if stored.block_size is not None:
        rows, columns = stored.block_size
        shapes = [(-(-num_rows // rows), -(-num_columns // columns))]
    if scale.shape not in shapes or not scale.dtype.is_floating_point or scale.dtype.itemsize == 1:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelError(
            f"{path}: tensor {scale.name} is {scale.dtype} {list(scale.shape)}, but the scales of {weight.name} "
            f"{list(weight.shape)} are {expected}, by config.json; {FIX}"
        )
    return scale


def _grid_shape(scale: torch.Tensor, block_size: tuple[int, int] | None) -> tuple[int, ...]:
    return tuple(scale.shape) if block_size is not None else (scale.numel(), 1)


def _without_quantized(tensors: Mapping[str, StoredTensor], stored: StoredQuantization) -> str:
    """What a checkpoint lacks that should be quantized, by its first such weight."""
    matrices = [one for name, one in tensors.items() if name.endswith(".weight") and len(one.shape) == 2]
    expected = (one for one in matrices if stored.quantizes(one.name.removesuffix(".weight")) and "layers." in one.name)
    example = next(expected, next(iter(tensors.values())))
    return f"no tensor holds {stored.kind} ({example.name} holds {example.dtype})"


def _refuse_idle_scales(tensors: Mapping[str, StoredTensor], path: Path) -> None:
    """Raise ModelError for a scale beside a weight that is not quantized: nobody can tell whether it was applied."""
    pairs = ((name, name.removesuffix(suffix)) for name in tensors for suffix in _SUFFIXES if name.endswith(suffix))
    for name, weight in pairs:
        if weight in tensors:
            raise ModelError(
                f"{path}: tensor {weight} holds {tensors[weight].dtype}, and there is a scale for it ({name}); {FIX}"
            )

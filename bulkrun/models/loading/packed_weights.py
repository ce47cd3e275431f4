"""Packed weights in a checkpoint: which tensors make up a weight, and whether they fit each other.

A packed weight goes by its plain name and shape, X.weight [O, I]; behind it stand its words, its scales and, where
there are any, zero points and each input's group. All but the words are read before; they are a thirtieth of them.
What they stand for: `packed_scale`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.packed_quantization import Layout, PackedQuantization
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.loading.packed_scale import PackedScale
from bulkrun.models.loading.packed_words import WORD_BITS
from bulkrun.models.loading.stored_quantized import FIX, not_quantized, without_other_scales

_SIZE = "weight_shape"  # compressed-tensors': [O, I]

_FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_WHOLE = (torch.int32, torch.int64)


class _Names(NamedTuple):
    words: str
    scales: str
    zeros: str
    groups: str


_NAMES: Mapping[Layout, _Names] = {
    "gptq": _Names("qweight", "scales", "qzeros", "g_idx"),
    "awq": _Names("qweight", "scales", "qzeros", "g_idx"),
    "compressed": _Names("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}


class PackedWeight(NamedTuple):
    """The tensors of a weight [O, I]."""

    words: StoredTensor
    shape: tuple[int, int]
    scales: StoredTensor
    zeros: StoredTensor | None
    groups: StoredTensor | None

    @property
    def sides(self) -> list[StoredTensor]:
        """All but its words."""
        return [one for one in (self.scales, self.zeros, self.groups) if one is not None]


class PackedWeights(NamedTuple):
    """A checkpoint's tensors by name, a packed weight's as if it were a plain one."""

    tensors: Mapping[str, StoredTensor]
    scales: Mapping[str, PackedWeight]  # of those that are packed, by name
    packing: PackedQuantization
    has_cache_scales: bool

    def in_file(self, one: StoredTensor) -> StoredTensor:
        """What is to be read for one of the tensors, under its name."""
        packed = self.scales.get(one.name)
        return one if packed is None else packed.words._replace(name=one.name)

    def read_scales(self, wanted: Collection[str]) -> dict[str, PackedScale]:
        """What these weights are dequantized with, by name. Raises ModelError for inputs of no group."""
        chosen = {name: packed for name, packed in self.scales.items() if name in wanted}
        stored = [side for packed in chosen.values() for side in packed.sides]
        read = {one.name: tensor for one, tensor in read_tensors(stored, lambda _: None)}
        return {name: self._scale(packed, read) for name, packed in chosen.items()}

    def _scale(self, packed: PackedWeight, read: Mapping[str, torch.Tensor]) -> PackedScale:
        scales, zeros = read[packed.scales.name], packed.zeros and read[packed.zeros.name]
        group_size, inputs = self.packing.group_size or packed.shape[1], torch.arange(packed.shape[1])
        in_order = inputs // group_size
        groups = in_order if packed.groups is None else read[packed.groups.name].long()
        if (groups == -1).all():  # compressed-tensors' word for none
            groups = in_order
        if groups.min() < 0 or groups.max() > in_order[-1]:
            name = packed.scales.name if packed.groups is None else packed.groups.name
            raise ModelError(
                f"{packed.words.file}: tensor {name} names group {int(groups.min())} to {int(groups.max())}, but the "
                f"groups are 0 to {int(in_order[-1])}; {FIX}"
            )
        self._check_zeros(packed, zeros)
        is_plain = torch.equal(groups, in_order) and packed.shape[1] % group_size == 0
        return PackedScale(self.packing, packed.shape, scales, zeros, None if is_plain else groups)

    def _check_zeros(self, packed: PackedWeight, zeros: torch.Tensor | None) -> None:
        """Raise ModelError for zero points, stored around zero, that are none of the weight's numbers."""
        if zeros is None or zeros.dtype != torch.int8:
            return
        middle = 2 ** (self.packing.num_bits - 1)
        low, high = int(zeros.min()), int(zeros.max())  # compared as int8, 128 would be -128
        if not -middle <= low <= high < middle:
            raise ModelError(
                f"{packed.words.file}: tensor {packed.zeros and packed.zeros.name} holds zero points {low} to {high}, "
                f"but numbers of {self.packing.num_bits} bits are {-middle} to {middle - 1}; {FIX}"
            )


def packed_weights(tensors: Mapping[str, StoredTensor], packing: PackedQuantization, path: Path) -> PackedWeights:
    """Sort a checkpoint's tensors; `packing` is what config.json says of them.

    Raises ModelError where the two contradict each other, or where scales and the like are missing or misshapen.
    """
    ending = f".{_NAMES[packing.layout].words}"
    modules = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    if tensors and not modules:
        raise not_quantized(path, packing.method, f"no tensor is called *{ending}")
    checkpoint = _Checkpoint(tensors, packing, path)
    sizes = checkpoint.sizes(modules) if packing.layout == "compressed" else {}
    scales = {f"{module}.weight": checkpoint.weight(module, sizes.get(module)) for module in modules}
    used = {side.name for packed in scales.values() for side in packed.sides} | {f"{name}.{_SIZE}" for name in sizes}
    plain: dict[str, StoredTensor] = {}
    for name, one in tensors.items():
        if name.endswith(ending):
            weight = f"{name.removesuffix(ending)}.weight"
            plain[weight] = one._replace(name=weight, shape=scales[weight].shape)
        elif name not in used:
            plain[name] = one
    kept, has_cache_scales = without_other_scales(plain)
    return PackedWeights(kept, scales, packing, has_cache_scales)


class _Checkpoint(NamedTuple):
    """The tensors of a checkpoint in `path` by name, and how its weights are packed."""

    tensors: Mapping[str, StoredTensor]
    packing: PackedQuantization
    path: Path

    def sizes(self, modules: Sequence[str]) -> dict[str, tuple[int, int]]:
        """[O, I] of each module's weight, where tensors say it: its last words may be padded."""
        stored = [self._side(module, _SIZE, [(2,)], _WHOLE) for module in modules]
        read = read_tensors(stored, lambda _: None)
        return {module: tuple(size.tolist()) for module, (_, size) in zip(modules, read, strict=True)}

    def weight(self, module: str, size: tuple[int, int] | None) -> PackedWeight:
        """The tensors of a module's weight, known to fit each other; `size`: what a tensor says of it."""
        names, packing = _NAMES[self.packing.layout], self.packing
        if f"{module}.weight" in self.tensors:
            raise ModelError(f"{self.path}: there are both {module}.weight and {module}.{names.words}; {FIX}")
        words = self.tensors[f"{module}.{names.words}"]
        shape = self._shape(words, size)
        grids, packed_grid = _grids(packing, shape)
        scales = self._side(module, names.scales, grids, _FLOATING)
        zeros = self.tensors.get(f"{module}.{names.zeros}")
        if packing.has_zeros or zeros is not None:
            is_packed = zeros is None or zeros.dtype != torch.int8 or packing.layout != "compressed"
            expected = ([packed_grid], (torch.int32,)) if is_packed else (grids, (torch.int8,))
            zeros = self._side(module, names.zeros, *expected)
        groups = self.tensors.get(f"{module}.{names.groups}")
        if groups is not None:
            groups = self._side(module, names.groups, [shape[1:]], _WHOLE)
        return PackedWeight(words, shape, scales, zeros, groups)

    def _shape(self, words: StoredTensor, size: tuple[int, int] | None) -> tuple[int, int]:
        """[O, I] of a weight, given its words."""
        num_bits, per_word = self.packing.num_bits, WORD_BITS // self.packing.num_bits
        if words.dtype != torch.int32 or len(words.shape) != 2 or 0 in words.shape:
            what = f"{words.dtype} {list(words.shape)}, not words of int32"
            raise ModelError(f"{self.path}: tensor {words.name} is {what}; {FIX}")
        if size is not None and words.shape != (size[0], -(-size[1] // per_word)):
            raise ModelError(
                f"{self.path}: tensor {words.name} is {list(words.shape)}, which with {num_bits} bits is no weight of "
                f"{list(size)}, as its {_SIZE} says; {FIX}"
            )
        high, wide = words.shape
        along_outputs = self.packing.layout == "awq"
        return size or ((wide * per_word, high) if along_outputs else (wide, high * WORD_BITS // num_bits))

    def _side(
        self, module: str, suffix: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[torch.dtype, ...]
    ) -> StoredTensor:
        """The tensor of that name beside a weight's words."""
        found = self.tensors.get(f"{module}.{suffix}")
        if found is None:
            raise ModelError(f"{self.path}: the packed weight of {module} has no {module}.{suffix}; {FIX}")
        if found.shape not in shapes or found.dtype not in dtypes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ModelError(
                f"{self.path}: tensor {found.name} is {found.dtype} {list(found.shape)}, but by config.json and the "
                f"weight's words it is {expected} of {types}; {FIX}"
            )
        return found


def _grids(packing: PackedQuantization, shape: tuple[int, int]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The shapes that the scales of a weight [O, I] may have, and that of its packed zero points."""
    num_groups = -(-shape[1] // (packing.group_size or shape[1]))
    packed_rows = -(-shape[0] * packing.num_bits // WORD_BITS)
    if packing.layout != "compressed":
        return [(num_groups, shape[0])], (num_groups, packed_rows)
    whole: list[tuple[int, ...]] = [(shape[0],), (1,), (1, 1), ()]
    return [(shape[0], num_groups)] + (whole if packing.group_size is None else []), (packed_rows, num_groups)

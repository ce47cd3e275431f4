"""Packed weights as checkpoints store them: which tensors belong to which, and what they stand for into the model.

A packed weight goes by its plain name and shape, X.weight [O, I]; behind it stand its words, its scales and, where
there are any, zero points and each input's group. All but the words are read before; they are a thirtieth of them.
The weight is dequantized as it is read, rows at a time: (number - zero point) * scale in float32, then rounded once to
the model's dtype or quantized anew. Where the numbers lie in a word: `packed_words`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.packed_quantization import Layout, PackedQuantization
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.loading.packed_words import WORD_BITS, codes_of_rows, numbers_of_rows, zero_points
from bulkrun.models.loading.stored_quantized import FIX, not_quantized, store_dequantized, without_other_scales
from bulkrun.models.loading.tensor_names import Target

_PIECE_NUMBERS = 2**20  # dequantized at a time
_ROWS = 8  # and as many rows, or a multiple: the outputs in one of AWQ's words
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


class PackedScale(NamedTuple):
    """What the numbers of a weight [O, I] are dequantized with, as it is stored."""

    packing: PackedQuantization
    shape: tuple[int, int]
    scales: torch.Tensor
    zeros: torch.Tensor | None  # None: numbers lie around the middle of their range
    groups: torch.Tensor | None  # int64 [I], of each input; None: one after the other

    def store(self, words: torch.Tensor, target: Target) -> None:
        """Dequantize a weight, given its words, to where it belongs, or keep it as it is where that is its place."""
        if target.takes_codes:
            self._store_codes(words, target)
            return
        store_dequantized(self._dequantized(words.to(target.view.device, non_blocking=True)), target)

    def _store_codes(self, words: torch.Tensor, target: Target) -> None:
        for rows in self._pieces():
            codes = codes_of_rows(words, rows, self.packing.layout, self.packing.num_bits)
            target.view[rows].copy_(codes[:, : self.shape[1] // 2])
        scales = self._scales(words.device).expand(self.shape[0], -1)
        target.store_scales(scales, self._zeros(words.device).expand_as(scales))

    def _dequantized(self, words: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The weight in float32, some rows at a time."""
        num_rows, num_columns = self.shape
        scales = self._scales(words.device).expand(num_rows, -1)
        zeros = self._zeros(words.device).expand_as(scales)
        groups = None if self.groups is None else self.groups.to(words.device)
        for rows in self._pieces():
            piece = numbers_of_rows(words, rows, self.packing.layout, self.packing.num_bits)[:, :num_columns].float()
            if groups is None:
                grouped = piece.view(len(piece), scales.shape[1], -1)
                grouped.sub_(zeros[rows, :, None]).mul_(scales[rows, :, None])
            else:
                piece.sub_(zeros[rows][:, groups]).mul_(scales[rows][:, groups])
            yield rows, piece

    def _pieces(self) -> Iterator[slice]:
        """Rows that are worked on together."""
        num_rows, num_columns = self.shape
        step = max(1, _PIECE_NUMBERS // (_ROWS * num_columns)) * _ROWS
        for first in range(0, num_rows, step):
            yield slice(first, min(first + step, num_rows))

    def _scales(self, device: torch.device) -> torch.Tensor:
        """float32 [O, groups], or [1, 1]."""
        scales = self.scales.to(device).float()
        return _as_grid(scales, self.shape) if self.packing.layout == "compressed" else scales.T.contiguous()

    def _zeros(self, device: torch.device) -> torch.Tensor:
        """float32 [O, groups], or [1, 1]."""
        middle = 2 ** (self.packing.num_bits - 1)
        if self.zeros is None:
            return torch.full((1, 1), float(middle), device=device)
        zeros = self.zeros.to(device)
        if zeros.dtype == torch.int8:  # around zero, as compressed-tensors wrote them before it packed them
            return _as_grid(zeros.float() + middle, self.shape)
        numbers = zero_points(zeros, self.packing.layout, self.packing.num_bits)[: self.shape[0]]
        return (numbers + self.packing.zero_offset & 2 * middle - 1).float().contiguous()


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
    sizes = _read_sizes(modules, tensors, path) if packing.layout == "compressed" else {}
    scales = {f"{name}.weight": _packed_weight(name, tensors, packing, sizes.get(name), path) for name in modules}
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


def _read_sizes(modules: list[str], tensors: Mapping[str, StoredTensor], path: Path) -> dict[str, tuple[int, int]]:
    """[O, I] of each weight: its last words may be padded."""
    stored = [_side(module, _SIZE, tensors, path, [(2,)], _WHOLE) for module in modules]
    read = read_tensors(stored, lambda _: None)
    return {module: tuple(size.tolist()) for module, (_, size) in zip(modules, read, strict=True)}


def _packed_weight(
    module: str, tensors: Mapping[str, StoredTensor], packing: PackedQuantization, size: tuple[int, int] | None,
    path: Path,
) -> PackedWeight:  # fmt: skip
    """The tensors of a weight, known to fit each other."""
    names = _NAMES[packing.layout]
    if f"{module}.weight" in tensors:
        raise ModelError(f"{path}: there are both {module}.weight and {module}.{names.words}; {FIX}")
    words = tensors[f"{module}.{names.words}"]
    shape = _shape(words, packing, size, path)
    grids, packed_grid = _grids(packing, shape)
    zeros = tensors.get(f"{module}.{names.zeros}")
    is_packed = zeros is None or zeros.dtype != torch.int8 or packing.layout != "compressed"
    of_zeros = ([packed_grid], (torch.int32,)) if is_packed else (grids, (torch.int8,))
    has_groups = f"{module}.{names.groups}" in tensors
    return PackedWeight(
        words,
        shape,
        _side(module, names.scales, tensors, path, grids, _FLOATING),
        _side(module, names.zeros, tensors, path, *of_zeros) if packing.has_zeros or zeros is not None else None,
        _side(module, names.groups, tensors, path, [shape[1:]], _WHOLE) if has_groups else None,
    )


def _shape(
    words: StoredTensor, packing: PackedQuantization, size: tuple[int, int] | None, path: Path
) -> tuple[int, int]:
    """[O, I] of a weight, given its words; `size`: what a tensor says of it."""
    per_word = WORD_BITS // packing.num_bits
    if words.dtype != torch.int32 or len(words.shape) != 2 or 0 in words.shape:
        raise ModelError(f"{path}: tensor {words.name} is {words.dtype} {list(words.shape)}, not words of int32; {FIX}")
    if size is not None and words.shape != (size[0], -(-size[1] // per_word)):
        raise ModelError(
            f"{path}: tensor {words.name} is {list(words.shape)}, which with {packing.num_bits} bits is no weight of "
            f"{list(size)}, as its {_SIZE} says; {FIX}"
        )
    high, wide = words.shape
    return size or (
        (wide * per_word, high) if packing.layout == "awq" else (wide, high * WORD_BITS // packing.num_bits)
    )


def _grids(packing: PackedQuantization, shape: tuple[int, int]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The shapes that the scales of a weight [O, I] may have, and that of its packed zero points."""
    num_groups = -(-shape[1] // (packing.group_size or shape[1]))
    packed_rows = -(-shape[0] * packing.num_bits // WORD_BITS)
    if packing.layout != "compressed":
        return [(num_groups, shape[0])], (num_groups, packed_rows)
    whole: list[tuple[int, ...]] = [(shape[0],), (1,), (1, 1), ()]
    return [(shape[0], num_groups)] + (whole if packing.group_size is None else []), (packed_rows, num_groups)


def _side(
    module: str, suffix: str, tensors: Mapping[str, StoredTensor], path: Path,
    shapes: Sequence[tuple[int, ...]], dtypes: tuple[torch.dtype, ...],
) -> StoredTensor:  # fmt: skip
    """The tensor of that name beside a weight's words."""
    found = tensors.get(f"{module}.{suffix}")
    if found is None:
        raise ModelError(f"{path}: the packed weight of {module} has no {module}.{suffix}; {FIX}")
    if found.shape not in shapes or found.dtype not in dtypes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ModelError(
            f"{path}: tensor {found.name} is {found.dtype} {list(found.shape)}, but by config.json and the weight's "
            f"words it is {expected} of {types}; {FIX}"
        )
    return found


def _as_grid(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """[O, groups], or [1, 1] where one is for all."""
    return tensor.reshape(1, 1) if tensor.numel() == 1 else tensor.reshape(shape[0], -1)

"""A LoRA adapter on its base model: what it adds to which of the base's weights, added once, as they are read.

After that the model is one like any other and as fast: no op knows of it. A sum is worked out in float32, some rows at
a time, and rounded once to the model's dtype or quantized (`engine.quantization`). Sources: Hu et al. 2021 (LoRA),
Kalajdzievski 2023 (rsLoRA), Liu et al. 2024 (DoRA).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.adapter_config import BEFORE_NAMES, AdapterConfig
from bulkrun.models.config.adapter_fit import AdapterError, misfit, shown_name
from bulkrun.models.files.checkpoint import StoredTensor, stored_tensors
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.loading.stored_quantized import store_dequantized
from bulkrun.models.loading.target import Target

_PIECE_NUMBERS = 2**20  # of a weight, worked on at a time
_OF_BASE = ".base_layer"  # what PEFT puts around a module
_SAVED = ".modules_to_save."  # where a vocabulary grew: the same again as without
_BEFORE_TRAINING = ".original_module."
_PARTS = {  # of a module, by the ends of tensors' names
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "embedding A",
    ".lora_embedding_B": "embedding B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}


class LowRank(NamedTuple):
    """What is added to a weight [O, I], or whatever its rows and columns are."""

    left_OR: torch.Tensor  # float32
    right_RI: torch.Tensor  # float32
    scale: float
    magnitude_O: torch.Tensor | None  # float32: the length that each row of the sum is brought to

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return len(self.left_OR), self.right_RI.shape[1]

    @property
    def transposed(self) -> LowRank:
        """The same for a weight that lies [I, O]."""
        assert self.magnitude_O is None, "its rows are none of outputs there"
        return LowRank(self.right_RI.T.contiguous(), self.left_OR.T.contiguous(), self.scale, None)

    def store(self, weight: torch.Tensor, target: Target) -> None:
        """Put the sum where the weight, [O, I] of any floating point dtype, belongs; it may lie there already."""
        store_dequantized(self.sums(weight.to(target.view.device, non_blocking=True)), target)

    def sums(self, weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The sum in float32, some rows of the weight at a time."""
        left_OR, right_RI = self.left_OR.to(weight.device), self.right_RI.to(weight.device)
        step = max(1, _PIECE_NUMBERS // right_RI.shape[1])
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            piece = weight[rows].to(torch.float32, copy=True).addmm_(left_OR[rows], right_RI, alpha=self.scale)
            if self.magnitude_O is not None:
                lengths = piece.norm(dim=1, keepdim=True)
                piece *= self.magnitude_O[rows, None].to(piece.device) / lengths
            yield rows, piece


class Adapter(NamedTuple):
    """An adapter's parts by the names of the base model's tensors."""

    path: Path
    base: str
    whole: Mapping[str, StoredTensor]  # in the place of the base's
    added: Mapping[str, LowRank]

    @property
    def names(self) -> set[str]:
        """The base's tensors that become others."""
        return {*self.whole, *self.added}

    def named(self, name_of: Callable[[str], str | None]) -> Adapter:
        """The same with each name as `name_of` has it, without what has none. Raises AdapterError for two of a name."""
        names = {name: new for name in self.names if (new := name_of(name)) is not None}
        if twice := sorted(name for name, count in Counter(names.values()).items() if count > 1):
            raise AdapterError(f"{self.path}: it changes {shown_name(twice[0])} twice; download the adapter again")
        whole = {names[name]: one._replace(name=names[name]) for name, one in self.whole.items() if name in names}
        return self._replace(whole=whole, added={names[name]: one for name, one in self.added.items() if name in names})

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise AdapterError unless the base has every tensor that becomes another, in these shapes."""
        changed: list[tuple[str, StoredTensor | LowRank]] = [*self.whole.items(), *self.added.items()]
        for name, one in changed:
            shape = one.shape
            if name not in shapes:
                what = f"it changes {shown_name(name)}, which the model does not have"
            elif shape != shapes[name]:
                what = f"its {shown_name(name)} is {list(shape)}, the model's {list(shapes[name])}"
            else:
                continue
            raise misfit(self.path, self.base, what)

    @classmethod
    def of(cls, path: Path | None) -> Adapter | None:
        """What `from_dir` reads, where there is a directory."""
        return None if path is None else cls.from_dir(path)

    @classmethod
    def from_dir(cls, path: Path) -> Adapter:
        """Read an adapter's directory but for whole tensors, which are read when the model is.

        Raises ModelError for a kind that cannot be added, for files that are missing or torn, and for tensors that
        belong to nothing or do not fit each other, and where there are none.
        """
        config = AdapterConfig.from_dir(path)
        modules: dict[str, dict[str, StoredTensor]] = {}
        whole = {}
        for one in _of_numbers(config.weights):
            name = one.name.removeprefix(BEFORE_NAMES)
            ending = next((ending for ending in _PARTS if name.endswith(ending)), None)
            if ending is not None:
                modules.setdefault(name.removesuffix(ending), {})[_PARTS[ending]] = one
                continue
            own = _whole_name(name, config.weights)
            if own not in whole or _SAVED not in name:
                whole[own] = one._replace(name=own)
        if not modules and not whole:
            raise ModelError(f"{config.weights}: holds no tensors, so it would change nothing; save the adapter again")
        added = {f"{module}.weight": _low_rank(module, parts, config) for module, parts in modules.items()}
        return cls(path, config.base, whole, added)


def base_name(name: str, known: Collection[str], body: str) -> str:
    """An adapter's name as one of the base's, whose body's names begin with `body`.

    An adapter may have been trained on the body alone, and a body may have been saved alone.
    """
    others = (other for other in (name, f"{body}{name}", name.removeprefix(body)) if other in known)
    return next(others, name)


def _of_numbers(file: Path) -> Iterator[StoredTensor]:
    """A file's tensors but those of before training. Raises ModelError for whole numbers, of which nobody says more."""
    for one in stored_tensors([file]):
        if _BEFORE_TRAINING in one.name:
            continue
        if not one.dtype.is_floating_point:
            raise ModelError(
                f"{file}: tensor {shown_name(one.name)} holds {one.dtype}; adapters in bfloat16, float16 or float32 "
                "are added: save it so with PEFT, or download it again"
            )
        yield one


def _whole_name(name: str, file: Path) -> str:
    """The base's name of a tensor that an adapter holds whole. Raises ModelError for a part of something unknown."""
    if ".lora_" in name or not name.endswith((".weight", ".bias")):
        raise ModelError(
            f"{file}: tensor {shown_name(name)} is of no kind of LoRA that is added here; merge it with PEFT"
        )
    return name.replace(_OF_BASE, "").replace(_SAVED, ".")


def _low_rank(module: str, parts: Mapping[str, StoredTensor], config: AdapterConfig) -> LowRank:
    """Read what belongs to a module. Raises ModelError where it does not fit together."""
    names = {one.name: part for part, one in parts.items()}
    read = {names[one.name]: tensor.float() for one, tensor in read_tensors([*parts.values()], lambda _: None)}
    magnitude = read.pop("magnitude", None)
    is_embedding = read.keys() == {"embedding A", "embedding B"}
    if is_embedding and config.has_magnitudes:
        raise _magnitudes_of_embedding(module, config)
    if not (is_embedding or read.keys() == {"A", "B"}) or (magnitude is not None) != config.has_magnitudes:
        raise _misfit(module, parts, config)
    a_RI, b_OR = (read[f"embedding {part}" if is_embedding else part] for part in "AB")
    rows = magnitude is None or magnitude.shape == b_OR.shape[:1]
    if not (a_RI.ndim == b_OR.ndim == 2 and len(a_RI) == b_OR.shape[1] > 0 and rows):
        raise _misfit(module, parts, config)
    if not config.has_rank(module, len(a_RI)):
        raise ModelError(
            f"{config.weights}: the tensors of {shown_name(module)} are of rank {len(a_RI)}, and by r or rank_pattern "
            f"in {config.file.name} of another; the two files are of different adapters: download the adapter again"
        )
    added = LowRank(b_OR, a_RI, config.scale(module, len(a_RI)), magnitude)
    return added.transposed if is_embedding else added  # a weight of one row for each input


def _magnitudes_of_embedding(module: str, config: AdapterConfig) -> ModelError:
    return ModelError(
        f"{config.weights}: use_dora on {shown_name(module)}, an embedding, is not supported; merge the adapter into "
        "its base model with PEFT"
    )


def _misfit(module: str, parts: Mapping[str, StoredTensor], config: AdapterConfig) -> ModelError:
    shown = ", ".join(f"{part} {list(one.shape)}" for part, one in sorted(parts.items()))
    return ModelError(
        f"{config.weights}: the tensors of {shown_name(module)} do not go together ({shown}; use_dora "
        f"{str(config.has_magnitudes).lower()}); download the adapter again"
    )

"""A Dense module of sentence-transformers: a linear layer and an activation behind the pooling, in float32.

Where this processor has panels for its weight, a vector has the same bits whatever is beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from bulkrun.errors import ModelError
from bulkrun.models.config.sentence_modules import Activation, DenseConfig
from bulkrun.models.files.checkpoint import StoredTensor, stored_tensors
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.ops import linear, pack_linear_weight
from bulkrun.ops.matmul.linear import is_packed
from bulkrun.ops.tile_workers import TileWorkers

_WEIGHTS = "model.safetensors"
_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}


class Dense:
    """weight: float32 [O, I]; bias: float32 [O], or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> None:
        self.weight, self.bias = pack_linear_weight(weight), bias
        self._activation = _ACTIVATIONS[activation]
        self._alone = TileWorkers(1)  # where threads divide a row, its numbers come in another way

    @property
    def depends_on_batch(self) -> bool:
        """Whether what is beside a vector may change bits of it."""
        return not is_packed(self.weight)

    def __call__(self, vectors_SI: torch.Tensor) -> torch.Tensor:
        """float32 [S, I] -> [S, O]."""
        made_SO = linear(vectors_SI, self.weight, self.bias)
        with self._alone.one_thread_each():
            return self._activation(made_SO)


def load_dense(config: DenseConfig, device: torch.device, load_format: str) -> Dense:
    """Read a module's weights, or make random ones where `load_format` is dummy.

    Raises ModelError for weights that are missing, torn, pickled or of another shape than config.json says.
    """
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (config.out_features, config.in_features)}
    if config.has_bias:
        shapes["linear.bias"] = (config.out_features,)
    tensors = _random(shapes) if load_format == "dummy" else _stored(config.path, shapes)
    moved = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
    return Dense(moved["linear.weight"], moved.get("linear.bias"), config.activation)


def _random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def _stored(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    file = folder / _WEIGHTS
    if not file.is_file():
        raise ModelError(f"{file}: no such file; a Dense module's weights are read from safetensors, never from pickle")
    stored = list(stored_tensors([file]))
    found: dict[str, tuple[int, ...]] = {one.name: one.shape for one in stored}
    if found != shapes:
        raise ModelError(f"{file}: holds {found}, but config.json makes it {dict(shapes)}; download the model again")
    read: list[tuple[StoredTensor, torch.Tensor]] = list(read_tensors(stored, lambda _: None))
    return {one.name: tensor for one, tensor in read}

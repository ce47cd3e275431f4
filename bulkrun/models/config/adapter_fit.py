"""Whether an adapter was trained on a model of these sizes, as far as the two directories' headers say. Torch-free.

Asked before any work, so that the commonest mistake, the adapter of a model's smaller or larger sister, does not show
after a plan of hours. Names that a checkpoint has otherwise than the model are left to `loading.adapter`, which sees
everything when weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bulkrun.errors import ModelError, shortened
from bulkrun.models.config.adapter_config import BEFORE_NAMES, AdapterConfig
from bulkrun.models.config.config_file import read_config
from bulkrun.models.config.stored_quantization import Quantized, stored_quantization
from bulkrun.models.files.safetensors_header import stored_shapes
from bulkrun.models.files.weight_files import weight_files

_LEFT, _RIGHT = ".lora_B.weight", ".lora_A.weight"
_BODY = "model."
_NUMBER = re.compile(r"\.\d+\.")
_SHOWN_CHARS = 200  # of a name


class AdapterError(ModelError):
    """An adapter does not fit the model, which is not to blame: the message begins with the adapter's path."""


def check_adapter(adapter: Path | None, model_dir: Path) -> None:
    """Raise ModelError for a model whose weights are stored quantized, AdapterError for an adapter of other sizes.

    `adapter`: None where there is none.
    """
    if adapter is None:
        return
    read_config(model_dir, lambda raw: refuse_quantized_base(stored_quantization(raw)))
    config = AdapterConfig.from_dir(adapter)
    own = {name: shape for file in weight_files(model_dir) for name, shape in stored_shapes(file).items()}
    kinds = {_kind(name) for name in own}
    for weight, shape in _changed(config):
        names = (weight, f"{_BODY}{weight}", weight.removeprefix(_BODY))
        found = next((own[name] for name in names if name in own), None)
        if found is None and any(_kind(name) in kinds for name in names):
            raise misfit(adapter, config.base, f"it changes {shown_name(weight)}, which the model does not have")
        if found is not None and sorted(found) != sorted(shape):  # a weight may lie transposed
            raise misfit(adapter, config.base, f"its {shown_name(weight)} is {list(shape)}, the model's {list(found)}")


def refuse_quantized_base(stored: Quantized | None) -> None:
    """Raise ModelError unless the model's weights are whole numbers that something can be added to."""
    if stored is not None:
        raise ModelError(
            "engine.adapter: the model's weights are stored quantized, and an adapter is added to whole ones; take the "
            "model's bfloat16, float16 or float32 checkpoint (engine.quantization quantizes the sum)"
        )


def misfit(adapter: Path, base: str, what: str) -> AdapterError:
    """The error of an adapter that is of another model than this one."""
    return AdapterError(f"{adapter}: {what}; it was trained on {base}: make that the model, or merge the two with PEFT")


def shown_name(name: str) -> str:
    """A tensor's name in a message."""
    return shortened(name, _SHOWN_CHARS)


def _changed(config: AdapterConfig) -> Iterator[tuple[str, Sequence[int]]]:
    """The weights of numbered layers that something is added to, and their shapes by the two matrices of each.

    Of embeddings and heads, which have no number, the vocabulary may have grown in training.
    """
    shapes: Mapping[str, Sequence[int]] = stored_shapes(config.weights)
    for name, right in shapes.items():
        left = shapes.get(f"{name.removesuffix(_RIGHT)}{_LEFT}")
        is_numbered = name.endswith(_RIGHT) and _NUMBER.search(name)
        if is_numbered and left is not None and len(left) == len(right) == 2:
            yield f"{name.removeprefix(BEFORE_NAMES).removesuffix(_RIGHT)}.weight", (left[0], right[1])


def _kind(name: str) -> str:
    """A name without the numbers of its layer and expert."""
    return _NUMBER.sub(".N.", name)

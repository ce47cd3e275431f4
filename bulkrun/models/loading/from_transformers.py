"""A model of transformers' own code: from local safetensors, or with its seeded random initialization. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from bulkrun.errors import ModelError
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.files.read_errors import read_through
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.loading.adapted_model import add_to_model
from bulkrun.models.loading.adapter import Adapter

_FIX_OF_HEAD = (
    "neither the model nor its adapter has them: train the adapter with that module in modules_to_save or, where it is "
    "no part of the head, download the model again"
)


def stored_model(
    auto_class: Any,
    path: Path,
    dtype: torch.dtype,
    *,
    may_miss: Callable[[str], bool] = lambda _: False,
    adapter: Adapter | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model of the directory's files, by one of transformers' Auto classes; no code that comes with it is run.

    `adapter`: what is added to its weights. Raises AdapterError where it does not fit, ValueError for tensors that are
    missing, except those that `may_miss`, or mis-shaped, and whatever transformers raises, which has no errors of its
    own. Tensors without a place are left alone. Raises ModelError for a file that the disk does not give.
    """
    for file in weight_files(path):
        read_through(file)
    model, report = auto_class.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are named below
        output_loading_info=True,
        **options,
    )
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        wrong = sorted(str(name) for name in report[kind] if not may_miss(str(name)))
        if wrong:
            fix = "download the model again" if adapter is None else _FIX_OF_HEAD
            raise ValueError(f"{kind.replace('_', ' ')}: {', '.join(wrong[:5])}; {fix}")
    if adapter is not None:
        add_to_model(model, adapter)
    return model


def refuse_quantized_tensors(stored: Iterable[StoredTensor]) -> None:
    """Raise ModelError for weights of 8 bits: transformers takes them for the model's own, and leaves their scales."""
    for one in stored:
        is_plain = one.dtype.itemsize > 1 if one.dtype.is_floating_point else not one.name.endswith(".weight")
        if not is_plain:
            raise ModelError(
                f"{one.file}: tensor {one.name} holds {one.dtype}: quantized weights, which are not supported for this "
                "architecture; use the model's bfloat16, float16 or float32 checkpoint"
            )


def stored_config(path: Path) -> PreTrainedConfig:
    """What transformers reads in config.json. Raises whatever it raises."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return config


@torch.no_grad()
def own_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights of its own, not those of the file, which transformers maps.

    What is copied over the file while it runs would be its weights from there on, and a file cut short its end.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    return model


def random_model(
    auto_class: Any,
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    config: PreTrainedConfig | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model of config.json alone, or of `config`, its weights the same every time.

    Raises whatever transformers raises.
    """
    config = config or stored_config(path)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return auto_class.from_config(config, dtype=dtype, trust_remote_code=False, **options)


@contextmanager
def no_reports() -> Iterator[None]:
    """No bars, and no warnings of tensors that have no place; those that are missing are an error here."""
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)

"""A model directory made ready: the model on its device, sizes that fit beside it, tokens that end an output."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bulkrun.engine.config import EngineConfig
from bulkrun.engine.device import refuse_gpu_without_kernels, resolve_device
from bulkrun.engine.memory_probe import measure_cuda
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.config.model_dir import eos_token_ids
from bulkrun.models.language_model import LanguageModel
from bulkrun.models.loading.dtypes import dtype_of
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.loader import load_model
from bulkrun.settings import EngineArgs


class ReadyModel(NamedTuple):
    """What an engine is made of."""

    model: LanguageModel
    config: EngineConfig
    eos_token_ids: Iterable[int]


def ready_model(path: Path | str, args: EngineArgs) -> ReadyModel:
    """Load the model and work out the engine's sizes.

    dtype auto: the model's own, float32 on a CPU without bf16 units. load_format dummy: a directory with nothing but
    config.json will do. Raises ModelError for a model or an adapter that cannot be used and UsageError for settings
    that cannot work.
    """
    device = resolve_device(args.device)
    if device.type == "cuda":
        refuse_gpu_without_kernels()
    model_config = ModelConfig.from_dir(path)
    dtype = dtype_of(args.dtype, model_config, device)
    model = load_model(path, LoadOptions.of(args, dtype, device), config=model_config)
    config = EngineConfig.resolve(model_config, dtype, device, args, measure=partial(measure_cuda, model))
    return ReadyModel(model, config, eos_token_ids(path))

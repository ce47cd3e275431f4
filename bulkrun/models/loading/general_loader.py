"""A model directory into a `GeneralModel`, through transformers: local files, safetensors and its own code only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from bulkrun.errors import ModelError, first_line
from bulkrun.models.config.adapter_fit import AdapterError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.general.general_check import check_against_own_attention
from bulkrun.models.general.general_model import ATTENTION_NAME, GeneralModel, register_paged_attention
from bulkrun.models.loading.from_transformers import (
    own_weights,
    random_model,
    refuse_quantized_tensors,
    stored_config,
    stored_model,
)
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.weights_fit import refuse_beyond_ram


def load_general_model(path: Path, config: ModelConfig, files: list[Path], options: LoadOptions) -> GeneralModel:
    """Load the model, add the adapter if there is one, and check it against its own attention.

    Without files its weights are transformers' own seeded initialization. Raises ModelError for an architecture that
    transformers does not have or that asks for code of its own, for missing or mis-shaped tensors, for weights beyond
    the memory that is left, and for what the check finds. Tensors that the architecture has no place for are left
    alone, as transformers leaves them.
    """
    dtype, device = options.dtype, options.device
    tensors = list(stored_tensors(files))
    refuse_quantized_tensors(tensors)
    num_weights = sum(math.prod(stored.shape) for stored in tensors)
    refuse_beyond_ram(num_weights * dtype.itemsize, device, can_quantize=False)
    register_paged_attention()
    disable_progress_bar()
    try:
        model: Any = _transformers_model(path, config.architecture, files, options)
        general = GeneralModel(own_weights(model.to(device)).eval().requires_grad_(False), config)
    except AdapterError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{path}: the weights do not fit on {device} ({first_line(error)}); free what other processes hold, or "
            "take a smaller model"
        ) from None
    except Exception as error:  # transformers has no errors of its own
        raise ModelError(f"{path}: {config.architecture} is not supported: {_reason(error)}") from None
    try:
        check_against_own_attention(general)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return general


def _transformers_model(path: Path, architecture: str, files: list[Path], options: LoadOptions) -> PreTrainedModel:
    """The model with our attention in it."""
    config = stored_config(path)
    known = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else getattr(transformers, architecture)
    how: dict[str, Any] = {"config": config, "attn_implementation": ATTENTION_NAME}
    if not files:
        return random_model(known, path, options.dtype, options.device, **how)
    return stored_model(known, path, options.dtype, adapter=options.adapter, **how)


def _reason(error: Exception) -> str:
    said = first_line(error)
    if ATTENTION_NAME in said:  # it looks its attention up in a list of its own
        return "its attention cannot be exchanged in transformers"
    return f"transformers cannot load it: {said}"

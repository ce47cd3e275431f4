"""A model directory made ready to embed or classify: the model on its device, and sizes that work together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.engine.config import refuse_empty_steps, schedules_ahead
from bulkrun.engine.device import refuse_gpu_without_kernels, resolve_device
from bulkrun.errors import UsageError
from bulkrun.models.classification.classification_model import ClassificationModel
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.embedding.embedding_model import EmbeddingModel
from bulkrun.models.embedding.embedding_model_loader import load_embedding_model
from bulkrun.models.loading.dtypes import dtype_of
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.settings import (
    DEFAULT_ENCODER_TOKENS,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULTS,
    NOT_FOR_EMBEDDING,
    ClassificationArgs,
    EmbeddingArgs,
    EngineArgs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSizes:
    """Sizes of an engine that embeds. Names are vLLM's."""

    max_num_seqs: int
    max_num_batched_tokens: int  # a longer text has a step of its own
    max_model_len: int
    device: torch.device
    async_scheduling: bool


class ReadyTextModel(NamedTuple):
    """What an engine that embeds or classifies is made of."""

    model: EmbeddingModel | ClassificationModel
    sizes: EmbeddingSizes


def ready_embedding_model(path: Path, embedding: EmbeddingArgs, args: EngineArgs) -> ReadyTextModel:
    """Load the model and work out the sizes.

    dtype auto: the model's own, float32 on a CPU without bf16 units. Raises ModelError for a model that cannot be used
    and where nothing says how to pool, UsageError for settings that cannot work or mean nothing here.
    """
    config = EmbeddingConfig.from_dir(path, args.adapter)
    sizes, options = _sizes(config, args), _load_options(config, args)
    return ReadyTextModel(load_embedding_model(path, config, embedding, options), sizes)


def ready_classification_model(path: Path, classification: ClassificationArgs, args: EngineArgs) -> ReadyTextModel:
    """The same for a model that classifies; ModelError where nothing says how numbers become scores."""
    config = ClassificationConfig.from_dir(path, args.adapter)
    sizes, options = _sizes(config, args), _load_options(config, args)
    # transformers takes seconds to import
    from bulkrun.models.classification.classification_model_loader import load_classification_model

    return ReadyTextModel(load_classification_model(path, config, classification, options), sizes)


def _load_options(config: EmbeddingConfig | ClassificationConfig, args: EngineArgs) -> LoadOptions:
    device = resolve_device(args.device)
    return LoadOptions.of(args, dtype_of(args.dtype, config.model, device), device)


def _sizes(config: EmbeddingConfig | ClassificationConfig, args: EngineArgs) -> EmbeddingSizes:
    _refuse_meaningless(args)
    device = resolve_device(args.device)
    is_own_decoder = isinstance(config.model, DecoderConfig) and config.model.is_causal
    if device.type == "cuda" and is_own_decoder:
        refuse_gpu_without_kernels()
    default_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
    if device.type == "cuda" and not is_own_decoder:
        default_tokens = DEFAULT_ENCODER_TOKENS
    refuse_empty_steps(args)
    return EmbeddingSizes(
        max_num_seqs=args.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type],
        max_num_batched_tokens=args.max_num_batched_tokens or default_tokens,
        max_model_len=config.model_len(args.max_model_len),
        device=device,
        async_scheduling=schedules_ahead(args, device),
    )


def _refuse_meaningless(args: EngineArgs) -> None:
    for key, why in NOT_FOR_EMBEDDING.items():
        if (value := getattr(args, key)) != getattr(DEFAULTS, key):
            raise UsageError(
                f"engine.{key}: {value} means nothing to a job that generates nothing: {why}; leave the key out"
            )

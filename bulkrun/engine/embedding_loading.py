"""A model directory made ready to embed or classify: the model on its device, and sizes that work together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.engine.device import refuse_gpu_without_kernels, resolve_device
from bulkrun.errors import UsageError
from bulkrun.models.classification.classifier import Classifier
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.embedding.embedder import Embedder
from bulkrun.models.embedding.embedder_loader import load_embedder
from bulkrun.models.loading.dtypes import default_dtype
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


class ReadyEmbedder(NamedTuple):
    """What an engine that embeds or classifies is made of."""

    embedder: Embedder | Classifier
    sizes: EmbeddingSizes


def ready_embedder(path: Path, embedding: EmbeddingArgs, args: EngineArgs) -> ReadyEmbedder:
    """Load the model and work out the sizes.

    dtype auto: the model's own, float32 on a CPU without bf16 units. Raises ModelError for a model that cannot be used
    and where nothing says how to pool, UsageError for settings that cannot work or mean nothing here.
    """
    config = EmbeddingConfig.from_dir(path, args.adapter)
    sizes, dtype = _sizes(config, args), _dtype(config, args)
    return ReadyEmbedder(load_embedder(path, config, embedding, args, dtype=dtype, device=sizes.device), sizes)


def ready_classifier(path: Path, classification: ClassificationArgs, args: EngineArgs) -> ReadyEmbedder:
    """The same for a model that classifies; ModelError where nothing says how numbers become scores."""
    config = ClassificationConfig.from_dir(path, args.adapter)
    sizes, dtype = _sizes(config, args), _dtype(config, args)
    from bulkrun.models.classification.classifier_loader import load_classifier  # transformers takes seconds to import

    return ReadyEmbedder(load_classifier(path, config, classification, args, dtype=dtype, device=sizes.device), sizes)


def _dtype(config: EmbeddingConfig | ClassificationConfig, args: EngineArgs) -> torch.dtype:
    device = resolve_device(args.device)
    return default_dtype(config.model, device) if args.dtype == "auto" else getattr(torch, args.dtype)


def _sizes(config: EmbeddingConfig | ClassificationConfig, args: EngineArgs) -> EmbeddingSizes:
    _refuse_meaningless(args)
    device = resolve_device(args.device)
    is_own_decoder = isinstance(config.model, DecoderConfig) and config.model.is_causal
    if device.type == "cuda" and is_own_decoder:
        refuse_gpu_without_kernels()
    default_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
    if device.type == "cuda" and not is_own_decoder:
        default_tokens = DEFAULT_ENCODER_TOKENS
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"engine.{name}: {value} is below 1")
    return EmbeddingSizes(
        max_num_seqs=args.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type],
        max_num_batched_tokens=args.max_num_batched_tokens or default_tokens,
        max_model_len=config.model_len(args.max_model_len),
        device=device,
        async_scheduling=device.type == "cuda" if args.async_scheduling is None else args.async_scheduling,
    )


def _refuse_meaningless(args: EngineArgs) -> None:
    for key, why in NOT_FOR_EMBEDDING.items():
        if (value := getattr(args, key)) != getattr(DEFAULTS, key):
            raise UsageError(
                f"engine.{key}: {value} means nothing to a job that generates nothing: {why}; leave the key out"
            )

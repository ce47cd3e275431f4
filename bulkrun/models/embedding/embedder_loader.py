"""A model directory into an `Embedder`: which encoder it gets, and the Dense modules behind it."""

from __future__ import annotations

from pathlib import Path

import torch

from bulkrun.errors import UsageError
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.embedding.decoder_encoder import DecoderEncoder
from bulkrun.models.embedding.dense import load_dense
from bulkrun.models.embedding.embedder import Embedder
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.loading.adapter import Adapter
from bulkrun.models.loading.loader import load_model
from bulkrun.models.loading.quantization import refuse_quantization_on
from bulkrun.ops.cpu.library import library
from bulkrun.settings import DEFAULT_BLOCK_SIZE, EmbeddingArgs, EngineArgs


def load_embedder(
    path: Path,
    config: EmbeddingConfig,
    embedding: EmbeddingArgs,
    engine: EngineArgs,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Embedder:
    """Load the model of a directory and what turns its hidden states into vectors.

    `config`: of the same directory. Of `engine` the keys that say how weights are loaded and computed with. Raises
    ModelError for weights that cannot be used, UsageError for settings that this model cannot have, ModelError where
    nothing says how to pool.
    """
    config = config.with_args(embedding)
    assert config.pooling is not None, "`with_args` sees to it"
    dimensions = config.vector_size(embedding)
    _refuse_settings(config, engine, device)
    return Embedder(
        _load_encoder(path, config, engine, dtype, device),
        pooling=config.pooling,
        dense=[load_dense(one, device, engine.load_format) for one in config.dense],
        dimensions=dimensions,
        normalize=config.normalize,
    )


def _load_encoder(
    path: Path, config: EmbeddingConfig, engine: EngineArgs, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    adapter = Adapter.of(engine.adapter)
    if isinstance(config.model, DecoderConfig):
        decoder = load_decoder(path, config.model, engine, adapter, dtype, device)
        if decoder is not None:
            return decoder
    from bulkrun.models.embedding.encoder_loader import load_encoder  # transformers takes seconds to import

    return load_encoder(
        path,
        config.model,
        dtype=dtype,
        device=device,
        load_format=engine.load_format,
        quantization=engine.quantization,
        deterministic=engine.deterministic,
        adapter=adapter,
    )


def load_decoder(
    path: Path,
    config: DecoderConfig,
    engine: EngineArgs,
    adapter: Adapter | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderEncoder | None:
    """A decoder of the engine's own families, without its head. Raises what `load_model` does.

    None: one that looks both ways, which it only can where all its layers are one compiled call over panels.
    """
    if not config.is_causal and (device.type != "cpu" or engine.quantization == "fp8" or library() is None):
        return None
    model = load_model(
        path,
        config=config,
        dtype=dtype,
        device=device,
        load_format=engine.load_format,
        quantization=engine.quantization,
        deterministic=engine.deterministic and config.is_causal,  # those panels are
        has_head=False,
        adapter=adapter,
    )
    stack = model.layer_stack if isinstance(model, Decoder) else None
    if not config.is_causal and (stack is None or not stack.takes_any_width):
        return None
    return DecoderEncoder(model, block_size=engine.block_size or DEFAULT_BLOCK_SIZE)


def _refuse_settings(config: EmbeddingConfig, engine: EngineArgs, device: torch.device) -> None:
    """Raise UsageError for what this model or device cannot do."""
    if engine.quantization is not None:
        refuse_quantization_on(device, engine.quantization)
    if engine.deterministic and config.dense:
        raise UsageError(
            "engine.deterministic: the sums of this model's Dense modules depend on the batch; leave the key out"
        )

"""A model directory into an `EmbeddingModel`: which encoder it gets, and the Dense modules behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bulkrun.errors import UsageError
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.embedding.decoder_encoder import DecoderEncoder
from bulkrun.models.embedding.dense import Dense, load_dense
from bulkrun.models.embedding.embedding_model import EmbeddingModel
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.loader import load_model
from bulkrun.models.loading.quantization import refuse_quantization_on
from bulkrun.ops.cpu.library import library
from bulkrun.settings import EmbeddingArgs


def load_embedding_model(
    path: Path, config: EmbeddingConfig, embedding: EmbeddingArgs, options: LoadOptions
) -> EmbeddingModel:
    """Load the model of a directory and what turns its hidden states into vectors.

    `config`: of the same directory. Raises ModelError for weights that cannot be used and where nothing says how to
    pool, UsageError for settings that this model cannot have.
    """
    config = config.with_args(embedding)
    assert config.pooling is not None, "`with_args` sees to it"
    dimensions = config.vector_size(embedding)
    if options.quantization is not None:
        refuse_quantization_on(options.device, options.quantization)
    dense = [load_dense(one, options.device, options.load_format) for one in config.dense]
    if options.deterministic:
        _refuse_batch_dependent(dense)
    return EmbeddingModel(
        _load_encoder(path, config, options),
        pooling=config.pooling,
        dense=dense,
        dimensions=dimensions,
        normalize=config.normalize,
    )


def _load_encoder(path: Path, config: EmbeddingConfig, options: LoadOptions) -> TextEncoder:
    if isinstance(config.model, DecoderConfig):
        decoder = load_decoder(path, config.model, options)
        if decoder is not None:
            return decoder
    from bulkrun.models.embedding.encoder_loader import load_encoder  # transformers takes seconds to import

    return load_encoder(path, config.model, options)


def load_decoder(path: Path, config: DecoderConfig, options: LoadOptions) -> DecoderEncoder | None:
    """A decoder of the engine's own families, without its head. Raises what `load_model` does.

    None: one that looks both ways, which it only can where all its layers are one compiled call over panels. Those have
    the same bits beside any other rows, `deterministic` or not.
    """
    if not config.is_causal:
        if options.device.type != "cpu" or options.quantization == "fp8" or library() is None:
            return None
        options = replace(options, deterministic=False)
    model = load_model(path, options, config=config, has_head=False)
    stack = model.layer_stack if isinstance(model, Decoder) else None
    if not config.is_causal and (stack is None or not stack.takes_any_width):
        return None
    return DecoderEncoder(model, block_size=options.block_size)


def _refuse_batch_dependent(dense: Sequence[Dense]) -> None:
    """Raise UsageError where `deterministic` cannot be kept behind the encoder."""
    if any(one.depends_on_batch for one in dense):
        raise UsageError(
            "engine.deterministic: the sums of this model's Dense modules depend on the batch; leave the key out"
        )

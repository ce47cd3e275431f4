"""A model directory into a `ClassificationModel`: its transformer as for vectors, its head as transformers has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from bulkrun.errors import ModelError
from bulkrun.models.classification.classification_model import ClassificationModel
from bulkrun.models.classification.decoder_classifier import load_decoder_classifier
from bulkrun.models.classification.head import TransformersHead
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.embedding.encoder_loader import errors_named, fast_encoder, load_transformer, refuse_unfit
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder, typed
from bulkrun.models.embedding.pooling import text_states
from bulkrun.models.embedding.two_texts import refuse_not_finite, two_texts
from bulkrun.models.general.comparison import tolerance
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.quantization import refuse_quantization_on
from bulkrun.settings import ClassificationArgs, Pooling

_POOLINGS: tuple[Pooling, ...] = ("cls", "last", "mean")


def load_classification_model(
    path: Path, config: ClassificationConfig, args: ClassificationArgs, options: LoadOptions
) -> ClassificationModel:
    """Load the model of a directory; which state of a text its head reads is found out with two texts.

    `config`: of the same directory. Raises ModelError for weights that cannot be used or are missing, for a model whose
    head reads something else, and where nothing says how numbers become scores; UsageError for settings that this model
    or device cannot have.
    """
    if options.quantization is not None:
        refuse_quantization_on(options.device, options.quantization)
    activation = config.activation_of(args)
    own = load_decoder_classifier(path, config, activation, options)
    if own is not None:
        return own
    if isinstance(config.model, DecoderConfig) and config.model.stored_quantization is not None:
        raise ModelError(
            f"{path}: weights stored in {config.model.stored_quantization.summary} are not read for this model's head; "
            "use its bfloat16, float16 or float32 checkpoint"
        )
    refuse_unfit(path, options)
    with errors_named(f"{path}: {config.model.architecture} is not supported", options.device):
        model: Any = load_transformer(
            AutoModelForSequenceClassification, path, options,
            may_miss=lambda _: False, num_labels=len(config.labels),
        )  # fmt: skip
        padded = PaddedEncoder(model.base_model, config.model, args.pair_separator)
        head, pooling = _head_of(model, padded, len(config.labels))
        encoder = fast_encoder(padded, options.quantization, deterministic=options.deterministic)
    return ClassificationModel(
        encoder,
        head,
        pooling=pooling,
        num_labels=len(config.labels),
        activation=activation,
        row_by_row=options.deterministic,
        padding_id=head.padding_id,
    )


def _head_of(model: PreTrainedModel, padded: PaddedEncoder, num_labels: int) -> tuple[TransformersHead, Pooling]:
    """The model's head and the state that it reads; the model has no transformer afterwards.

    Raises ModelError where it reads another state, or gives another number of logits than there are labels.
    """
    expected_2C = _logits(model, padded)
    refuse_not_finite(expected_2C)
    head = TransformersHead(model)
    pooling = _pooling(padded, head, expected_2C)
    if expected_2C.shape[1] != num_labels:
        raise ModelError(f"{expected_2C.shape[1]} outputs, and config.json names {num_labels} labels")
    return head, pooling


@torch.inference_mode()
def _logits(model: PreTrainedModel, padded: PaddedEncoder) -> torch.Tensor:
    """transformers' logits of two texts, each alone."""
    logits = []
    for text in two_texts(padded):
        alone = PackedTexts.of([text], padded.device)
        ids = alone.token_ids_T
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **typed(alone, padded.pair_separator)}
        logits.append(model(**{name: of_T[None] for name, of_T in inputs.items()}).logits)
    return torch.cat(logits).float()


@torch.inference_mode()
def _pooling(padded: PaddedEncoder, head: TransformersHead, expected_2C: torch.Tensor) -> Pooling:
    """The state of a text that gives the head's logits, but for a share of the largest. Raises ModelError for none."""
    off = {}
    for pooling in _POOLINGS:
        states_2E = text_states(padded, two_texts(padded), pooling, padding_id=head.padding_id)
        off[pooling] = float((head(states_2E) - expected_2C).abs().max() / expected_2C.abs().max())
    best = min(_POOLINGS, key=off.__getitem__)
    if not off[best] < tolerance(padded.dtype):
        raise ModelError(
            "its head reads neither the first nor the last token's state nor their mean: logits are off by "
            f"{off[best]:.1%}"
        )
    return best

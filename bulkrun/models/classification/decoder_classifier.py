"""A decoder of the engine's own families as a classifier: its own forward pass, and transformers' linear head.

The families' classes share one head, `score`: no bias, over the state of a text's last token that is no padding.
Whether a class has that one is asked of transformers, which nothing else is read from here.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_layers import GenericForSequenceClassification

from bulkrun.errors import ModelError
from bulkrun.models.classification.classification_model import ClassificationModel, Head
from bulkrun.models.config.classification_config import ClassificationConfig, classifier_of
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.embedding.embedding_model_loader import load_decoder
from bulkrun.models.embedding.encoder_loader import errors_named
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.read_ahead import read_tensors
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.loading.from_transformers import refuse_quantized_tensors
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.tensor_names import SCORE
from bulkrun.settings import ScoreActivation

_THAT_HEAD_TOO = ("FalconForSequenceClassification", "GPTNeoXForSequenceClassification")  # in classes of their own


def load_decoder_classifier(
    path: Path, config: ClassificationConfig, activation: ScoreActivation, options: LoadOptions
) -> ClassificationModel | None:
    """Load it; None where transformers' code has to run: another head, or a decoder that this device cannot run.

    Raises what `load_model` does, and ModelError for a head that is missing or of another shape.
    """
    if not isinstance(config.model, DecoderConfig):
        return None
    with errors_named(f"{path}: {config.model.architecture} is not supported", options.device):
        known = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if not _has_that_head(known):
        return None
    decoder = load_decoder(path, config.model, options)
    if decoder is None:
        return None
    return ClassificationModel(
        decoder,
        _linear(_score(path, config, options).to(options.device)),
        pooling="last",
        num_labels=len(config.labels),
        activation=activation,
        row_by_row=options.deterministic,
        padding_id=known.get_text_config().pad_token_id,
    )


def _has_that_head(known: transformers.PretrainedConfig) -> bool:
    names = [classifier_of(name) for name in known.architectures or ()]
    classes = [getattr(transformers, name, None) for name in names]
    are_generic = (isinstance(one, type) and issubclass(one, GenericForSequenceClassification) for one in classes)
    return any(are_generic) or any(name in _THAT_HEAD_TOO for name in names)


def _linear(weight_CE: torch.Tensor) -> Head:
    return lambda states_SE: F.linear(states_SE, weight_CE)


def _score(path: Path, config: ClassificationConfig, options: LoadOptions) -> torch.Tensor:
    """The head's weight, float32 [C, E]; the adapter's, where it has its own."""
    shape, adapter = (len(config.labels), config.model.hidden_size), options.adapter
    if options.load_format == "dummy":
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(shape[1] ** -0.5)
    stored = {one.name: one for one in stored_tensors(weight_files(path))}
    if adapter is not None:
        adapter = adapter.named(lambda name: name if name == SCORE else None)
        adapter.check_fits({SCORE: shape})
        stored |= adapter.whole
    if SCORE not in stored:
        raise ModelError(f"{path}: there is no {SCORE}, the head for labels; download the model again")
    if stored[SCORE].shape != shape:
        raise ModelError(
            f"{path}: tensor {SCORE} is {list(stored[SCORE].shape)}, but config.json makes it {list(shape)}; "
            "config.json and weights are of different models"
        )
    refuse_quantized_tensors([stored[SCORE]])
    [(_, weight_CE)] = read_tensors([stored[SCORE]], lambda _: None)
    if adapter is None or SCORE not in adapter.added:
        return weight_CE.float()
    return torch.cat([rows for _, rows in adapter.added[SCORE].sums(weight_CE)])

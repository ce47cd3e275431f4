"""What a model's files say of how a text becomes scores of labels: config.json of a sequence classification model.

Torch-free. How what comes out of the model is to be read stands in no single place: transformers' pipelines go by
`problem_type` and the number of labels, sentence-transformers' cross-encoders by a key of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.adapter_config import AdapterConfig
from bulkrun.models.config.architectures import find_family
from bulkrun.models.config.common_facts import with_dtype
from bulkrun.models.config.config_file import read_config
from bulkrun.models.config.embedding_config import max_text_len
from bulkrun.models.config.encoder_config import text_config
from bulkrun.models.config.general_config import CLASSIFIERS
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.settings import ClassificationArgs, ScoreActivation

_PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
_OF_CLASS: Mapping[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationConfig:
    """One model as a maker of scores."""

    model: ModelConfig
    max_model_len: int  # tokens of a text unless the user asks for more, up to `model`'s positions
    labels: tuple[str, ...]  # in the order of the scores
    activation: ScoreActivation | None  # None: the files name one that is not known here

    def activation_of(self, args: ClassificationArgs) -> ScoreActivation:
        """The one that is asked for, else the model's. Raises ModelError where neither is known, or makes sense."""
        activation = args.activation or self.activation
        if activation is None:
            raise ModelError(
                "classification.activation: the one that the model's config.json names is not known here; set it to "
                "sigmoid or none, as the model's card says"
            )
        if activation == "softmax" and len(self.labels) == 1:
            raise ModelError("classification.activation: softmax over the model's one label is always 1; set sigmoid")
        return activation

    def model_len(self, asked: int | None) -> int:
        """The longest text in tokens where `engine.max_model_len` is `asked`. Raises UsageError for too much."""
        return self.max_model_len if asked is None else self.model.model_len(asked)

    @classmethod
    def from_dir(cls, path: Path | str, adapter: Path | None = None) -> ClassificationConfig:
        """Read a model's directory. An `adapter` may bring the head for labels, whose names are numbers then.

        Raises ModelError, naming the file, for what is broken or no classifier.
        """
        path = Path(path)
        added, longest = None if adapter is None else _labels_of(adapter), max_text_len(path)
        return read_config(path, lambda raw: _parsed(_with_labels(with_dtype(raw, path), added), longest))


def is_classifier(architecture: str) -> bool:
    """Whether it has a head for labels of texts."""
    return architecture.endswith(CLASSIFIERS)


def _labels_of(adapter: Path) -> int | None:
    """How many labels an adapter has a head for; None where it was not trained with one."""
    config = AdapterConfig.from_dir(adapter)
    return config.num_labels() if config.classifies else None


def _with_labels(raw: Mapping[str, Any], num_labels: int | None) -> Mapping[str, Any]:
    """The config.json of a model without a head as that of one with so many labels."""
    names = raw.get("architectures") or ()
    if num_labels is None or any(map(is_classifier, names)):
        return raw
    return {**raw, "architectures": [classifier_of(name) for name in names], "num_labels": num_labels, "id2label": None}


def classifier_of(architecture: str) -> str:
    """RobertaForSequenceClassification of RobertaForMaskedLM and RobertaModel."""
    return architecture.removesuffix("Model").partition("For")[0] + CLASSIFIERS


def _parsed(raw: Mapping[str, Any], longest: int) -> ClassificationConfig:
    if not any(map(is_classifier, raw.get("architectures") or ())):
        given = ", ".join(map(str, raw.get("architectures") or ())) or "none"
        raise ModelError(
            f"architectures: {given}, and none ends in {CLASSIFIERS}: this is no model that classifies texts; take "
            "another, or write task: embed or generate"
        )
    model, labels = _model(raw), _labels(raw)
    return ClassificationConfig(
        model=model,
        max_model_len=min(model.max_position_embeddings, longest),
        labels=labels,
        activation=_activation(raw, len(labels)),
    )


def _model(raw: Mapping[str, Any]) -> ModelConfig:
    """Its transformer: a DecoderConfig where the engine's own decoder can be it, under the name of its body."""
    bodies = {**raw, "architectures": [name.replace(CLASSIFIERS, "Model") for name in raw["architectures"]]}
    if find_family(bodies) is not None:
        with suppress(ModelError):  # what the decoder cannot do, transformers' code may
            model = text_config(bodies)
            if isinstance(model, DecoderConfig):
                return model
    return text_config(raw)


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the labels; as transformers has it, two where nothing is said."""
    names = raw.get("id2label")
    if not names:
        return tuple(f"LABEL_{number}" for number in range(int(raw.get("num_labels") or 2)))
    by_number = {int(number): str(name) for number, name in names.items()}
    if sorted(by_number) != list(range(len(by_number))):
        raise ModelError(f"id2label: its numbers are {sorted(by_number)}, not 0 to {len(by_number) - 1}; fix it")
    return tuple(by_number[number] for number in range(len(by_number)))


def _activation(raw: Mapping[str, Any], num_labels: int) -> ScoreActivation | None:
    """As transformers' pipelines have it; of one label as the model's cross-encoder key has it, if there is one."""
    problem = raw.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise ModelError(f"problem_type {problem!r} is not supported; these are: {', '.join(_PROBLEMS)}")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification":
        return "sigmoid"
    if num_labels > 1:
        return "softmax"
    own = (raw.get("sentence_transformers") or {}).get("activation_fn")
    own = own or raw.get("sbert_ce_default_activation_function")
    return "sigmoid" if own is None else _OF_CLASS.get(str(own).rsplit(".")[-1])

"""What a model's files say of how a text becomes scores of labels: config.json of a sequence classification model.

Torch-free. How what comes out of the model is to be read stands in no single place: transformers' pipelines go by
`problem_type` and the number of labels, sentence-transformers' cross-encoders by a key of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.config_file import read_config
from bulkrun.models.config.embedding_config import max_text_len
from bulkrun.models.config.encoder_config import text_config
from bulkrun.models.config.model_config import ModelConfig, with_dtype
from bulkrun.settings import ScoreActivation

_HEAD = "ForSequenceClassification"
_OF_PROBLEM: Mapping[str, ScoreActivation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
_OF_CLASS: Mapping[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationConfig:
    """One model as a maker of scores."""

    model: ModelConfig
    max_model_len: int  # tokens of a text unless the user asks for more, up to `model`'s positions
    labels: tuple[str, ...]  # in the order of the scores
    activation: ScoreActivation

    def model_len(self, asked: int | None) -> int:
        """The longest text in tokens where `engine.max_model_len` is `asked`. Raises UsageError for too much."""
        return self.max_model_len if asked is None else self.model.model_len(asked)

    @classmethod
    def from_dir(cls, path: Path | str) -> ClassificationConfig:
        """Read a model's directory. Raises ModelError, naming the file, for what is broken or no classifier."""
        path = Path(path)
        return read_config(path, lambda raw: _parsed(path, with_dtype(raw, path)))


def is_classifier(architecture: str) -> bool:
    """Whether it has a head for labels of texts."""
    return architecture.endswith(_HEAD)


def _parsed(path: Path, raw: Mapping[str, Any]) -> ClassificationConfig:
    if not any(map(is_classifier, raw.get("architectures") or ())):
        given = ", ".join(map(str, raw.get("architectures") or ())) or "none"
        raise ModelError(
            f"architectures: {given}, and none ends in {_HEAD}: this is no model that classifies texts; take another, "
            "or write task: embed or generate"
        )
    model, labels = text_config(raw), _labels(raw)
    return ClassificationConfig(
        model=model,
        max_model_len=min(model.max_position_embeddings, max_text_len(path)),
        labels=labels,
        activation=_activation(raw, len(labels)),
    )


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the labels; as transformers has it, two where nothing is said."""
    names = raw.get("id2label")
    if not names:
        return tuple(f"LABEL_{number}" for number in range(int(raw.get("num_labels") or 2)))
    by_number = {int(number): str(name) for number, name in names.items()}
    if sorted(by_number) != list(range(len(by_number))):
        raise ModelError(f"id2label: its numbers are {sorted(by_number)}, not 0 to {len(by_number) - 1}; fix it")
    return tuple(by_number[number] for number in range(len(by_number)))


def _activation(raw: Mapping[str, Any], num_labels: int) -> ScoreActivation:
    """A cross-encoder's own key first, then the kind of problem, then the number of labels."""
    own = (raw.get("sentence_transformers") or {}).get("activation_fn")
    own = own or raw.get("sbert_ce_default_activation_function")
    if own is not None and (known := _OF_CLASS.get(str(own).rsplit(".")[-1])) is not None:
        return known
    problem = raw.get("problem_type")
    if problem is not None and problem not in _OF_PROBLEM:
        raise ModelError(f"problem_type {problem!r} is not supported; these are: {', '.join(_OF_PROBLEM)}")
    return _OF_PROBLEM[problem] if problem is not None else "sigmoid" if num_labels == 1 else "softmax"

"""What a job that classifies leaves open, from its model's config.json: labels, how numbers become scores, length.

All of it goes into the job, so that the run's record says what its labels are, and a file that says something else
tomorrow makes another run.
"""

from __future__ import annotations

from pathlib import Path

from bulkrun.data.types.json_types import is_unicode
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.config.find_model import resolve_model


def find_classifier(name: str, adapter: Path | None, bundled_root: Path) -> tuple[Path, ClassificationConfig]:
    """The directory of a model that classifies, and what its files, and its adapter's, say. Raises ModelError."""
    model_dir = resolve_model(name, bundled_root=bundled_root, task="classify" if adapter is None else "embed")
    return model_dir, ClassificationConfig.from_dir(model_dir, adapter)


def with_classification(spec: JobSpec, model: ClassificationConfig) -> JobSpec:
    """The spec with every key of `classification`, and the length of a text, as the model has them where it is silent.

    Raises JobFileError for another number of labels, for two of one name and for one that is no text, ModelError for an
    activation that is not known or makes no sense, UsageError for a length that the model does not have.
    """
    given = spec.classification
    labels = list(model.labels) if given.labels is None else given.labels
    if len(labels) != len(model.labels):
        raise JobFileError(
            [f"classification.labels: {len(labels)} names, and the model has {len(model.labels)} labels "
             f"({', '.join(model.labels)})"]
        )  # fmt: skip
    if odd := [label for label in labels if not is_unicode(label)]:
        raise JobFileError(
            [f"classification.labels: {odd[0]!r} is not Unicode text (half a surrogate pair), which no column holds; "
             "name the labels here as you want to see them"]
        )  # fmt: skip
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise JobFileError([f"classification.labels: {', '.join(twice)} more than once; give each label its own name"])
    made = {"activation": model.activation_of(given.to_args()), "labels": labels}
    return spec.with_keys(classification=made, engine={"max_model_len": model.model_len(spec.engine.max_model_len)})

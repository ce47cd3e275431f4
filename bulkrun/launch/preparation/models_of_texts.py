"""The model of a job that generates nothing: found, and what its files say filled into the job."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch.preparation.classification import find_classifier, with_classification
from bulkrun.launch.preparation.embedding import find_embedding_model, with_embedding
from bulkrun.models.config.model_config import ModelConfig


def with_model_of_texts(spec: JobSpec, adapter: Path | None, bundled_root: Path) -> tuple[JobSpec, Path, ModelConfig]:
    """The job as its model completes it, the model's directory, and its transformer.

    Raises JobFileError, UsageError or ModelError, naming the key, for what the model cannot do or does not say.
    """
    if spec.task == "classify":
        model_dir, classifier = find_classifier(spec.model, adapter, bundled_root)
        return with_classification(spec, classifier), model_dir, classifier.model
    model_dir, embedding = find_embedding_model(spec.model, adapter, bundled_root)
    return with_embedding(spec, embedding), model_dir, embedding.model

"""What a job that embeds leaves open, from its model's own files: pooling, length, dimensions, the text before each.

All of it goes into the job, so that the run's record says what its vectors are, and a file that says something else
tomorrow makes another run.
"""

from __future__ import annotations

from pathlib import Path

from bulkrun.errors import JobFileError, did_you_mean
from bulkrun.job.jobfile.embedding import EmbeddingSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.find_model import resolve_model


def find_embedding_model(name: str, adapter: Path | None, bundled_root: Path) -> tuple[Path, EmbeddingConfig]:
    """The directory of a model that embeds, and what its files, or its adapter's, say. Raises ModelError."""
    model_dir = resolve_model(name, bundled_root=bundled_root, task="embed")
    return model_dir, EmbeddingConfig.from_dir(model_dir, adapter)


def with_embedding(spec: JobSpec, model: EmbeddingConfig) -> JobSpec:
    """The spec with every key of `embedding`, and the length of a text, as the model has them where the job is silent.

    Raises JobFileError, UsageError or ModelError, naming the key, for what the model cannot do or does not say.
    """
    given = spec.embedding
    args = given.to_args()
    made = model.with_args(args)
    embedding = {
        "pooling": made.pooling,
        "normalize": made.normalize,
        "dimensions": model.vector_size(args),
        "prompt": _text_before(given, model),
        "prompt_name": None,
    }
    return spec.with_keys(embedding=embedding, engine={"max_model_len": model.model_len(spec.engine.max_model_len)})


def _text_before(given: EmbeddingSpec, model: EmbeddingConfig) -> str:
    """The text before each text; "" for none, so that it is not looked for again."""
    if given.prompt is not None:
        return given.prompt
    name = given.prompt_name or model.default_prompt_name
    if name is None:
        return ""
    if name not in model.prompts:
        there = f"it has {', '.join(model.prompts)}" if model.prompts else "it has none; write embedding.prompt"
        hint = did_you_mean(name, model.prompts, str) or there
        raise JobFileError([f"embedding.prompt_name: the model has no prompt {name!r}; {hint}"])
    return model.prompts[name]

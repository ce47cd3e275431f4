"""The sampling keys that a job leaves open, from the model's own `generation_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bulkrun.errors import JobFileError, ModelError
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.overrides import sampling_value
from bulkrun.models.config.model_dir import generation_defaults
from bulkrun.request import SamplingParams


def with_defaults(spec: JobSpec, model_dir: Path) -> JobSpec:
    """The spec with each sampling key that the job leaves open taken from the model's `generation_config.json`."""
    defaults, file = generation_defaults(model_dir), str(model_dir / "generation_config.json")
    return spec.model_copy(update={"sampling": sampling_with_defaults(spec.sampling, defaults, file)})


def sampling_with_defaults(
    sampling: SamplingSpec, defaults: dict[str, Any], file: str = "the model's generation_config.json"
) -> SamplingSpec:
    """The same for a sampling section alone; `file` is where the defaults come from.

    Raises ModelError for a default that cannot be used, JobFileError where `max_tokens` are less than `min_tokens`.
    """
    is_open = [key for key in defaults if key in type(sampling).model_fields and getattr(sampling, key) is None]
    filled = sampling.model_copy(update={key: _default(key, defaults[key], file) for key in is_open})
    most = filled.max_tokens or SamplingParams().max_tokens
    if filled.min_tokens > most:
        whose = f"max_new_tokens in {file}" if "max_tokens" in is_open else "the default, as the model has none"
        what = f"{filled.min_tokens} is more than max_tokens, {most} ({whose}); set sampling.max_tokens"
        raise JobFileError([f"sampling.min_tokens: {what}"])
    return filled


def _default(key: str, value: Any, file: str) -> Any:
    """A model's default as the value that the job file would hold: 50.0 for a top_k is 50."""
    try:
        typed = sampling_value(key, value)
        SamplingParams(**{key: typed})  # type: ignore[arg-type]
    except ValueError as problem:
        name = "max_new_tokens" if key == "max_tokens" else key
        what = str(problem).removeprefix(f"{key}: ")
        raise ModelError(f"{file}: {name}: {what}; fix it, or set sampling.{key} in the job file") from None
    return typed

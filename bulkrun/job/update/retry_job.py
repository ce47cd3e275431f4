"""Which settings a retry may change: those that decide how its rows run, none that decide what the results are.

Knows the job file's keys; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bulkrun.errors import UsageError
from bulkrun.job.jobfile.load import override_job
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.result_columns import result_fields

_SECTIONS = ("prompt", "sampling", "run", "engine")
_FIXED = {
    "sampling.n": "the results have a fixed number of samples per row",
    "run.limit": "a retry runs the rows that failed",
    "run.incremental": "it is what this run is",
    "run.on_vanished": "a retry removes nothing",
}


def retry_job(job: Mapping[str, Any], overrides: Sequence[str]) -> JobSpec:
    """The recorded job with the `--set` values of a retry. Raises UsageError or JobFileError, naming the key."""
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key.split(".")[0] not in _SECTIONS:
            raise UsageError(f"--set {key}: a retry can change {', '.join(_SECTIONS)}, nothing else")
        if key in _FIXED:
            raise UsageError(f"--set {key}: not in a retry: {_FIXED[key]}")
    spec = override_job(job, overrides)
    _refuse_fixed(JobSpec.model_validate(job), spec, overrides)
    return spec


def _refuse_fixed(old: JobSpec, new: JobSpec, overrides: Sequence[str]) -> None:
    """Raise UsageError where a section that was given whole changes a key that is fixed, or leaves it out."""
    for key, why in _FIXED.items():
        section, name = key.split(".")
        was, is_now = (getattr(getattr(job, section), name) for job in (old, new))
        if was != is_now:
            raise UsageError(
                f"--set {' '.join(overrides)}: {key} would be {is_now}, and it is {was}: {why}; set the section's keys "
                f"one by one (--set {section}.KEY=VALUE), or write {name}: {was} into it"
            )


def sets_error_rate(job: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the `--set` values say what `run.max_error_rate` is, by itself or within a section given whole."""
    run = {key: value for key, value in job["run"].items() if key != "max_error_rate"}
    return "max_error_rate" in override_job({**job, "run": run}, overrides).run.model_fields_set


def refuse_other_columns(job: Mapping[str, Any], spec: JobSpec, overrides: Sequence[str]) -> None:
    """Raise UsageError where the retry would have other columns than the recorded job.

    Its job is prepared by now: a schema is read, the format of tool calls told.
    """
    old, new = (result_fields(each) for each in (JobSpec.model_validate(job), spec))
    if old != new:
        names = sorted({field.name for field in {*old} ^ {*new}})
        raise UsageError(
            f"--set {' '.join(overrides)}: would change the columns of the results ({', '.join(names)}), which a retry "
            "cannot; run the job again with --fresh or another output.path"
        )

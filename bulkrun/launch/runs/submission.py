"""What a submit was asked for: a job, where it was written, and how to treat a run that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bulkrun.errors import UsageError
from bulkrun.job.jobfile.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Submission:
    """`spec` came from `job_file` (None: from a program) with `overrides`; flags are those of `bulkrun submit`.

    Raises UsageError for flags that contradict each other or the job.
    """

    spec: JobSpec
    job_file: Path | None = None
    overrides: Sequence[str] = ()
    fresh: bool = False
    resume_anyway: bool = False
    full_refresh: bool = False

    def __post_init__(self) -> None:
        if self.full_refresh and not self.spec.run.incremental:
            raise UsageError(
                "--full-refresh is for jobs with run.incremental: true; --fresh runs this one from the beginning"
            )
        if self.fresh and self.resume_anyway:
            raise UsageError("--fresh starts from the beginning and --resume-anyway continues; give only one of them")

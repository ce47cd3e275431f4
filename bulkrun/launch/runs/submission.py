"""What a submit was asked for: a job, where it was written, and how to treat a run that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bulkrun.job.jobfile.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Submission:
    """`spec` came from `job_file` (None: from a program) with `overrides`; flags are those of `bulkrun submit`."""

    spec: JobSpec
    job_file: Path | None = None
    overrides: Sequence[str] = ()
    fresh: bool = False
    resume_anyway: bool = False
    full_refresh: bool = False

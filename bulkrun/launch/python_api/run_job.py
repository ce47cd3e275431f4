"""The Python API's `run_job`: what `bulkrun submit` does, called from a program. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from bulkrun.errors import UsageError, shown_value
from bulkrun.job.jobfile.load import job_of, load_job
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_record import read_record
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.launch.runs.run import Submitted
from bulkrun.launch.runs.submission import Submission
from bulkrun.launch.runs.submit import submit_job


class _Quiet:
    """A view that shows nothing, or calls back."""

    def __init__(self, on_progress: Callable[[ProgressSnapshot], None] | None) -> None:
        self._on_progress = on_progress

    def phase(self, text: str) -> None:
        """Nothing to show."""

    def note(self, text: str) -> None:
        """Nothing to show."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        if self._on_progress is not None:
            self._on_progress(snapshot)


def run_job(
    job: JobSpec | Mapping[str, Any] | str | PathLike[str],
    *,
    fresh: bool = False,
    resume_anyway: bool = False,
    full_refresh: bool = False,
    on_progress: Callable[[ProgressSnapshot], None] | None = None,
) -> Submitted:
    """What `bulkrun submit` does: run a job, or continue it; `job` is a job file's path, or its content.

    `fresh`, `resume_anyway` and `full_refresh` are the command's options of these names. Runs it where its
    `run.executor` says; with Slurm this waits until the run is finished. Returns the finished run: `totals` (rows,
    errors, tokens), `run.root`, `worked` (False: it was finished before). `on_progress` gets the numbers about once a
    second, and those of the end.

    In the main thread Ctrl-C and SIGTERM save and raise Interrupted, and the same call continues; a second one ends the
    whole process at once. In another thread signals are left alone. Raises the BulkrunErrors of `bulkrun.errors`, each
    with the exit code that the command would have ended with.
    """
    spec, job_file = _read(job)
    view = _Quiet(on_progress)
    asked = Submission(
        spec=spec, job_file=job_file, fresh=fresh, resume_anyway=resume_anyway, full_refresh=full_refresh
    )
    done = submit_job(asked, view, wait=True)
    assert isinstance(done, Submitted), "it was waited for"
    if done.worked:
        view.update(_end_of(done))  # a short run lies between two looks
    return done


def _read(job: JobSpec | Mapping[str, Any] | str | PathLike[str]) -> tuple[JobSpec, Path | None]:
    """The job, and its file where it was one. Raises JobFileError, and UsageError for what is neither."""
    if isinstance(job, str | PathLike):
        return load_job(Path(job)), Path(job)
    if isinstance(job, JobSpec | Mapping):
        return job if isinstance(job, JobSpec) else job_of(job), None
    raise UsageError(f"{shown_value(job)} is neither the path of a job file nor a mapping with a job file's keys")


def _end_of(done: Submitted) -> ProgressSnapshot:
    totals, errors = done.totals, sum(done.totals.errors.values())
    return ProgressSnapshot(
        rows_total=totals.ok + errors,
        rows_done=totals.ok + errors,
        error_rows=errors,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        elapsed_s=done.elapsed_s,
        plan_complete=True,
        generates=read_record(done.run).task == "generate",
    )

"""How a submit enters its run: old results leave for a good job alone, and a start that fails undoes what it did."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bulkrun.data.storage.durable import remove_tree
from bulkrun.errors import ExecutorError, RunError
from bulkrun.executors.slurm import queued_jobs
from bulkrun.job.store.aside import move_back
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_gate import forget_start, start_anew
from bulkrun.job.store.run_record import RunRecord
from bulkrun.launch.preparation.prepare import PreparedJob
from bulkrun.launch.runs.preview import check_prepared
from bulkrun.launch.runs.run import View
from bulkrun.launch.runs.submission import Submission
from bulkrun.models.config.model_dir import ignored_defaults


@dataclass(frozen=True)
class EnteredRun:
    """A run that was entered; `began` is False where it was there before, `aside` is where an older one is now."""

    prepared: PreparedJob
    record: RunRecord
    began: bool
    made_root: bool
    aside: Path | None

    def undo(self, view: View) -> None:
        """Remove a run that began here and has nothing yet; the older one gets its place back."""
        if not self.began:
            return
        run = self.prepared.run
        with suppress(RunError, OSError):
            forget_start(run, self.record, with_root=self.made_root)
            if self.aside is not None:
                _bring_back(run, self.aside, view)


def enter_run(prepared: PreparedJob, wanted: RunRecord, asked: Submission, view: View) -> EnteredRun:
    """Enter the run of `wanted`; a fresh start moves an older one aside, once all that can be checked has been checked.

    Raises RunError where an array waits for the older one, and what `check_prepared`, `start_anew` and
    `PreparedJob.enter` raise.
    """
    run, aside = prepared.run, None
    if asked.fresh and run.state.is_dir():
        _refuse_queued(run)
        check_prepared(prepared, anew=True)
        if aside := start_anew(run, wanted):
            view.note(f"the old results are now in {aside}")
    made_root = not run.root.exists()
    try:
        record = prepared.enter(wanted, resume_anyway=asked.resume_anyway)
    except RunError:  # a full disk
        if aside is not None:
            _undo_start(run, aside, view)
        raise
    began = record.run_id == wanted.run_id
    if began and prepared.spec.generates and (ignored := ignored_defaults(prepared.model_dir)):
        view.note(f"the model's generation_config.json has {', '.join(ignored)}, which is not applied")
    return EnteredRun(prepared, record, began, made_root, aside)


def _refuse_queued(run: RunDir) -> None:
    """Raise RunError for an array that waits for this run: it would work on the new one in its place, and no cancel of
    that would find it, for its script is moved aside too."""
    with suppress(ExecutorError):  # no queue that can be asked: another machine, without Slurm
        if queued := queued_jobs(run):
            raise RunError(
                f"{run.root}: {queued[0].standing}; it would work on the new run: `bulkrun cancel {run.root}` takes "
                "it out of the queue, then try again"
            )


def _undo_start(run: RunDir, aside: Path, view: View) -> None:
    """Remove what was made of a run before its record, unless another process has made one meanwhile."""
    with suppress(RunError, OSError):
        if not run.run_json.exists():
            remove_tree(run.state)
            _bring_back(run, aside, view)


def _bring_back(run: RunDir, aside: Path, view: View) -> None:
    move_back(run, aside)
    view.note(f"the old results are back in {run.root}")

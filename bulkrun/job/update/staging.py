"""A change to a finished run while it is being computed: a run of its own in `.bulkrun/next`, and what it is for.

    next/.bulkrun/run.json          its job: that of the run, with its own output.path (and a retry's overrides)
    next/.bulkrun/input.subset      its input: the rows to run, each with the result row that it answers
    next/.bulkrun/update.json       what is changed; written last: without it the staging is not whole and begins anew
    next/.bulkrun/merge.json        the staged parts that go into the results; from here on the merge is completed

Planner and workers know nothing of all this: to them it is a run. Knows no input and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from traceback import clear_frames
from typing import Any

from bulkrun.data.storage.durable import (
    disk_errors,
    read_json,
    remove_tree,
    replace_json,
    swap_in,
    temporary,
    write_new_json,
)
from bulkrun.errors import InputError, RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_gate import open_run
from bulkrun.job.store.run_record import RunRecord, new_record, read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.update.cause import Cause, cause_document, cause_of
from bulkrun.job.update.update_claim import refuse_lost_hold


@dataclass(frozen=True)
class Update:
    """What a staged run is for.

    `cause` is what was asked for, to know the same command again. `first_row` and `first_part` are the first
    numbers that new rows and new parts get, `next_row` is the first that stays unused. `dropped` are result rows to
    remove. `counts` is for people. `record` is the run's record once all is merged (None: as it is).
    """

    cause: Cause
    generation: int
    rows: int
    first_row: int
    next_row: int
    first_part: int
    counts: dict[str, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    record: dict[str, Any] | None = None

    def command(self, run: RunDir) -> str:
        """The command that began it in `run`, as a shell takes it: it goes on with it."""
        record = RunRecord(**self.record) if self.record else read_record(run)
        return self.cause.command(run, record)

    def to_json(self) -> dict[str, Any]:
        """The contents of update.json."""
        return {**asdict(self), "cause": cause_document(self.cause)}


def staged_record(
    run: RunDir, record: RunRecord, job: Mapping[str, Any], *, max_error_rate: float | None = None
) -> RunRecord:
    """The record of the staged run of `record`'s run, with the settings of `job`.

    It is as old as the run, so that prompts that hold the date stay what they were.
    """
    pace = {**job["run"], "limit": None}
    if max_error_rate is not None:
        pace["max_error_rate"] = max_error_rate
    output = {**job["output"], "path": str(run.staged.root), "state": None, "partition_by": []}
    staged = {**job, "output": output, "run": pace}
    made = new_record(
        staged,
        input_facts={},
        model_facts={"model": record.identity["model"]},
        prompt_facts=record.prompt_facts,
        versions=record.versions,
        job_file=record.job_file,
    )
    return made.as_old_as(record)


def open_staging(run: RunDir, record: RunRecord) -> RunDir:
    """An empty staged run; one that never became whole is removed, and what a kill left of one that is merged."""
    refuse_lost_hold(run)
    remove_tree(run.staged.root)
    open_run(run.staged, record)
    return run.staged


@contextmanager
def removed_on_failure(run: RunDir, remove: Callable[[RunDir], None] | None = None) -> Iterator[None]:
    """Stage in the body. Where that fails nothing of it stays (`remove`): most failures are a full disk.

    Where that fails too it is not said: the first failure is the one to fix, and the next attempt removes the rest.
    """
    try:
        yield
    except BaseException as error:
        _forget_frames(error)
        with suppress(RunError, OSError):
            refuse_lost_hold(run)  # what is there by now may be another process's
            (remove or remove_staged)(run)
        raise


def _forget_frames(error: BaseException | None) -> None:
    """Of an error and those that it came from: readers and writers in there hold files open, which NFS does not
    remove."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def close_staging(
    run: RunDir, update: Update, write_input: Callable[[Path], None], check_input: Callable[[], None]
) -> None:
    """Write the staged run's input and then what it is for: from here on it is continued, not begun again.

    Its rows are picked by place, so `check_input` raises when the files changed since they were compared.
    """
    staged = run.staged
    tmp = temporary(staged.subset)
    try:
        with disk_errors("writing the rows to run", staged.subset):
            write_input(tmp)
    except InputError:
        check_input()  # says more, where the input is not what it was
        raise
    refuse_lost_hold(run)
    swap_in(tmp, staged.subset)
    check_input()
    refuse_lost_hold(run)
    replace_json(staged.update, update.to_json())


def order_again(run: RunDir, update: Update, record: RunRecord) -> None:
    """Note that another command goes on with an update: its engine and pace are those of `record` from here on.

    Without it the run would take those of the first command in the merge, as a time limit that turned out too short.
    """
    old = RunRecord(**update.record) if update.record else None
    if old is None or (old.job, old.job_file, old.overrides) != (record.job, record.job_file, record.overrides):
        refuse_lost_hold(run)
        replace_json(run.staged.update, replace(update, record=asdict(record)).to_json())


def read_update(run: RunDir) -> Update | None:
    """The staged update; None if nothing is staged, or staging was not finished."""
    document = read_json(run.staged.update)
    try:
        return Update(**{**document, "cause": cause_of(document["cause"])}) if document else None
    except (TypeError, KeyError) as error:
        raise RunError(
            f"{run.staged.update}: not readable by this bulkrun ({error}); "
            f"finish with the version that began it, or remove {run.staged.root}"
        ) from error


def pending_update(run: RunDir, generation: int) -> Update | None:
    """The update under way in a run of this generation. One that is merged already, left by a kill, does not count."""
    update = read_update(run)
    return update if update is not None and update.generation > generation else None


def update_under_way(run: RunDir) -> Update | None:
    """As `pending_update`, for readers: the staged update unless it is merged already."""
    totals = read_totals(run)
    return read_update(run) if totals is None else pending_update(run, totals.generation)


def begin_merge(run: RunDir) -> list[int]:
    """Fix which staged parts are merged, or read which were. The staged run is not worked on any more."""
    document = read_json(run.staged.merging)
    if document is None:
        write_new_json(run.staged.merging, {"shards": sorted(run.staged.committed_shards())})
        document = read_json(run.staged.merging)
    assert document is not None, "it was just written"
    return list(document["shards"])


def is_merging(run: RunDir) -> bool:
    """Whether the results are being changed: a kill may have left some parts new and some old."""
    return run.staged.merging.exists() and update_under_way(run) is not None


def discard(run: RunDir) -> None:
    """Throw the staged run away. What is being merged cannot be: finish it first."""
    assert not is_merging(run), "parts may be changed already"
    remove_staged(run)


def remove_staged(run: RunDir) -> None:
    """Remove the staged run; first what it is for, so that after a kill nobody takes the rest of it for a whole one."""
    refuse_lost_hold(run)
    with disk_errors("removing", run.staged.update):
        run.staged.update.unlink(missing_ok=True)
    remove_tree(run.staged.root)

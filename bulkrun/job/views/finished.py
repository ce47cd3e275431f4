"""Whether a finished run still has its results: `_SUCCESS` says how many rows, the parts' footers what is there."""

from __future__ import annotations

import shlex

from bulkrun.data.results.parts import read_part_info
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.update.staging import is_merging


def finished_totals(run: RunDir) -> RunTotals | None:
    """The totals of a finished run, None while it is not finished. Raises RunError when its results are not there."""
    totals = read_totals(run)
    if totals is not None and (lost := lost_rows(run, totals)) is not None:
        first = "move it away" if _rows_found(run) > _rows_wanted(totals) else "bring it back from a backup"
        raise RunError(f"{run.root}: {lost}; {first}, or {_last_resort(run)}")
    return totals


def lost_rows(run: RunDir, totals: RunTotals) -> str | None:
    """Why the results are not what the totals say, None where they are.

    While an update puts its parts in their places they are between two totals, and nothing is wrong.
    """
    want, found = _rows_wanted(totals), _rows_found(run)
    if found == want or is_merging(run) or read_totals(run) != totals:
        return None
    verify = f"bulkrun verify {shlex.quote(str(run.root))}"
    what = "is missing" if found < want else "does not belong there"
    return f"_SUCCESS says {want:,} rows, the parts hold {found:,}: `{verify}` says what {what}"


def _rows_wanted(totals: RunTotals) -> int:
    return totals.ok + sum(totals.errors.values())


def _rows_found(run: RunDir) -> int:
    return sum(read_part_info(path).rows for path in run.parts().values())


def _last_resort(run: RunDir) -> str:
    """Without `_SUCCESS` the plan tells what is to run, or a night's input: not where there are parts of no plan."""
    if read_record(run).job["run"].get("incremental") or not run.committed_shards() - run.planned_shards():
        return f"delete {run.success} and submit the job again"
    return f"submit the job with --fresh; leave {run.success} there, nothing else tells what was done"

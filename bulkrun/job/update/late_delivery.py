"""What the bucket of a finished run still lacks, brought by a process that is none of its workers and changes nothing.

A change of the run (compact, a night, a retry) brings its own objects and takes old ones away: an old part that came
after that would stay for good, and its rows be there twice.
"""

from __future__ import annotations

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.update.update_claim import kept_unchanged
from bulkrun.job.work.delivery import ShouldStop, deliver, lacks_results


def deliver_late(run: RunDir, record: RunRecord, should_stop: ShouldStop) -> int | None:
    """How many parts were uploaded; None where nothing was missing, `_SUCCESS` included.

    Raises what `deliver` raises, and RunError where somebody is changing the run.
    """
    if not lacks_results(run, record):
        return None
    with kept_unchanged(run):
        return deliver(run, record, should_stop)

"""What the bucket of a finished run still lacks, brought by a process that is none of its workers and changes nothing.

A change of the run (compact, a night, a retry) brings its own objects and takes old ones away: an old part that came
after that would stay for good, and its rows be there twice. A change that a kill broke off left parts of before beside
new ones, of which no totals tell: they stay here until its command has finished it.
"""

from __future__ import annotations

from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.update.staging import is_merging, read_update
from bulkrun.job.update.update_claim import kept_unchanged
from bulkrun.job.work.delivery import ShouldStop, deliver, lacks_objects, lacks_results


def deliver_late(run: RunDir, record: RunRecord, should_stop: ShouldStop, *, look: bool = False) -> int | None:
    """How many parts were uploaded; None where nothing was missing, `_SUCCESS` included. `look`: ask the store for
    what somebody may have removed.

    Raises what `deliver` raises, and RunError where somebody is changing the run, or was killed while doing so.
    """
    removed = look and lacks_objects(run, record, should_stop)
    if not removed and not lacks_results(run, record):
        return None
    with kept_unchanged(run):
        if is_merging(run) and (update := read_update(run)) is not None:
            raise RunError(
                f"{run.root}: rows are being put into the results: `{update.command(run)}` finishes that, and then "
                f"brings them to {record.bucket_url}"
            )
        return deliver(run, record, should_stop, anew=removed)

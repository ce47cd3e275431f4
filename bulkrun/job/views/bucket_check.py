"""Does the bucket of a finished run hold what its directory holds? One listing, and a look at each file's content."""

from __future__ import annotations

import shlex

from bulkrun.data.results.parts import read_part_info
from bulkrun.errors import RunError
from bulkrun.job.store.bucket_owner import SUCCESS, name_of
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.work.delivery import content_digest, lacks_results

_SHOWN = 3


def bucket_problems(run: RunDir, record: RunRecord) -> list[str]:
    """What is wrong in the bucket and what mends it; nothing for a local run."""
    try:
        prefix = record.bucket()
        if prefix is None:
            return []
        if lacks_results(run, record):
            return [f"{prefix.url}: not all results are there yet: `{upload_command(run)}` uploads what is missing"]
        return _differences(run, prefix)
    except RunError as error:
        return [str(error)]


def upload_command(run: RunDir) -> str:
    """What brings the results of a finished run into its bucket: it asks for no input and no model."""
    return f"bulkrun worker {shlex.quote(str(run.root))}"


def _differences(run: RunDir, prefix: ObjectPrefix) -> list[str]:
    ours = {name_of(run, path): (path, read_part_info(path).attempt) for path in run.parts().values()}
    ours[SUCCESS] = (run.success, content_digest(run.success))
    there = prefix.list()
    strangers = [name for name in sorted(there.keys() - ours.keys()) if name.endswith(".parquet")]
    problems = [f"{prefix.url}/{name}: not a part of this run; move it away" for name in strangers]
    others = [
        name
        for name, (path, nonce) in sorted(ours.items())
        if name in there and not prefix.holds(path, name, nonce, there[name])
    ]
    problems += [f"{prefix.url}/{name}: another program put this; move it away" for name in others]
    if lacking := sorted([*others, *(ours.keys() - there.keys())]):
        shown = ", ".join(lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
        problems.append(
            f"{prefix.url}: {len(lacking)} of {len(ours)} objects are not there ({shown}): "
            f"`{upload_command(run)}` uploads them again"
        )
    return problems

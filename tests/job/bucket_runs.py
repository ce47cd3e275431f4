"""Runs for tests whose results go to a bucket, and a program that is killed at every step of bringing them there.

    python -m tests.job.bucket_runs FOLDER s3://BUCKET/PREFIX

The program forks one child a step N = 0, 1, 2...: it runs the job of FOLDER/N to PREFIX/N and kills itself with
SIGKILL at its Nth step, until a job has no such step. Then a child resumes them all; the number of kills is printed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.work.runner import RunOutcome
from tests.job.small_runs import Row, job, make_rows, start
from tests.s3_server import Bucket

ROWS = make_rows(24)


def bucket_job(url: str, state: Path, **options: Any) -> JobSpec:
    """A job whose results go to `url`."""
    spec = job(Path("unused"), **options)
    output = spec.output.model_copy(update={"path": url, "state": str(state)})
    return JobSpec.model_validate(spec.model_copy(update={"output": output}).model_dump())


def start_bucket_run(state: Path, url: str, rows: list[Row] = ROWS, **options: Any) -> RunOutcome:
    return start(state, rows, bucket_job(url, state), shard_rows=8, **options)


def bucket_results(bucket: Bucket, prefix: str) -> list[dict[str, Any]]:
    """All output rows in the bucket, in part order; columns that the oracle knows."""
    tables = [bucket.get(key) for key in bucket.list(f"{prefix}/") if key.endswith(".parquet")]
    rows = [row for data in tables for row in pq.read_table(pa.BufferReader(data)).to_pylist()]
    known = ("doc", "weight", "row", "sample", "response", "finish_reason", "error_code")
    return [{name: row[name] for name in known} for row in rows]


def _die_at(step: int) -> None:
    """Let this process die where the `step`th of the durable steps of a delivery would begin."""
    from bulkrun.job.store import object_store, run_gate, run_totals
    from bulkrun.job.work import commit, delivery

    steps = count()

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for owner, names in {
        object_store.ObjectPrefix: ("put", "put_new", "put_new_json", "remove"),
        delivery: ("replace_json",),
        commit: ("publish_new",),
        run_totals: ("publish_new",),
        run_gate: ("own_prefix",),
    }.items():
        for name in names:
            setattr(owner, name, mortal(getattr(owner, name)))


def _in_child(work: Callable[[], object]) -> int:
    """The exit status of a child that does `work`: 0, or what killed it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _run_killed_at(step: int, folder: Path, url: str) -> None:
    _die_at(step)
    start_bucket_run(folder, url)


def main(folder: Path, url: str) -> None:
    for step in count():
        status = _in_child(partial(_run_killed_at, step, folder / str(step), f"{url}/{step}"))
        assert status in (0, signal.SIGKILL), f"step {step} ended with {status}"
        if status == 0:
            break
    assert _in_child(partial(_resume, range(step), folder, url)) == 0, "a resume failed"
    print(step)


def _resume(steps: range, folder: Path, url: str) -> None:
    for step in steps:
        outcome = start_bucket_run(folder / str(step), f"{url}/{step}")
        assert outcome.totals is not None, f"step {step}: {outcome.state}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

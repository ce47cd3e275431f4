"""A run on real Ray actors whose workers have the fake engine, then, where the real one is at work, a submit on them.

python -m tests.executors.ray_run OUT ROWS JOB
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from bulkrun.cli import main
from bulkrun.executors.ray_cluster import RayWorkers
from bulkrun.job.jobfile.cluster import RaySpec
from bulkrun.job.store.run_dir import RunDir
from tests.executors.fake_worker import job_of, rows_of
from tests.job.small_runs import enter, write_plan

SHARD_ROWS = 50


def command(rows: str, run: RunDir, worker: str, supervisor: int) -> list[str]:
    """A worker that takes a second to start, and some for its rows."""
    fake = [sys.executable, "-m", "tests.executors.fake_worker", str(run.root), rows, str(SHARD_ROWS)]
    return [*fake, "--id", worker, "--supervisor", str(supervisor), "--step-s", "0.05"]


def run_on_actors(out: Path, rows: str) -> None:
    run, _ = enter(out, job_of(out))
    write_plan(run, rows_of(int(rows)), SHARD_ROWS)
    workers = RayWorkers(run, partial(command, rows), 2, RaySpec(cpus=1), print)
    while workers.tend():
        time.sleep(0.05)
    for error in workers.stop():
        raise error


if __name__ == "__main__":
    run_on_actors(Path(sys.argv[1]), sys.argv[2])
    main(["submit", sys.argv[3], "--executor", "ray"])

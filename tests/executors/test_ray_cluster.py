"""Workers as real Ray actors on a local cluster: killed again and again, every row exactly once.

The workers that are killed have the fake engine: what is proved is how actors look after them, and a real one takes
seconds to load each time. A submit with the real one comes after that.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.executors import cluster_jobs
from tests.executors.fake_worker import job_of, rows_of
from tests.job.small_runs import oracle, results
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install 'bulkrun[ray]'`"),
    pytest.mark.timeout(280),
]

ROOT = Path(__file__).resolve().parents[2]
ROWS, REAL_ROWS = 400, 8


class AtWork(NamedTuple):
    """A worker's process, the actor's that looks after it, and its id."""

    process: int
    actor: int
    worker: str


def at_work(out: Path) -> list[AtWork]:
    """The workers of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(out) in words and "--supervisor" in words:
                actor, worker = (words[words.index(option) + 1] for option in ("--supervisor", "--id"))
                found.append(AtWork(int(path.name), int(actor), worker))
    return found


def all_answer(out: Path, workers: list[AtWork]) -> bool:
    """Whether a row of each of them is saved."""
    saved = [path.name for path in (out / ".bulkrun/journal").glob("*.jsonl") if path.stat().st_size]
    return all(any(one.worker in name for name in saved) for one in workers)


def test_two_actors_killed_three_times_answer_every_row_once(tmp_path: Path) -> None:
    out = tmp_path / "on-ray"
    cluster_jobs.write_rows(tmp_path, REAL_ROWS)
    job = cluster_jobs.write_job(tmp_path, "real", "ray: {cpus: 1}\n", max_tokens=4)
    command = [sys.executable, "-m", "tests.executors.ray_run", str(out), str(ROWS), str(job)]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    until, victims = time.monotonic() + 240, set[AtWork]()
    while process.poll() is None and time.monotonic() < until:
        workers = at_work(out)
        # Twice an actor with its worker, and once a worker alone; each time when two that live have answered rows.
        if len(victims) < 3 and len(workers) == 2 and victims.isdisjoint(workers) and all_answer(out, workers):
            os.kill(workers[0].actor if len(victims) < 2 else workers[0].process, signal.SIGKILL)
            victims.add(workers[0])
        time.sleep(0.05)
    assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
    assert len(victims) == 3
    assert results(out) == oracle(rows_of(ROWS), job_of(out))
    assert all(row["error_code"] is None for row in cluster_jobs.results(tmp_path / "real", REAL_ROWS))
    wait_until(lambda: not at_work(out), "the end of its workers", 15)

"""Workers as real Ray actors on a local cluster: killed again and again, every row exactly once."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.executors.cluster_jobs import journals, results, write_job, write_rows
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install 'bulkrun[ray]'`"),
    pytest.mark.timeout(280),
]

ROWS = 240


def job_of(folder: Path, name: str) -> Path:
    return write_job(folder, name, "ray: {cpus: 1}\n", max_tokens=64)


def start(job: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bulkrun", "submit", str(job), *options]
    # compiled ops would be through before the third kill
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "BULKRUN_CPU_OPS": "reference"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def processes(words: str) -> list[int]:
    """Processes whose command line has these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if words in (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.name))
    return found


def test_two_actors_killed_three_times_answer_every_row_once(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    unbroken = start(job_of(tmp_path, "unbroken"))
    assert unbroken.wait() == 0

    out, kills = tmp_path / "on-ray", 0
    process = start(job_of(tmp_path, "on-ray"), "--executor", "ray", "--workers", "2")
    worker, deadline = f"bulkrun.launch.processes.worker {out}", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        hosts, workers = processes("ray::WorkerHost"), processes(worker)
        # Twice an actor with its worker, and once a worker alone; each time when rows were finished since.
        if kills < 3 and journals(out) and len(workers) == 2 and len(hosts) >= 2:
            os.kill((hosts if kills < 2 else workers)[0], signal.SIGKILL)
            kills += 1
            time.sleep(2.0)
        time.sleep(0.1)
    assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
    assert kills == 3
    assert results(out, ROWS) == results(tmp_path / "unbroken", ROWS)
    wait_until(lambda: not processes(worker), "the end of its workers", 15)

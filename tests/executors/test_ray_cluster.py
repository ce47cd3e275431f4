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

import pyarrow.parquet as pq
import pytest

from tests.executors.fake_worker import job_of, rows_of
from tests.job.small_runs import oracle, results

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install 'bulkrun[ray]'`"),
    pytest.mark.timeout(280),
]

ROOT = Path(__file__).resolve().parents[2]
ROWS, REAL_ROWS = 400, 8
JOB = """\
name: on-ray
model: bundled:tiny
input: {{path: {input}}}
prompt: {{column: text}}
sampling: {{max_tokens: 4, temperature: 0}}
output: {{path: {output}}}
engine: {{device: cpu, dtype: float32}}
ray: {{cpus: 1}}
"""


def write_job(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(REAL_ROWS)))
    path = folder / "job.yaml"
    path.write_text(JOB.format(input=folder / "rows.jsonl", output=folder / "real"))
    return path


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
    command = [sys.executable, "-m", "tests.executors.ray_run", str(out), str(ROWS), str(write_job(tmp_path))]
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
    (part,) = (tmp_path / "real").glob("part-*.parquet")
    assert pq.read_table(part).column("error_code").to_pylist() == [None] * REAL_ROWS
    gone = time.monotonic() + 15
    while at_work(out):
        assert time.monotonic() < gone, "a worker outlived its run"
        time.sleep(0.1)

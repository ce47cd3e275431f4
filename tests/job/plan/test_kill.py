"""kill -9 in the middle of planning, again and again: the plan in the end is the unbroken one, byte for byte."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bulkrun.data.storage.durable import make_dirs
from bulkrun.job.store.heartbeat import present
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from tests.job.plan.planning import job, make_plan, plan_bytes, write_parquet

ROWS = 4007
CHILD = """
import sys
from pathlib import Path
from tests.job.plan.test_kill import plan
print("ready", flush=True)
plan(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def plan(root: Path, table: Path) -> None:
    spec = job(table, input={"path": str(table), "id": "key"}, run={"window_rows": 1300}, output={"rows_per_file": 60})
    worker = Worker.this_process()
    make_dirs(RunDir(root).workers)
    with present(RunDir(root), worker, "planner"):
        make_plan(root, spec, worker=worker)


def planned_with_kills(root: Path, table: Path, kills: int, rng: random.Random, longest: float) -> int:
    """Plan in child processes that are killed after random times, then once to the end; how many died planning."""
    died = 0
    for _ in range(kills):
        command = [sys.executable, "-c", CHILD, str(root), str(table)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout and child.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, longest / 3))  # each goes on where the last one was, and may be faster than the first
        child.kill()
        died += child.wait() == -signal.SIGKILL
        child.stdout.close()
    plan(root, table)
    return died


def check_kills(tmp_path: Path, rounds: int, kills: int) -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choices("abc ", k=rng.randrange(1, 200))) for _ in range(ROWS)]
    table = write_parquet(tmp_path / "in.parquet", {"key": [row // 2 for row in range(ROWS)], "text": texts})
    started = time.perf_counter()
    plan(tmp_path / "unbroken", table)
    longest = time.perf_counter() - started
    for number in range(rounds):
        root = tmp_path / f"run-{number}"
        died = planned_with_kills(root, table, kills, rng, longest)
        assert died or kills < 3
        assert plan_bytes(root) == plan_bytes(tmp_path / "unbroken")
        assert list(RunDir(root).spool.iterdir()) == []


def test_a_planner_killed_at_random_moments_continues_to_the_same_bytes(tmp_path: Path) -> None:
    check_kills(tmp_path, rounds=1, kills=4)


@pytest.mark.slow
def test_many_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, rounds=15, kills=6)

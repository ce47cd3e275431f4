"""Peak memory and pace of the job loop on many short rows, with an engine that answers at once.

    python -m tests.benchmarks.run_million_rows [--rows 1000000]

What is measured is everything around the engine: reading shards, requests, journals, commits, finish. The plan is
written before and not counted. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from bulkrun.job.runner import JobRunner
from bulkrun.request import Completion, EngineStats, PartialOutput, Request
from tests.job.fake_engine import decode
from tests.job.small_runs import Row, enter, job, write_plan, write_shard

SHARD_ROWS, PROMPT_TOKENS, OUTPUT = 4096, 60, tuple(range(97, 121))


class InstantEngine:
    """Answers everything that waits in one step."""

    max_model_len, max_num_seqs = 4096, 256

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._steps = 0

    def add_request(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        self._steps += 1
        ended, self._waiting = self._waiting, []
        return [Completion(r.request_id, OUTPUT, "stop", None, PROMPT_TOKENS, 0, len(OUTPUT)) for r in ended]

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._waiting = [request for request in self._waiting if request.request_id not in request_ids]

    def partial_outputs(self) -> list[PartialOutput]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=len(self._waiting), num_steps=self._steps)


def rows_of(shard: int, total: int) -> list[Row]:
    numbers = range(shard * SHARD_ROWS, min(total, (shard + 1) * SHARD_ROWS))
    return [Row(row, str(row), tuple((row * 31 + at) % 5000 for at in range(PROMPT_TOKENS))) for row in numbers]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(out: Path, total: int) -> dict[str, object]:
    spec = job(out, run={"checkpoint_every": 5.0})
    run, record = enter(out, spec)
    shards = -(-total // SHARD_ROWS)
    for shard in range(shards):
        write_shard(run, shard, rows_of(shard, total))
    write_plan(run, [], SHARD_ROWS)
    run.plan_complete.write_text(json.dumps({"rows": total, "shards": shards}))
    before, began = peak_mb(), time.monotonic()
    outcome = JobRunner(run, record, spec, InstantEngine(), decode, rebuild_engine=InstantEngine).run()
    seconds = time.monotonic() - began
    assert outcome.totals is not None and outcome.totals.rows == total
    numbers = {"rows": total, "shards": shards, "seconds": round(seconds, 1), "rows_per_s": round(total / seconds)}
    memory = {"peak_rss_mb": round(peak_mb()), "peak_rss_before_mb": round(before)}
    return numbers | memory | {"python": platform.python_version(), "pyarrow": pa.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    scratch = Path(tempfile.mkdtemp())
    try:
        print(json.dumps(measure(scratch / "out", parser.parse_args().rows)))
    finally:
        shutil.rmtree(scratch)

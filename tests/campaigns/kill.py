"""Kill campaign: workers on one run are killed with -9 (or asked to stop) at random moments until it is finished.

    python -m tests.campaigns.kill --kills 300 [--workers 3] [--rows 600] [--seed 0] [--terms 0.3] [--stops 0.1]
        [--kind text|vectors|lists|labels|calls]

Runs are of all kinds (`kinds`) unless one is named. Every run must end with each row exactly once and equal to the
oracle, and DuckDB must read `OUT/*.parquet` at every moment between. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.verify import verify_run
from tests.campaigns.kinds import KINDS
from tests.campaigns.worker import wrong

ROOT = Path(__file__).resolve().parents[2]
GOOD_EXITS = (0, 3, 75, -signal.SIGKILL, -signal.SIGTERM)
STEP_S = {"vectors": "0.05", "lists": "0.05", "labels": "0.05"}  # a row is one step there


@dataclass
class Tally:
    """What a campaign did and saw."""

    kills: int = 0
    terms: int = 0
    stops: int = 0
    runs: int = 0
    reads: int = 0
    failed_reads: int = 0
    slowest_term_s: float = 0.0


class Reader(threading.Thread):
    """Queries the parts over and over, as a user would while the job runs."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self._out, self._done = out, threading.Event()
        self.reads = 0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._done.wait(0.05):
            if list(self._out.glob("*.parquet")):
                try:
                    query = f"SELECT count(*), count(DISTINCT (row, sample)) FROM '{self._out}/*.parquet'"
                    rows, distinct = duckdb.connect().execute(query).fetchall()[0]
                    assert rows == distinct, f"{rows - distinct} rows twice"
                except (duckdb.Error, AssertionError) as error:
                    self.failures.append(str(error))
                self.reads += 1

    def stop(self) -> None:
        self._done.set()
        self.join()


def spawn(out: Path, rows: int, kind: str, n: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.campaigns.worker", str(out), str(rows), "20"]
    command += ["--kind", kind, "--n", str(n), "--step-s", STEP_S.get(kind, "0.002"), "--ttl-s", "0.5"]
    return subprocess.Popen(command, cwd=ROOT)


def hit(worker: subprocess.Popen[bytes], rng: random.Random, options: argparse.Namespace, tally: Tally) -> None:
    """End one worker somehow, or freeze it for longer than its claims live."""
    kind = rng.random()
    if kind < options.stops:
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        worker.send_signal(signal.SIGCONT)
        tally.stops += 1
        return
    term = kind < options.stops + options.terms
    worker.send_signal(signal.SIGTERM if term else signal.SIGKILL)
    began = time.monotonic()
    code = worker.wait(timeout=60)
    if term:
        tally.terms += 1
        tally.slowest_term_s = max(tally.slowest_term_s, time.monotonic() - began)
        assert code in GOOD_EXITS, f"exit code {code} after SIGTERM"
    else:
        tally.kills += 1


def one_run(out: Path, rng: random.Random, options: argparse.Namespace, tally: Tally) -> None:
    """Hit workers until the run is finished, then compare with the oracle."""
    run, n, kind = RunDir(out), rng.choice([1, 2]), options.kind or rng.choice([*KINDS])
    reader = Reader(out)
    reader.start()
    workers: list[subprocess.Popen[bytes]] = []
    try:
        while not run.success.exists():
            assert all(worker.poll() in (None, *GOOD_EXITS) for worker in workers), "a worker failed"
            workers = [worker for worker in workers if worker.poll() is None]
            workers += [spawn(out, options.rows, kind, n) for _ in range(options.workers - len(workers))]
            time.sleep(rng.uniform(0.0, options.max_life))
            if tally.kills + tally.terms + tally.stops < options.kills:
                hit(rng.choice(workers), rng, options, tally)
        for worker in workers:
            code = worker.wait(timeout=120)
            assert code in GOOD_EXITS, f"exit code {code}"
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        reader.stop()
    assert not wrong(out, options.rows, kind, n), "rows lost, doubled or changed"
    report = verify_run(run)
    assert report.ok and report.finished, report.problems
    tally.runs += 1
    tally.reads += reader.reads
    tally.failed_reads += len(reader.failures)
    assert not reader.failures, reader.failures[0]


def campaign(options: argparse.Namespace, scratch: Path) -> Tally:
    rng, tally = random.Random(options.seed), Tally()
    while tally.kills + tally.terms + tally.stops < options.kills:
        out = scratch / f"run-{tally.runs}"
        one_run(out, rng, options, tally)
        shutil.rmtree(out)
    return tally


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(KINDS))
    parser.add_argument("--max-life", type=float, default=1.5)
    parser.add_argument("--terms", type=float, default=0.25, help="share of SIGTERM instead of SIGKILL")
    parser.add_argument("--stops", type=float, default=0.1, help="share of SIGSTOP beyond the claim's life")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(asdict(campaign(parse(), Path(scratch)))))

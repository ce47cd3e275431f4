"""The kill campaign on the real thing: `bulkrun submit` with the bundled model, killed at random moments, resumed.

    python -m tests.campaigns.kill_submit --kills 30 --rows 1200 [--workers 2] [--second-worker] [--seed 7] [--work DIR]

One unbroken run is the truth. A second run of the same job is killed with -9 (and, every third time, with SIGTERM,
which must exit 75) at random times and right after chosen files appear, so that planning, running, committing and
finishing are all hit. Every fifth time a worker is killed first, which its parent must survive. All the while a reader
counts rows with DuckDB over `<out>/*.parquet`. In the end every row must be there exactly once, equal to the unbroken
run's, and no read may have failed. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import read_workers
from bulkrun.job.views.verify import verify_run
from tests.launch.whole_jobs import cli

JOB = """\
name: killed
model: bundled:tiny
input: {{path: {input}, id: name}}
prompt: {{template: "Summarize this Python code in one sentence:\\n{{{{ source[:400] }}}}"}}
sampling: {{max_tokens: 24, temperature: 0, n: {samples}}}
output: {{path: {output}, rows_per_file: 48}}
engine: {{dtype: float32, max_num_seqs: 32}}
run: {{window_rows: {window_rows}, checkpoint_every: 0.3}}
"""
MARKS = {
    "plan": ".bulkrun/plan/shard-*.arrow",
    "window": ".bulkrun/plan/window-*.json",
    "journal": ".bulkrun/journal/*.jsonl",
    "part": "part-*.parquet",
}


@dataclass
class Reader(threading.Thread):
    """Reads all parts again and again, as a user's notebook would."""

    out: Path
    reads: int = 0
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def __enter__(self) -> Reader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.join()

    def run(self) -> None:
        while not self.stop.wait(0.1):
            out = self.out  # the campaign may go on with another one at any time
            if not any(out.glob("*.parquet")):
                continue
            try:
                sql = f"SELECT count(*), count(DISTINCT (row, sample)) FROM '{out}/*.parquet'"
                rows, distinct = duckdb.connect().execute(sql).fetchone() or (0, 0)
                self.reads += 1
                if rows != distinct:
                    self.failures.append(f"{rows} rows, {distinct} distinct")
            except duckdb.Error as error:
                self.failures.append(str(error))


def write_input(path: Path, rows: int, seed: int) -> None:
    """Small functions with some identical ones, some long ones, and a few rows that cannot run."""
    rng = random.Random(seed)
    words = ["read", "write", "parse", "merge", "split", "count", "check", "open", "close", "sort", "find", "load"]
    nouns = ["file", "line", "token", "block", "row", "tree", "graph", "cache", "queue", "buffer", "index", "table"]
    sources: list[str | None] = []
    for _ in range(rows):
        name, noun = rng.choice(words), rng.choice(nouns)
        body = "\n".join(f"    {noun}_{i} = {name}({noun}, {i})" for i in range(rng.choice([1, 2, 3, 9])))
        sources.append(f"def {name}_{noun}({noun}):\n{body}\n    return {noun}")
    sources[rows // 2] = None
    pq.write_table(pa.table({"name": [f"f{i}" for i in range(rows)], "source": sources}), path)


def job_file(folder: Path, name: str, args: argparse.Namespace) -> Path:
    path = folder / f"{name}.yaml"
    values = {"input": folder / "input.parquet", "output": folder / name, "samples": args.samples}
    path.write_text(JOB.format(**values, window_rows=max(1, args.rows // 3)))
    return path


def start(job: Path, workers: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bulkrun", "submit", str(job), "--workers", str(workers)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # two workers with two threads each would only get in their way
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=one_thread)


def run_here(job: Path) -> None:
    """The unbroken run, in this process and with one thread as the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    cli("submit", str(job), ends_with=3)
    torch.set_num_threads(before)


def wait_for_moment(process: subprocess.Popen[str], out: Path, rng: random.Random, parts: int) -> str:
    """Sleep until a random moment: a time, or a little after one more file of some kind (or the last part) is there."""
    planned = (out / ".bulkrun/plan/complete.json").exists()
    kind = rng.choice(["time", "journal", "part", "last part"] + ([] if planned else ["plan", "window"]))
    pattern, delay = MARKS.get(kind), rng.expovariate(1 / 0.05)
    before = {path.name for path in out.glob(pattern)} if pattern else set()
    deadline = time.monotonic() + (rng.uniform(0.2, 6.0) if kind == "time" else 20.0)
    while process.poll() is None and time.monotonic() < deadline:
        if pattern and {path.name for path in out.glob(pattern)} - before:
            break
        if kind == "last part" and sum(1 for _ in out.glob("part-*.parquet")) >= parts:
            delay /= 10
            break
        time.sleep(0.005)
    time.sleep(delay)
    return kind


def results(out: Path) -> dict[tuple[int, int], tuple[object, ...]]:
    """(row, sample) -> everything the row says. Fails on a row that is there twice."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))])
    rows = {(row["row"], row["sample"]): tuple(row.values()) for row in table.to_pylist()}
    assert len(rows) == table.num_rows, f"{table.num_rows - len(rows)} rows are there twice"
    return rows


def check_equal(out: Path, truth: dict[tuple[int, int], tuple[object, ...]]) -> None:
    """Raises AssertionError that names what differs from the unbroken run."""
    found = results(out)
    assert found.keys() == truth.keys(), f"{out}: missing or foreign {sorted(found.keys() ^ truth.keys())[:10]}"
    different = [f"{key}: {found[key]} instead of {truth[key]}" for key in truth if found[key] != truth[key]]
    assert not different, f"{out}: {len(different)} rows differ from the unbroken run:\n" + "\n".join(different[:5])


def end_by_signal(process: subprocess.Popen[str], number: signal.Signals, age_s: float = 60.0) -> int:
    """Send it and check how the process ends. `age_s`: before Python has set its handlers, SIGTERM just ends it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    code = process.wait(60)
    stderr = process.stderr.read() if process.stderr else ""
    allowed = {-9, 0, 3} if number == signal.SIGKILL else {75, 0, 3}
    allowed |= {-15} if age_s < 3.0 else set()
    assert code in allowed, f"exit status {code} after {number.name}:\n{stderr[-3000:]}"
    return code


def kill_a_worker(out: Path, rng: random.Random) -> bool:
    """Kill -9 one of the workers that are at work, and let its parent notice."""
    states = [state for state in read_workers(RunDir(out)) if state.role == "runner"]
    alive = [state.worker for state in states if not (state.ended or state.worker.gone)]
    if not alive:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(alive).pid, signal.SIGKILL)
    time.sleep(rng.uniform(0.0, 3.0))
    return True


def campaign(folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """Run it; returns what to report. Raises AssertionError for anything that is wrong."""
    rng = random.Random(args.seed)
    write_input(folder / "input.parquet", args.rows, args.seed)
    run_here(job_file(folder, "unbroken", args))
    truth = results(folder / "unbroken")
    parts = len(list((folder / "unbroken").glob("part-*.parquet")))

    with Reader(folder / "killed-1") as reader:
        report = kill_and_resume(folder, args, rng, truth, parts, reader)
    assert not reader.failures, reader.failures[:5]
    verified = verify_run(RunDir(reader.out))
    assert verified.ok, verified.problems
    return {
        "kills": args.kills,
        "rows": len(truth),
        **report,
        "duckdb_reads": reader.reads,
        "failed_reads": len(reader.failures),
    }


def kill_and_resume(
    folder: Path,
    args: argparse.Namespace,
    rng: random.Random,
    truth: dict[tuple[int, int], tuple[object, ...]],
    parts: int,
    reader: Reader,
) -> dict[str, object]:
    """The kills, and at last a run to the end; a run that ends early is checked, and a new one broken."""
    runs, workers_killed, moments, exits = 1, 0, Counter[str](), Counter[str]()
    job = job_file(folder, "killed-1", args)
    for kill in range(args.kills):
        began, process = time.monotonic(), start(job, args.workers)
        helper = start(job) if args.second_worker and kill % 2 else None
        moments[wait_for_moment(process, reader.out, rng, parts)] += 1
        workers_killed += kill % 5 == 4 and kill_a_worker(reader.out, rng)
        number = signal.SIGTERM if kill % 3 == 2 else signal.SIGKILL
        exits[str(end_by_signal(process, number, time.monotonic() - began))] += 1
        if helper:
            end_by_signal(helper, signal.SIGKILL)
        if (reader.out / "_SUCCESS").exists():  # done before the kills were used up
            check_equal(reader.out, truth)
            runs += 1
            job, reader.out = job_file(folder, f"killed-{runs}", args), folder / f"killed-{runs}"
    last = start(job)
    _, stderr = last.communicate()
    assert last.returncode in (0, 3), f"exit status {last.returncode}:\n{stderr[-3000:]}"
    check_equal(reader.out, truth)
    return {"runs_finished": runs, "workers_killed": workers_killed, "moments": moments, "exits": exits}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1, help="processes of each submit")
    parser.add_argument("--second-worker", action="store_true", help="every other time a second process works along")
    parser.add_argument("--work", type=Path, help="keep everything in this folder")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        start_s = time.monotonic()
        report = campaign(folder, args)
        print(json.dumps({**report, "seconds": round(time.monotonic() - start_s)}))


if __name__ == "__main__":
    main()

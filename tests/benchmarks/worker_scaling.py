"""How much a second worker brings: `bulkrun submit` with 1 and with 2 workers of one thread each, in turns, as a ratio.

    python -m tests.benchmarks.worker_scaling [--rows 600] [--rounds 3]

Both sides do the same job (bundled model, CPU, fixed output length) from an empty directory to `_SUCCESS`. Timed is
what the workers share: from the first row finished to the last, by the run's events; starting Python and loading the
model is reported beside it. Prints one JSON line; says what the machine was doing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir

JOB = """\
name: scaling
model: bundled:tiny
input: {{path: {folder}/rows.jsonl, id: name}}
prompt: {{template: "{{{{ source }}}}"}}
sampling: {{max_tokens: 48, temperature: 0, ignore_eos: true}}
output: {{path: {out}, rows_per_file: {rows_per_file}}}
engine: {{dtype: float32, max_num_seqs: 16, device: cpu}}
"""


def timed_run(folder: Path, rows: int, workers: int, round_: int) -> tuple[float, float]:
    """Seconds of work (first start of a worker to the end) and of the whole command."""
    out = folder / f"out-{workers}-{round_}"
    job = folder / f"{out.name}.yaml"
    job.write_text(JOB.format(folder=folder, out=out, rows_per_file=max(1, rows // 8)))
    command = [sys.executable, "-m", "bulkrun", "submit", str(job), "--workers", str(workers), "--quiet"]
    began = time.monotonic()
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    whole = time.monotonic() - began
    events = list(read_events(RunDir(out)))
    times = [datetime.fromisoformat(event["time"]) for event in events if event["event"] != "worker_died"]
    return (max(times) - min(times)).total_seconds(), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = [{"name": f"f{i}", "source": f"def f{i}(a, b):\n    return a + b * {i}"} for i in range(options.rows)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        load_before = os.getloadavg()[0]
        pairs = [
            (timed_run(folder, options.rows, 1, i), timed_run(folder, options.rows, 2, i))
            for i in range(options.rounds)
        ]
    report = {
        "benchmark": "worker_scaling",
        "rows": options.rows,
        "speedup_of_work": [round(one[0] / two[0], 2) for one, two in pairs],
        "median_speedup_of_work": round(statistics.median(one[0] / two[0] for one, two in pairs), 2),
        "speedup_of_command": [round(one[1] / two[1], 2) for one, two in pairs],
        "work_s": [[round(one[0], 1), round(two[0], 1)] for one, two in pairs],
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

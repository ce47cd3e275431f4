"""Workers as real Ray actors on a local cluster: killed again and again, every row exactly once."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install 'bulkrun[ray]'`"),
    pytest.mark.timeout(280),
]

ROWS = 240
JOB = """\
name: on-ray
model: bundled:tiny
input: {{path: {input}, id: name}}
prompt: {{template: "Summarize this Python code in one sentence:\\n{{{{ source }}}}"}}
sampling: {{max_tokens: 64, temperature: 0, ignore_eos: true}}
output: {{path: {output}, rows_per_file: 20}}
engine: {{device: cpu, dtype: float32, max_num_seqs: 16}}
run: {{checkpoint_every: 0.5}}
ray: {{cpus: 1}}
"""


def write_job(folder: Path, name: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(JOB.format(input=folder / "rows.jsonl", output=folder / name))
    return path


def start(job: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bulkrun", "submit", str(job), *options]
    # compiled ops would be through before the third kill
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "BULKRUN_CPU_OPS": "reference"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def results(out: Path) -> list[dict[str, object]]:
    table = pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))])
    rows = sorted(table.to_pylist(), key=lambda row: row["row"])
    assert [row["row"] for row in rows] == list(range(ROWS))
    return rows


def processes(words: str) -> list[int]:
    """Processes whose command line has these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if words in (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.name))
    return found


def test_two_actors_killed_three_times_answer_every_row_once(tmp_path: Path) -> None:
    rows = [{"name": f"f{i}", "source": f"def add_{i}(a, b):\n    return a * {i} + b"} for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    unbroken = start(write_job(tmp_path, "unbroken"))
    assert unbroken.wait() == 0

    out, kills = tmp_path / "on-ray", 0
    process = start(write_job(tmp_path, "on-ray"), "--executor", "ray", "--workers", "2")
    worker, deadline = f"bulkrun.launch.processes.worker {out}", time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        done = sum(path.stat().st_size > 0 for path in (out / ".bulkrun/journal").glob("*.jsonl"))
        hosts, workers = processes("ray::WorkerHost"), processes(worker)
        # Twice an actor with its worker, and once a worker alone; each time when rows were finished since.
        if kills < 3 and done and len(workers) == 2 and len(hosts) >= 2:
            os.kill((hosts if kills < 2 else workers)[0], signal.SIGKILL)
            kills += 1
            time.sleep(2.0)
        time.sleep(0.1)
    assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
    assert kills == 3
    assert results(out) == results(tmp_path / "unbroken")
    gone = time.monotonic() + 15
    while processes(worker):
        assert time.monotonic() < gone, "a worker outlived its run"
        time.sleep(0.1)

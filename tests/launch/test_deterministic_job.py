"""`engine.deterministic` as a user meets it: byte-equal answers whatever the workers, threads and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import read_workers
from tests.job.without_model import without_model

ROWS = 24
JOB = """\
name: same
model: bundled:tiny
input: {path: rows.jsonl, id: name}
prompt: {template: "Say what this does:\\n{{ source }}"}
sampling: {max_tokens: 40, temperature: 0.8, top_p: 0.95, logprobs: 2, ignore_eos: true}
output: {path: one, rows_per_file: 4}
engine: {device: cpu, deterministic: true}
run: {checkpoint_every: 0.2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"name": f"f{i}", "source": f"def f{i}(a):\n" + f"    a += {i}\n" * (i % 9 + 1)} for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def start(folder: Path, *arguments: str, threads: int = 1, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bulkrun", "submit", "job.yaml", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | variables
    return subprocess.Popen(command, cwd=folder, text=True, env=environment, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> None:
    said = process.communicate(timeout=180)[1]
    assert process.returncode == 0, said


def answers(out: Path) -> dict[int, str]:
    """Text and log-probabilities of each row, to the last bit."""
    rows = [row for path in out.glob("part-*.parquet") for row in pq.read_table(path).to_pylist()]
    return {row["row"]: repr((row["response"], row["logprobs"])) for row in rows}


def test_one_worker_with_two_threads_and_two_killed_workers_give_the_same_bytes(folder: Path) -> None:
    finish(start(folder, threads=2))
    elsewhere = ["--set", "output.path=two", "--set", "engine.max_num_seqs=5", "--workers", "2"]
    killed, deadline = start(folder, *elsewhere), time.monotonic() + 120
    while not any((folder / "two").glob("part-*.parquet")):
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.02)
    for state in read_workers(RunDir(folder / "two")):
        if not state.ended:
            os.kill(state.worker.pid, signal.SIGKILL)
    killed.kill()
    killed.communicate()
    assert len(answers(folder / "two")) < ROWS, "killed in the middle"
    again = ["--set", "output.path=two", "--set", "engine.max_num_batched_tokens=70", "--set", "engine.max_num_seqs=9"]
    finish(start(folder, *again))
    assert len(answers(folder / "one")) == ROWS
    assert answers(folder / "two") == answers(folder / "one")


def test_a_run_does_not_go_on_in_the_other_mode(folder: Path) -> None:
    finish(start(folder, "--set", "run.limit=2", **without_model()))
    other = start(folder, "--set", "run.limit=2", "--set", "engine.deterministic=false")
    said = other.communicate(timeout=120)[1]
    assert other.returncode == 4 and "engine.deterministic" in said


def test_quantized_weights_are_refused_by_line(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB.replace("deterministic: true", "deterministic: true, quantization: fp8"))
    refused = start(folder)
    said = refused.communicate(timeout=60)[1]
    assert refused.returncode == 2
    assert "job.yaml:7" in said and "engine.deterministic: does not go with quantization: fp8" in said

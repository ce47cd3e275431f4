"""Where a submit goes: here, into Slurm's queue, or right here because this is a Slurm job already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import ExecutorError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch import queue
from bulkrun.launch.preview import check_job


class NoView:
    def phase(self, text: str) -> None: ...

    def update(self, snapshot: Any) -> None: ...


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "def f(): pass"}\n')
    sections = {"input": {"path": "rows.jsonl"}, "output": {"path": "out"}, "run": {"executor": "slurm", "workers": 8}}
    return job_of({"name": "q", "model": "bundled:tiny", **sections})


@pytest.mark.parametrize(("gpus", "workers"), [("", 1), ("3", 1), ("0,1", 2)])
def test_inside_a_slurm_job_submit_works_there_with_a_worker_for_each_of_its_gpus(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, gpus: str, workers: int
) -> None:
    submitted: list[JobSpec] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4000000000")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(queue, "submit", lambda spec, view, **flags: submitted.append(spec))
    queue.submit_job(spec, NoView())
    assert [(one.run.executor, one.run.workers) for one in submitted] == [("local", workers)]


def test_on_a_login_node_without_slurm_it_says_so_and_the_run_waits(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_job(spec)
    with pytest.raises(ExecutorError, match="sbatch: not found"):
        queue.submit_job(spec, NoView())
    assert Path("out/.bulkrun/run.json").exists() and not list(Path("out").glob("*.parquet"))

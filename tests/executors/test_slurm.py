"""What is asked of Slurm: the script, word for word, and bash's own view of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from bulkrun.errors import ExecutorError, JobFileError
from bulkrun.executors.allocation import Allocation, current_allocation, deadline_of
from bulkrun.executors.slurm import batch_script, submit_array, submitted_jobs
from bulkrun.job.jobfile.cluster import SlurmSpec
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir


def spec(root: Path, **sections: object) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "t", "model": "m", "input": {"path": "x"}, "output": {"path": str(root)}, **sections}
    )


def test_the_script_says_all_that_the_job_asks_for(tmp_path: Path) -> None:
    slurm = SlurmSpec(
        partition="gpu", time="04:00:00", gpus="a100:1", cpus=8, mem="64G", qos="night owl", extra=["--exclude=n7"],
        setup=["module load cuda/12", "source env.sh"],
    )  # fmt: skip
    script = batch_script(
        RunDir(tmp_path / "100%"), "t", slurm, 4, ["/opt/my py/python", "-m", "bulkrun", "worker", "x"]
    )
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=bulkrun-t",
        "--array=0-3",
        f"--output={tmp_path}/100%%/.bulkrun/logs/slurm-%A_%a.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",
        "--partition=gpu",
        '--qos="night owl"',
        "--time=04:00:00",
        "--mem=64G",
        "--gpus-per-node=a100:1",
        "--cpus-per-task=8",
        "--exclude=n7",
    ]
    assert script.endswith("module load cuda/12\nsource env.sh\nexec '/opt/my py/python' -m bulkrun worker x\n")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_no_value_can_smuggle_a_line_into_the_script() -> None:
    for key in ("partition", "account", "qos", "constraint", "time", "mem"):
        with pytest.raises(ValidationError):
            SlurmSpec.model_validate({key: "x\nrm -rf /"})
    for key in ("extra", "setup"):
        with pytest.raises(ValidationError):
            SlurmSpec.model_validate({key: ["--x\nrm -rf /"]})


@pytest.mark.parametrize("key", ["partition", "account", "qos", "constraint"])
@pytest.mark.parametrize("value", ['a" --wrap="x', "a\\"])
def test_no_value_ends_the_quotes_that_it_is_put_between(key: str, value: str) -> None:
    with pytest.raises(ValidationError):
        SlurmSpec.model_validate({key: value})


@pytest.mark.parametrize("gpus", [0, 2, "4", "a100:2", "a100:1,v100:2", "nvidia_a100_3g.20gb:1"])
def test_gpus_are_a_number_or_types_and_numbers(gpus: int | str) -> None:
    assert SlurmSpec(gpus=gpus).gpus == gpus


@pytest.mark.parametrize("gpus", [-1, "a100", "", "1 --x", '1" --x', "1\n#SBATCH --x"])
def test_no_other_gpus_are_asked_for(gpus: int | str) -> None:
    with pytest.raises(ValidationError):
        SlurmSpec(gpus=gpus)


def test_bad_gpus_are_said_with_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(
        JobFileError, match=r'slurm\.gpus: "a100" cannot be used here\. GPUs per element \(1\), or type'
    ):
        job_of({"name": "t", "model": "m", "input": {"path": "x"}, "output": {"path": "y"}, "slurm": {"gpus": "a100"}})


def test_a_machine_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExecutorError, match="sbatch: not found; is this a machine of a Slurm cluster"):
        submit_array(RunDir(tmp_path / "out"), spec(tmp_path / "out"))
    assert submitted_jobs(RunDir(tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("said", "job_id"), [("12", "12"), ("12;west", "12"), ("lmod: gr\\374n\\n7;west\\n", "7"), ("", None), ("ok", None)]
)
def test_the_job_id_is_a_number_whatever_a_site_prints_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, job_id: str | None
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if job_id is not None:
        assert submit_array(RunDir(tmp_path / "out"), spec(tmp_path / "out")) == job_id
        return
    with pytest.raises(ExecutorError, match="no job id"):
        submit_array(RunDir(tmp_path / "out"), spec(tmp_path / "out"))
    assert submitted_jobs(RunDir(tmp_path / "out")) == []


def test_outside_of_slurm_there_is_no_allocation_and_no_deadline() -> None:
    assert current_allocation({}) is None
    assert deadline_of(None, None) is None


def test_the_earlier_of_the_jobs_end_and_the_walltime_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    stated = current_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1600"})
    assert stated == Allocation("7", 1600.0)
    assert deadline_of(stated, None) == 605.0
    assert deadline_of(stated, 60.0) == 65.0
    assert deadline_of(None, 60.0) == 65.0

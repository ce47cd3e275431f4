"""What is asked of Slurm: the script, word for word, and bash's own view of it."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from bulkrun.errors import ExecutorError, JobFileError
from bulkrun.executors.allocation import Allocation, current_allocation, deadline_of
from bulkrun.executors.slurm import batch_script, cancel_jobs, queued_jobs, submit_array, submitted_jobs
from bulkrun.executors.slurm_program import SlurmRefused, slurm
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


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("2", 120), ("2:30", 150), ("1:00:01", 3601), ("1-1", 90000), ("1-1:30", 91800), ("0-0:1:5", 65), ("1:1", 61)],
)
def test_a_time_limit_leaves_time_to_work_before_the_warning(time: str, seconds: int) -> None:
    if seconds <= 3600:
        with pytest.raises(ValidationError, match=f"time: .* is {seconds} s, .* allow more time"):
            SlurmSpec(time=time, warn=seconds)
    assert SlurmSpec(time=time, warn=min(seconds - 1, 3600)).time == time


@pytest.mark.parametrize("time", [None, "0", "0:0", "-1", "UNLIMITED", "infinite"])
def test_a_time_may_have_no_limit(time: str | None) -> None:
    assert SlurmSpec(time=time).time == time


@pytest.mark.parametrize(
    "time", ["-", "--", "1-", "-2", "::", "1::2", ":30", "1:", "1:2:3:4", "1-2-3", "1-1:2:3:4", "4h"]
)
def test_what_sbatch_would_refuse_as_a_time_is_refused_before_anything_is_queued(time: str) -> None:
    with pytest.raises(ValidationError, match="time"):
        SlurmSpec(time=time)


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


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """Programs of these names are found first, each a shell script that does this."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("slurm", "elements", "workers"),
    [
        ({}, "0-7", 1),
        ({"array": 3}, "0-2", 1),
        ({"gpus": 0}, "0-7", 1),
        ({"gpus": 2}, "0-7", 2),
        ({"gpus": "a100:4", "array": 2}, "0-1", 4),
        ({"gpus": "a100:1,v100:2"}, "0-7", 3),
        ({"gpus": "nvidia_a100_3g.20gb:1"}, "0-7", 1),
        ({"gpus": 2, "extra": ["--gpu-bind=none"]}, "0-7", 2),
        ({"extra": ["--exclude=gpu7"]}, "0-7", 1),
        ({"extra": ["--exclude=n7", "--gres=gpu:4"]}, "0-7", None),  # as many as it finds there
        ({"extra": ["--gpus-per-node 4"]}, "0-7", None),
    ],
)
def test_each_element_has_a_worker_for_each_of_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: dict[str, object], elements: str, workers: int | None
) -> None:
    (tmp_path / "bin").mkdir()
    programs(tmp_path / "bin", monkeypatch, sbatch="echo 4")
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("out"))
    submit_array(run, spec(run.root, slurm=slurm, run={"workers": 8}))
    (script,) = run.slurm.glob("*.sh")
    lines = script.read_text().splitlines()
    assert f"#SBATCH --array={elements}" in lines and lines[-1].endswith(
        f" {tmp_path}/out" if workers is None else f" {tmp_path}/out --workers {workers}"
    )


def test_the_job_file_and_not_the_users_environment_says_what_sbatch_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To sbatch variables count more than the script's own lines, as those that a site's login scripts export."""
    (tmp_path / "bin").mkdir()
    programs(tmp_path / "bin", monkeypatch, sbatch=f"env > {tmp_path}/heard; echo 4")
    stated = "PARTITION TIMELIMIT MEM_PER_NODE GPUS_PER_NODE ARRAY_INX JOB_NAME NO_REQUEUE OPEN_MODE OUTPUT SIGNAL"
    for name in [*stated.split(), "WAIT", "EXCLUDE", "ACCOUNT", "EXPORT"]:
        monkeypatch.setenv(f"SBATCH_{name}", "x")
    asked = {"partition": "gpu", "time": "04:00:00", "mem": "64G", "gpus": 1, "extra": ["--exclude=n7"]}
    submit_array(RunDir(tmp_path / "out"), spec(tmp_path / "out", slurm=asked))
    heard = {line.partition("=")[0] for line in (tmp_path / "heard").read_text().splitlines()}
    assert {name for name in heard if name.startswith("SBATCH_")} == {"SBATCH_ACCOUNT", "SBATCH_EXPORT"}
    assert os.environ["SBATCH_PARTITION"] == "x" and "HOME" in heard


def test_a_users_own_view_of_the_queue_hides_no_job_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    programs(tmp_path / "bin", monkeypatch, sbatch="echo 4")
    run = RunDir(tmp_path / "a|b")
    submit_array(run, spec(run.root))
    (script,) = run.slurm.glob("*.sh")
    job = f"4|4|4_[0-7]|PENDING||Resources|mine|/|{script}"
    shows = f'[ -z "$SQUEUE_STATES$SQUEUE_PARTITION" ] || exit; case " $* " in *" --all "*) echo "{job}";; esac'
    programs(tmp_path / "bin", monkeypatch, squeue=shows)
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    assert [job.job_id for job in queued_jobs(run)] == ["4_[0-7]"]


def test_a_copy_of_the_array_that_a_user_put_into_the_queue_is_this_runs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = RunDir(tmp_path / "out"), RunDir(tmp_path / "other")
    (tmp_path / "bin").mkdir()
    programs(tmp_path / "bin", monkeypatch, sbatch="echo 4")
    submit_array(run, spec(run.root))
    (script,) = run.slurm.glob("*.sh")
    other.slurm.mkdir(parents=True)
    (other.slurm / script.name).write_text("another run's, of the same second")
    queue = [
        f"4|4|4_0|RUNNING|n1|None|bulkrun-t|/|{script}",
        f"9|8|8_1|RUNNING|n2|None|bulkrun-t|/|{script}",
        f"8|8|8_[0]|PENDING||Resources|mine|{run.root}|.bulkrun/slurm/{script.name}",
        f"10|10|10|RUNNING|n3|None|bulkrun-t|/|{other.slurm / script.name}",
        f"11|11|11|RUNNING|n3|None|bulkrun-t|{tmp_path}|{script.name}",
        "12|12|12|RUNNING|n3|None|wrap|/|(null)",
    ]
    (tmp_path / "queue").write_text("\n".join(queue))
    programs(tmp_path / "bin", monkeypatch, squeue=f"cat {tmp_path}/queue", scancel=f'echo "$@" > {tmp_path}/cancelled')
    assert [job.job_id for job in queued_jobs(run)] == ["4_0", "8_1", "8_[0]"]
    assert cancel_jobs(run) == ["4", "8"] and (tmp_path / "cancelled").read_text() == "4 8\n"


@pytest.mark.parametrize(
    ("job", "is_ours"),
    [
        ("wrap|/|(null)", False),
        ("bulkrun-u|/|/gone/train.sh", False),
        ("bulkrun-t|/|{other}", False),  # another run's of the same job file, on a cluster that shares the file system
        ("bulkrun-t|/|(null)", True),  # a site's sbatch that feeds the script in
        ("renamed|/|/mounted/elsewhere/{name}", True),
    ],
)
def test_a_job_that_has_only_the_id_in_common_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, is_ours: bool
) -> None:
    run, other = RunDir(tmp_path / "out"), tmp_path / "other.sh"
    other.touch()
    (tmp_path / "bin").mkdir()
    programs(tmp_path / "bin", monkeypatch, sbatch="echo 1", scancel=f"touch {tmp_path}/cancelled")
    submit_array(run, spec(run.root))
    (script,) = run.slurm.glob("*.sh")
    job = job.format(other=other, name=script.name)
    programs(tmp_path / "bin", monkeypatch, squeue=f"echo '1|1|1|RUNNING|n1|None|{job}'")
    assert cancel_jobs(run) == (["1"] if is_ours else [])
    assert (tmp_path / "cancelled").exists() is is_ours


def test_a_record_without_the_jobs_name_is_of_the_job_with_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "out")
    run.slurm.mkdir(parents=True)
    run.slurm_jobs.write_text(json.dumps({"job_id": "1", "script": "a.sh"}) + "\n")
    programs(
        tmp_path, monkeypatch, squeue="echo '1|1|1_0|RUNNING|n1|None|x|/|/mounted/a.sh'; echo '1|1|1_1||||x|/|b.sh'"
    )
    assert [job.job_id for job in queued_jobs(run)] == ["1_0"]


def test_a_torn_line_among_the_ids_costs_that_id_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "out")
    run.slurm.mkdir(parents=True)
    run.slurm_jobs.write_bytes(b'{"job_id": "1", "script": "a.sh"}\n[]\n{}\n{"job_id": "2", "scr')
    programs(tmp_path, monkeypatch, sbatch="echo 3")
    submit_array(run, spec(run.root))
    assert [one.job_id for one in submitted_jobs(run)] == ["1", "3"]
    run.slurm_jobs.write_bytes(b'{"job_id": "2", "scr{"job_id": "3", "script": "b.sh"}\n')  # of an earlier bulkrun
    assert submitted_jobs(run) == []


@pytest.mark.parametrize(
    "words",
    [
        "Batch job submission failed: Socket timed out on send/recv operation",
        "Batch job submission failed: Zero Bytes were transmitted or received",
        "",
    ],
)
def test_an_array_whose_id_was_never_noted_is_found_in_the_queue_by_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    run = RunDir(tmp_path / "out")
    programs(tmp_path, monkeypatch, sbatch=f"echo '{words}' >&2; exit {int(bool(words))}")
    with pytest.raises(ExecutorError, match=r"may be in the queue|squeue --me") as raised:
        submit_array(run, spec(run.root))
    assert not isinstance(raised.value, SlurmRefused), "a refused array's run is forgotten"
    (script,) = run.slurm.glob("*.sh")
    programs(tmp_path, monkeypatch, squeue=f"echo '4|4|4_0|PENDING||None|bulkrun-t|/|{script}'")
    assert [job.job_id for job in queued_jobs(run)] == ["4_0"]


def test_an_array_of_which_sbatch_said_nothing_in_time_may_be_in_the_queue_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "out")
    programs(tmp_path, monkeypatch, sbatch="exec sleep 9")
    monkeypatch.setattr("bulkrun.executors.slurm.slurm", partial(slurm, patience_s=0.1))
    with pytest.raises(ExecutorError, match="sbatch: no answer in 0 s; is its controller down") as raised:
        submit_array(run, spec(run.root))
    assert not isinstance(raised.value, SlurmRefused) and len(list(run.slurm.glob("*.sh"))) == 1


def test_a_program_that_cannot_be_started_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, sbatch="echo 4")
    (tmp_path / "sbatch").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmRefused, match="sbatch: cannot be started: Permission denied"):
        submit_array(RunDir(tmp_path / "out"), spec(tmp_path / "out"))


def test_what_slurm_refused_is_not_looked_for_in_its_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "out")
    programs(tmp_path, monkeypatch, sbatch="echo 'invalid partition specified: x' >&2; exit 1", squeue="exit 1")
    with pytest.raises(SlurmRefused, match="invalid partition"):
        submit_array(run, spec(run.root))
    assert queued_jobs(run) == []


def test_outside_of_slurm_there_is_no_allocation_and_no_deadline() -> None:
    assert current_allocation({}) is None
    assert deadline_of(None, None) is None


def test_an_array_element_asks_for_its_own_next_turn_or_end_not_for_the_whole_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {name: f'echo {name} "$@" >> {tmp_path}/asked' for name in ("scontrol", "scancel")}
    programs(tmp_path, monkeypatch, **asked)
    element = {"SLURM_JOB_ID": "6", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}  # the last one's number
    allocation = current_allocation({**element, "SLURM_JOB_END_TIME": "1600"})
    assert allocation is not None and allocation.requeue()
    allocation.end()
    assert (tmp_path / "asked").read_text().splitlines()[-2:] == ["scontrol requeue 6_1", "scancel 6_1"]


@pytest.mark.parametrize(
    ("exits", "batch", "comes"),
    [
        ("75", 1, True),
        ("75,76", 2, True),
        ("1-9,70-80", 1, True),
        ("76", 1, False),
        ("175,1-74,76-99", 1, False),
        ("(null)", 1, False),
        ("75", 0, False),
    ],
)
def test_a_batch_job_comes_back_where_the_cluster_requeues_exit_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: str, batch: int, comes: bool
) -> None:
    shown = {"config": f"RequeueExit             = {exits}", "job": f"   Requeue=1 BatchFlag={batch} Reboot=0"}
    programs(
        tmp_path,
        monkeypatch,
        scontrol=f'case "$*" in "show config") echo "{shown["config"]}";; "show job 7") echo "{shown["job"]}";; '
        f'*) echo "$@" > {tmp_path}/asked; exit {1 - bool(batch)};; esac',
    )
    assert Allocation("7", None).comes_back() is comes
    assert Allocation("7", None).requeue() is bool(batch), "of an interactive one Slurm refuses it"
    assert (tmp_path / "asked").exists() is not comes, "what comes back is not asked to"


@pytest.mark.parametrize(
    ("shown", "ends_at"),
    [("2026-11-29T12:00:00", datetime(2026, 11, 29, 12).timestamp()), ("NONE", None), ("", None)],
)
def test_a_slurm_that_states_no_end_in_the_environment_is_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, ends_at: float | None
) -> None:
    habits = '[ -z "$SLURM_TIME_FORMAT" ] || exit 1'
    programs(tmp_path, monkeypatch, squeue=f'{habits}; echo "$@" > {tmp_path}/asked; echo "{shown}"')
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert current_allocation({"SLURM_JOB_ID": "7"}) == Allocation("7", ends_at)
    assert (tmp_path / "asked").read_text() == "--noheader --job 7 --format=%e\n"


def test_the_earlier_of_the_jobs_end_and_the_walltime_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    stated = current_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1600"})
    assert stated == Allocation("7", 1600.0)
    assert deadline_of(stated, None) == 605.0
    assert deadline_of(stated, 60.0) == 65.0
    assert deadline_of(None, 60.0) == 65.0

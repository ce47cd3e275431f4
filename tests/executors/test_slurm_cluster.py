"""Runs on a real Slurm cluster of two nodes on this machine: whatever happens to it, every row exactly once.

The truth is one unbroken local run of the same job. Workers are whole but for the model (`tests/job/without_model.py`):
what is proved is how Slurm looks after them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.executors.cluster_jobs import journals, results, write_job, write_rows
from tests.executors.mini_slurm import MiniSlurm, why_no_slurm
from tests.job.without_model import without_model
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(why_no_slurm() is not None, reason=f"no Slurm here: {why_no_slurm()}"),
    pytest.mark.timeout(180),
]

ROWS = 400
SLOWLY = without_model(step_s=0.02)  # else it is through before anything can happen to it
SLURM = """\
slurm:
  gpus: 1
  setup: [export {}, "echo gpu $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    write_rows(folder, ROWS)
    return folder


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[dict[str, object]]:
    """The results of one unbroken worker on this machine."""
    done = bulkrun("submit", str(job_of(folder, "unbroken")), environment=os.environ | without_model())
    assert done.returncode == 0, done.stderr
    return results(folder / "unbroken", ROWS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    with MiniSlurm(tmp_path_factory.mktemp("cluster") / "c") as cluster:
        yield cluster


def job_of(folder: Path, name: str, variables: dict[str, str] = SLOWLY) -> Path:
    exports = " ".join(f"{key}={value}" for key, value in variables.items())
    return write_job(folder, name, SLURM.format(exports), max_tokens=32)


def bulkrun(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bulkrun", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


def submit_and_begin(cluster: MiniSlurm, job: Path, *options: str) -> Path:
    """Put the job into the queue and wait until rows are being finished."""
    out = job.with_suffix("")
    done = bulkrun("submit", str(job), "--executor", "slurm", *options, environment=cluster.environment)
    assert done.returncode == 0 and "is in the queue" in done.stderr, done.stderr
    wait_until(lambda: journals(out), "the first finished rows")
    return out


def end(cluster: MiniSlurm, job: Path, truth: list[dict[str, object]]) -> None:
    """The same command again brings the run to its end; nothing is left of it but the right results."""
    done = bulkrun("submit", str(job), "--executor", "slurm", "--wait", environment=cluster.environment)
    assert done.returncode == 0, done.stderr
    assert results(job.with_suffix(""), ROWS) == truth
    wait_until(lambda: cluster.run("squeue", "-h") == "", "an empty queue")
    wait_until(lambda: not cluster.processes(), "no process left", 15)


def element_pids(cluster: MiniSlurm) -> list[int]:
    """The batch processes (`bulkrun worker`, exec'ed) of the run's array elements."""
    return [pid for pid in cluster.processes() if b"bulkrun\0worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_an_array_of_four_on_two_nodes_with_gpus_completes_a_run(
    cluster: MiniSlurm, folder: Path, truth: list[dict[str, object]]
) -> None:
    job = job_of(folder, "array")
    done = bulkrun(
        "submit", str(job), "--executor", "slurm", "--workers", "4", "--wait", environment=cluster.environment
    )
    assert done.returncode == 0, done.stderr
    assert results(folder / "array", ROWS) == truth
    logs = [path.read_text() for path in sorted((folder / "array/.bulkrun/logs").glob("slurm-*.log"))]
    assert len(logs) == 4
    assert {log.split("\n")[0] for log in logs} == {"gpu n1 0", "gpu n1 1", "gpu n2 0", "gpu n2 1"}
    wait_until(lambda: not cluster.processes(), "no process left", 30)


def test_a_cancelled_run_goes_on_when_it_is_submitted_again(
    cluster: MiniSlurm, folder: Path, truth: list[dict[str, object]]
) -> None:
    job = job_of(folder, "cancelled")
    out = submit_and_begin(cluster, job, "--workers", "1")  # two could be through before the cancel
    cluster.run("sbatch", "--hold", str(next((out / ".bulkrun/slurm").glob("*.sh"))))  # one more, which waits
    again = bulkrun("submit", str(job), "--executor", "slurm", environment=cluster.environment)
    assert again.returncode == 0 and "was already in the queue" in again.stderr
    status = bulkrun("status", str(out), "--json", environment=cluster.environment)
    assert json.loads(status.stdout)["queue"], status.stdout
    stopped = bulkrun("cancel", str(out), environment=cluster.environment)
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: cluster.run("squeue", "-h") == "", "an empty queue", 30)
    wait_until(lambda: not cluster.processes(), "no process left", 15)
    assert not (out / "_SUCCESS").exists()
    end(cluster, job, truth)


@pytest.mark.slow
def test_a_cancelled_job_with_a_script_of_its_own_does_not_come_back(
    cluster: MiniSlurm, folder: Path, truth: list[dict[str, object]]
) -> None:
    job = job_of(folder, "own")
    command = shlex.join([sys.executable, "-m", "bulkrun", "submit", str(job), "--executor", "local"])
    script, log = folder / "own.sh", folder / "own.log"
    exports = " ".join(f"{key}={value}" for key, value in SLOWLY.items())
    script.write_text(f"#!/bin/bash\nexport {exports}\nexec {command}\n")
    cluster.run("sbatch", "--requeue", "--open-mode=append", f"--output={log}", str(script))
    out = job.with_suffix("")
    wait_until(lambda: journals(out), "the first finished rows")
    stopped = bulkrun("cancel", str(out), environment=cluster.environment)
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: cluster.run("squeue", "-h") == "", "an empty queue", 30)  # a job that comes back never leaves it
    assert not (out / "_SUCCESS").exists() and "is taken out of the queue" in log.read_text()
    end(cluster, job, truth)


@pytest.mark.slow
def test_requeued_by_the_cluster_and_two_copies_of_the_job_at_once(
    cluster: MiniSlurm, folder: Path, truth: list[dict[str, object]]
) -> None:
    job = job_of(folder, "requeued")
    out = submit_and_begin(cluster, job, "--workers", "1")
    script = next((out / ".bulkrun/slurm").glob("*.sh"))
    cluster.run("sbatch", str(script))
    first = json.loads((out / ".bulkrun/slurm/jobs.jsonl").read_text())["job_id"]
    cluster.run("scontrol", "requeue", f"{first}_0")
    end(cluster, job, truth)


def test_a_node_dies_and_the_controller_crashes(
    cluster: MiniSlurm, folder: Path, truth: list[dict[str, object]]
) -> None:
    job = job_of(folder, "crashed")
    submit_and_begin(cluster, job, "--workers", "2")
    cluster.kill("slurmctld")
    cluster.kill("slurmd-n1")
    for pid in element_pids(cluster)[:1]:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    cluster.start("slurmctld")
    cluster.start("slurmd-n1")
    squeue = partial(subprocess.run, ["squeue"], env=cluster.environment, check=False)
    wait_until(lambda: squeue().returncode == 0, "the controller")
    end(cluster, job, truth)


@pytest.mark.slow  # over a minute, and a busy machine may need more turns than it waits for
def test_a_worker_at_its_time_limit_saves_and_asks_for_its_next_turn_itself(folder: Path, tmp_path: Path) -> None:
    with MiniSlurm(tmp_path / "c", nodes=1, requeue_exit=76) as cluster:  # exit 75 requeues nothing here
        job = job_of(folder, "walltime", {"OMP_NUM_THREADS": "1", "BULKRUN_CPU_OPS": "reference"})  # its own model
        # A minute is Slurm's shortest limit, and it may warn a minute early: within seconds.
        limits = ["--set", 'slurm.time="1"', "--set", "slurm.warn=30", "--set", "sampling.max_tokens=200"]
        out = submit_and_begin(cluster, job, "--workers", "1", *limits)
        wait_until((out / "_SUCCESS").exists, "the end", 150)
        assert {row["completion_tokens"] for row in results(out, ROWS)} == {200}
        (log,) = (out / ".bulkrun/logs").glob("slurm-*.log")
        assert re.search(r"stopped by SIGUSR1, all is saved: asking Slurm to start job \d+_0 again", log.read_text())
        wait_until(lambda: not cluster.processes(), "no process left", 15)


@pytest.mark.slow  # three turns
def test_turns_that_are_too_short_for_the_model_to_load_end(folder: Path, tmp_path: Path) -> None:
    with MiniSlurm(tmp_path / "c", nodes=1) as cluster:
        job = job_of(folder, "short", without_model(load_s=100))
        asked = ["--executor", "slurm", "--workers", "1", "--set", 'slurm.time="1"', "--set", "slurm.warn=30", "--wait"]
        done = bulkrun("submit", str(job), *asked, environment=cluster.environment)
        assert done.returncode == 1 and "in turn 3, and no row is done yet" in done.stderr, done.stderr
        wait_until(lambda: cluster.run("squeue", "-h") == "", "an empty queue")

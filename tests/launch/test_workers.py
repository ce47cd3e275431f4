"""`submit --workers` and `worker` as a user runs them: real processes, signals from outside. Where the processes are
all that matters, their workers have no model (`tests/job/without_model.py`)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from bulkrun.cli import main
from bulkrun.executors.child_errors import received
from bulkrun.job.store.events import log_event
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import read_workers
from tests.job.small_runs import enter, job
from tests.job.without_model import without_model
from tests.processor import has_gpu_driver
from tests.waiting import wait_until

JOB = """\
name: many
model: bundled:tiny
input: {path: rows.jsonl, id: name}
prompt: {template: "{{ source }}"}
sampling: {max_tokens: 24, temperature: 0, ignore_eos: true}
output: {path: out, rows_per_file: 8}
engine: {dtype: float32, max_num_seqs: 4, device: cpu}
run: {checkpoint_every: 0.3}
"""
ROWS = 60
LOADING = without_model(load_s=3)  # for what is to come while a worker starts
SLOWLY = without_model(step_s=0.03)  # else all may be done before it is stopped


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"name": f"f{i}", "source": f"def f{i}(a): return a + {i}"} for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def bulkrun(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `bulkrun ...` in the folder; ends what a failed test leaves."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bulkrun", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=folder, text=True, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def runners(folder: Path) -> list[int]:
    """Process ids of the workers that are alive."""
    states = read_workers(RunDir(folder / "out"))
    return [state.worker.pid for state in states if state.role == "runner" and not (state.ended or state.worker.gone)]


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process that is stopped was sent a signal."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(int(line.split()[1], 16) for line in status if line.startswith("ShdPnd:"))
    return bool(pending >> (number - 1) & 1)


def rows_of(folder: Path) -> list[int]:
    return sorted(row for path in folder.glob("out/*.parquet") for row in pq.read_table(path)["row"].to_pylist())


def working(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: len(runners(folder)) >= count and any((folder / "out").glob("part-*.parquet"))


def test_two_workers_share_a_run_and_a_third_joins_by_hand(
    folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]
) -> None:
    parent = bulkrun("submit", "job.yaml", "--workers", "2")
    wait_until(lambda: len(runners(folder)) == 2, "two workers at work")
    modules = Path(f"/proc/{parent.pid}/maps").read_text()
    assert "libtorch" not in modules, "the parent must not load torch"
    late = bulkrun("worker", "out")
    assert parent.wait(120) == 0, parent.communicate()[1]
    assert late.wait(60) == 0, late.communicate()[1]
    said = parent.communicate()[1]
    assert "loading the model" in said and "running" in said and f"completed: {ROWS} rows" in said
    assert rows_of(folder) == list(range(ROWS))
    ended = [state.ended for state in read_workers(RunDir(folder / "out")) if state.role == "runner"]
    assert len(ended) >= 2 and set(ended) == {"completed"}
    again = bulkrun("worker", "out")
    assert again.wait(60) == 0
    assert "already finished" in again.communicate()[1]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_parent_drains_all_workers_and_the_run_continues(
    folder: Path, bulkrun: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    parent = bulkrun("submit", "job.yaml", "--workers", "2", **SLOWLY)
    wait_until(working(folder, 2), "work")
    began = time.monotonic()
    parent.send_signal(number)
    said = parent.communicate(timeout=60)[1]
    assert parent.returncode == 75, said
    assert time.monotonic() - began < 15
    assert f"stopped by {number.name}: " in said and "run the same command again" in said
    states = read_workers(RunDir(folder / "out"))
    assert {state.ended for state in states if state.role == "runner"} == {"interrupted"}
    assert not list(RunDir(folder / "out").flight.iterdir())
    if number == signal.SIGINT:
        parent = bulkrun("submit", "job.yaml", **without_model())
        assert parent.wait(120) == 0
        assert rows_of(folder) == list(range(ROWS))


def test_a_second_signal_ends_parent_and_workers_at_once(
    folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]
) -> None:
    parent = bulkrun("submit", "job.yaml", **SLOWLY)
    wait_until(working(folder, 1), "work")
    worker = runners(folder)[0]
    os.kill(worker, signal.SIGSTOP)  # it cannot drain
    parent.send_signal(signal.SIGTERM)
    wait_until(lambda: is_pending(worker, signal.SIGTERM), "the parent's word to the worker")
    assert parent.poll() is None
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(5) == 143
    wait_until(lambda: runners(folder) == [], "the end of the worker", 5)


def test_workers_of_a_killed_parent_save_and_end(folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]) -> None:
    parent = bulkrun("submit", "job.yaml", "--workers", "2", **SLOWLY)
    wait_until(working(folder, 2), "work")
    pids = runners(folder)
    parent.kill()
    wait_until(lambda: runners(folder) == [], "the end of the orphans", 10)
    states = [state for state in read_workers(RunDir(folder / "out")) if state.worker.pid in pids]
    assert [state.ended for state in states] == ["interrupted"] * 2
    last = bulkrun("worker", "out", "--workers", "1", **without_model())
    assert last.wait(120) == 0, last.communicate()[1]
    assert rows_of(folder) == list(range(ROWS))


def test_a_submit_that_is_still_starting_is_seen_and_not_moved_aside(
    folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]
) -> None:
    first = bulkrun("submit", "job.yaml", **LOADING)
    wait_until(lambda: any((folder / "out/.bulkrun/workers").glob("*.json")), "a submit that entered the run")
    fresh = bulkrun("submit", "job.yaml", "--fresh", "--set", "sampling.max_tokens=2")
    status = bulkrun("status", "out", "--json")
    shown = json.loads(status.communicate(timeout=60)[0])
    assert shown["state"] in ("planning", "running") and any(worker["alive"] for worker in shown["workers"])
    said = fresh.communicate(timeout=60)[1]
    assert fresh.returncode == 1 and "a worker is running here" in said, said
    assert first.wait(120) == 0 and rows_of(folder) == list(range(ROWS))


@pytest.mark.parametrize("module", ["worker", "planner"])
def test_a_process_of_a_run_that_was_replaced_does_not_work_on_its_successor(folder: Path, module: str) -> None:
    run, _ = enter(folder / "out", job(folder / "out"))
    planner = [str(run.root), "the one before", str(os.getpid())]
    worker = [str(run.root), "--id", "w", "--supervisor", str(os.getpid()), "--run-id", "the one before"]
    command = [
        sys.executable,
        "-m",
        f"bulkrun.launch.processes.{module}",
        *(planner if module == "planner" else worker),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "moved aside" in str(received(done.stdout)) and done.stderr == ""
    assert not read_workers(run)


FAILING = """
import errno, os, resource, signal, sys
from pathlib import Path
from bulkrun.errors import RunError
from bulkrun.job.work.engine_runner import EngineLost
from bulkrun.launch.processes import {module}
from bulkrun.launch.processes.supervisor import Supervisor

def fail(*_):
    raise {error}

{module}.read_own_record = fail
"""
BEGIN = {
    "worker": 'sys.exit(worker.main(["out", "--id", "w", "--supervisor", str(os.getppid()), "--run-id", "r"]))',
    "planner": 'planner.main(Path("out"), "r", Supervisor(os.getppid()))',
}


@pytest.mark.parametrize("module", ["worker", "planner"])
def test_a_disk_that_a_process_cannot_read_is_told_with_its_file_and_no_traceback(tmp_path: Path, module: str) -> None:
    done = fails_with(tmp_path, module, 'OSError(errno.EIO, "no", "/runs/run.json")')
    assert done.returncode == 1 and done.stderr == ""
    assert str(received(done.stdout)).startswith("/runs/run.json: Input/output error; the disk")


def test_a_worker_whose_engine_is_lost_ends_such_that_another_one_takes_its_place(tmp_path: Path) -> None:
    done = fails_with(tmp_path, "worker", 'EngineLost("an illegal memory access")')
    assert done.returncode == os.EX_SOFTWARE and received(done.stdout) is None
    assert "an illegal memory access" in done.stderr and "Traceback" not in done.stderr


def test_a_worker_that_crashes_leaves_in_its_log_where_it_was(tmp_path: Path) -> None:
    done = fails_with(tmp_path, "worker", "os.kill(os.getpid(), signal.SIGSEGV)")
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in fail" in done.stderr


def fails_with(folder: Path, module: str, error: str) -> subprocess.CompletedProcess[str]:
    """A process of a run that meets the error as it begins."""
    code = FAILING.format(module=module, error=error) + BEGIN[module]
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_cancel_reaches_a_submit_that_is_still_starting_and_no_later_one(
    folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]
) -> None:
    first = bulkrun("submit", "job.yaml")  # heard while torch is imported
    wait_until(lambda: any((folder / "out/.bulkrun/workers").glob("*.json")), "a submit that entered the run")
    stopped = bulkrun("cancel", "out", "--json")
    assert json.loads(stopped.communicate(timeout=60)[0])["workers"] and runners(folder) == []
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 75 and "stopped by bulkrun cancel" in said, said
    again = bulkrun("submit", "job.yaml", **without_model())
    assert again.wait(120) == 0, again.communicate()[1]
    assert rows_of(folder) == list(range(ROWS))
    assert "the run is finished" in bulkrun("cancel", "out").communicate(timeout=60)[1]


@pytest.mark.slow
def test_a_worker_killed_by_hand_is_replaced(folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]) -> None:
    parent = bulkrun("submit", "job.yaml")
    wait_until(working(folder, 1), "work")
    os.kill(runners(folder)[0], signal.SIGKILL)
    assert parent.wait(120) == 0, parent.communicate()[1]
    assert rows_of(folder) == list(range(ROWS))


@pytest.mark.skipif(has_gpu_driver(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["submit", "validate"])
def test_a_gpu_that_is_not_there_is_said_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Of `submit`, by its worker."""
    monkeypatch.chdir(folder)
    refused = CliRunner().invoke(main, [command, "job.yaml", "--set", "engine.device=cuda"])
    assert refused.exit_code == 2
    assert "error: --set engine.device: cuda, but torch " in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_in_the_first_second_is_heard_too(
    folder: Path, bulkrun: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    parent = bulkrun("submit", "job.yaml")
    wait_until(lambda: hears(parent.pid, number), "a handler", 20)
    parent.send_signal(number)
    said = parent.communicate(timeout=60)[1]
    assert parent.returncode == 75 and f"stopped by {number.name}" in said, said
    assert "Traceback" not in said and "Aborted" not in said


def hears(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal itself. Python handles Ctrl-C from its start: then the others tell."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1) and bool(caught >> (number - 1) & 1)


def test_following_the_logs_ends_with_ctrl_c(folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]) -> None:
    run, _ = enter(folder / "out", job(folder / "out"))
    log_event(run, "w", "before")
    following = bulkrun("logs", "out", "--follow")
    assert following.stdout is not None and "before" in following.stdout.readline()
    time.sleep(0.5)
    following.send_signal(signal.SIGINT)
    assert following.communicate(timeout=20)[1] == "" and following.returncode == 0


def test_a_worker_without_a_run_says_so(folder: Path, bulkrun: Callable[..., subprocess.Popen[str]]) -> None:
    parent = bulkrun("worker", "nothing")
    assert "not a run" in parent.communicate(timeout=60)[1]
    assert parent.returncode == 1


def test_a_worker_may_open_all_the_files_that_it_is_allowed(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
        done = fails_with(tmp_path, "worker", "RunError(resource.getrlimit(resource.RLIMIT_NOFILE))")
        assert str(received(done.stdout)) == str((before[1], before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

"""Where a submit goes: here, into Slurm's queue, or right here because this is a Slurm job already."""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage.durable import replace_json
from bulkrun.errors import BulkrunError, ExecutorError, Interrupted, JobFileError, RunError
from bulkrun.executors.slurm import QueuedJob
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store import cancel
from bulkrun.job.store.cancel import CancelWatch, request_cancel
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, Worker, WorkerState
from bulkrun.launch.preparation.prepare import PreparedJob, prepare
from bulkrun.launch.python_api.run_job import run_job
from bulkrun.launch.runs import queue, queue_turn
from bulkrun.launch.runs.preview import check_job
from bulkrun.launch.runs.run import Submitted, join
from bulkrun.launch.runs.submission import Submission
from bulkrun.launch.runs.submit import submit_job
from tests.job.bucket_runs import start_bucket_run
from tests.job.small_runs import enter, job
from tests.launch.nights import Nights
from tests.launch.one_process import one_process
from tests.s3_server import Bucket


class NoView:
    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def update(self, snapshot: Any) -> None: ...


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "def f(): pass"}\n')
    sections = {"input": {"path": "rows.jsonl"}, "output": {"path": "out"}, "run": {"executor": "slurm", "workers": 8}}
    return job_of({"name": "q", "model": "bundled:tiny", **sections})


@pytest.mark.parametrize(
    ("gpus", "device", "workers"), [("", "auto", 1), ("3", "auto", 1), ("0,1", "auto", 2), ("0,1", "cpu", 1)]
)
def test_inside_a_slurm_job_submit_works_there_with_a_worker_for_each_of_its_gpus(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, gpus: str, device: str, workers: int
) -> None:
    submitted: list[JobSpec] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4000000000")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("bulkrun.executors.devices._DRIVERS", ("/",))
    monkeypatch.setattr("bulkrun.launch.runs.submit.submit", lambda asked, view: submitted.append(asked.spec))
    view = NoView()
    notes: list[str] = []
    monkeypatch.setattr(view, "note", notes.append)
    submit_job(Submission(spec=spec.with_keys(engine={"device": device})), view)
    assert [(one.run.executor, one.run.workers) for one in submitted] == [("local", workers)]
    (note,) = notes
    assert note.startswith(f"this is Slurm job 7 already: {workers} worker{'s' * (workers > 1)} right here")


@pytest.mark.parametrize(("asked", "gpus", "workers"), [(None, "", 1), (None, "0,1", 2), (3, "0,1,2,3", 3)])
def test_who_helps_with_a_slurm_run_by_hand_is_one_more_element_where_the_run_lies_now(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, asked: int | None, gpus: str, workers: int
) -> None:
    prepared = prepare(spec)
    prepared.enter(prepared.record(None), resume_anyway=False)
    Path("out").rename("moved")
    joined: list[PreparedJob] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("bulkrun.executors.devices._DRIVERS", ("/",))
    monkeypatch.setattr("bulkrun.launch.runs.run.run_to_end", lambda prepared, *_: joined.append(prepared))
    join(Path("moved"), asked, NoView())
    assert [(one.spec.run.workers, one.run.root) for one in joined] == [(workers, Path("moved"))]


def test_on_a_login_node_without_slurm_it_says_so_and_leaves_no_run_behind(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_job(spec)
    with pytest.raises(ExecutorError, match="sbatch: not found"):
        submit_job(Submission(spec=spec), NoView())
    assert not Path("out").exists()


def test_a_misspelt_column_is_told_before_an_array_waits_for_its_turn(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(queue, "submit_array", lambda *_: pytest.fail("it is in the queue"))
    with pytest.raises(JobFileError, match="no column 'txt'; did you mean 'text'"):
        submit_job(Submission(spec=spec.with_keys(input={"id": "txt"})), NoView())
    assert not Path("out").exists()


def test_old_results_come_back_when_slurm_refuses_a_fresh_start(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = spec.with_keys(run={"executor": "local", "workers": 1}, engine={"dtype": "float32"})
    with one_process():
        submit_job(Submission(spec=here), NoView())
    before = sorted(path.name for path in Path("out").iterdir())
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExecutorError, match="sbatch: not found"):
        submit_job(Submission(spec=spec, fresh=True), NoView())
    assert sorted(path.name for path in Path("out").iterdir()) == before and "_SUCCESS" in before
    assert not list(Path().glob("out.*"))


def test_a_query_is_left_to_the_array_for_it_may_take_long(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    programs(tmp_path / "bin", monkeypatch, sbatch="echo 7")
    done = submit_job(Submission(spec=spec.with_keys(input={"sql": "SELECT nothing FROM input"})), NoView())
    assert isinstance(done, queue.Queued) and done.new


def test_a_submit_that_is_cancelled_while_it_checks_puts_nothing_into_the_queue(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled_meanwhile(run: RunDir) -> list[QueuedJob]:
        request_cancel(run)
        return []

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(queue, "queued_jobs", cancelled_meanwhile)
    monkeypatch.setattr(queue, "submit_array", lambda *_: pytest.fail("it is in the queue"))
    with pytest.raises(Interrupted, match="by bulkrun cancel before anything was put into the queue"):
        submit_job(Submission(spec=spec), NoView())


def test_a_run_whose_array_slurm_may_have_stays_for_it(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    taken = f'echo "7|7|7_0|PENDING||None|bulkrun-q|$PWD|$2" > {tmp_path}/queue'
    lost = f"{taken}; echo 'Socket timed out on send/recv operation' >&2; exit 1"
    programs(tmp_path / "bin", monkeypatch, sbatch=lost, squeue=f"cat {tmp_path}/queue")
    with pytest.raises(ExecutorError, match="may be in the queue all the same: the same command looks there first"):
        submit_job(Submission(spec=spec), NoView())
    again = submit_job(Submission(spec=spec), NoView())
    assert isinstance(again, queue.Queued) and (again.job_id, again.new) == ("7", False)


def test_a_finished_run_is_not_put_into_the_queue(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with one_process():
        submit_job(Submission(spec=spec.with_keys(run={"executor": "local", "workers": 1})), NoView())
    monkeypatch.setattr(queue, "submit_array", lambda *_: pytest.fail("it is in the queue"))
    done = submit_job(Submission(spec=spec), NoView())
    assert isinstance(done, Submitted) and not done.worked


def test_run_job_goes_where_the_jobs_executor_says(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExecutorError, match="sbatch: not found"):
        run_job(spec)


def kill(*_: object) -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("full_refresh", [True, False])
def test_a_night_is_not_put_into_the_queue_whatever_changed_and_the_command_that_runs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, full_refresh: bool
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    nights = Nights(tmp_path)
    nights.write([{"id": "a", "text": "x"}])
    if finished:
        nights.submit()
    else:
        nights.refuse = kill
        with pytest.raises(KeyboardInterrupt):
            nights.submit()
    nights.write([{"id": "a", "text": "x"}, {"id": "b", "text": "y"}])
    overrides = ("sampling.stop=a b", "run.executor=slurm")
    refresh = " --full-refresh" if full_refresh else ""
    with pytest.raises(ExecutorError, match="a later one runs where it is started") as refused:
        asked = Submission(
            spec=nights.spec(run__executor="slurm"),
            job_file=Path("job.yaml"),
            overrides=overrides,
            full_refresh=full_refresh,
        )
        submit_job(asked, NoView())
    *_, command = str(refused.value).partition("sbatch --wrap ")
    assert shlex.split(command) == [f"bulkrun submit job.yaml --set 'sampling.stop=a b'{refresh} --executor local"]


def test_a_signal_ends_the_waiting_and_not_the_job(tmp_path: Path) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(Interrupted, match="stopped waiting by SIGINT; Slurm job 7 goes on"):
        queue.wait_for(queue.Queued(RunDir(run.root), "7", new=True), NoView())


def test_a_submit_that_is_to_wait_stays_with_its_array(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(queue, "_LOOK_EVERY_S", 0.001)
    programs(tmp_path / "bin", monkeypatch, sbatch="echo 7", squeue="true")
    with pytest.raises(ExecutorError, match="job 7 left the queue before the run was finished"):
        submit_job(Submission(spec=spec), NoView(), wait=True)


def test_waiting_ends_when_the_bucket_is_complete_not_before(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run, whole = RunDir(tmp_path / "s"), bucket.list()
    run.delivered.unlink()
    bucket.files.rm(f"{bucket.name}/out/_SUCCESS")  # its upload was refused, say
    done = queue.wait_for(queue.Queued(run, "7", new=True), NoView())
    assert done.totals.status == "completed_with_errors" and bucket.list() == whole


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """Programs of these names are found first, each a shell script that does this."""
    folder.mkdir()
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


class Notes(NoView):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that waits in a queue which is asked at once and again and again."""
    monkeypatch.setattr(queue, "_LOOK_EVERY_S", 0.001)
    return enter(tmp_path / "out", job(tmp_path / "out"))[0]


def test_a_queue_that_cannot_be_asked_for_a_while_ends_no_waiting_and_is_said_once(
    unfinished: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["there", None, None, None, "there", "gone", "there", "gone", None, "gone"])

    def asked(run: RunDir) -> list[QueuedJob]:
        if (answer := next(answers)) is None:
            raise ExecutorError("squeue: Unable to contact slurm controller (connect failure)")
        return [QueuedJob("7_0", "RUNNING", "n1", "None")] if answer == "there" else []

    monkeypatch.setattr(queue, "queued_jobs", asked)
    view = Notes()
    with pytest.raises(ExecutorError, match="job 7 left the queue before the run was finished"):
        queue.wait_for(queue.Queued(unfinished, "7", new=True), view)
    assert next(answers, "all asked") == "all asked"
    assert (
        view.notes
        == ["squeue: Unable to contact slurm controller (connect failure); still waiting for Slurm job 7"] * 2
    )  # two outages


def test_why_a_job_waits_is_said_once(unfinished: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["None", "Priority", "Resources", "Priority", "JobHeldUser"]
    queues = [[QueuedJob("7_[0-1]", "PENDING", "", reason)] for reason in reasons]
    later = [[QueuedJob("7_0", state, "n1", "None")] for state in ("CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")]
    answers = iter([*queues, *later, [], []])
    monkeypatch.setattr(queue, "queued_jobs", lambda run: next(answers))
    view = Notes()
    with pytest.raises(ExecutorError, match="left the queue"):
        queue.wait_for(queue.Queued(unfinished, "7", new=True), view)
    assert view.notes == [
        "Slurm job 7_[0-1] is PENDING (Priority)",
        "Slurm job 7_[0-1] is PENDING (Resources)",
        "Slurm job 7_[0-1] is PENDING (JobHeldUser): it is held; `scontrol release 7` lets it go",
        "Slurm job 7_0 is SUSPENDED: it goes on when Slurm or an administrator resumes it",
    ]


def test_what_became_of_an_array_that_left_the_queue_is_said(
    unfinished: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unfinished.slurm.mkdir()
    unfinished.slurm_jobs.write_text('{"job_id": "7", "script": "s.sh", "name": "bulkrun-q"}\n')
    shown = "JobId=7 ArrayTaskId=0 JobName=bulkrun-q UserId=u(1) JobState=OUT_OF_MEMORY Reason=OutOfMemory"
    programs(tmp_path / "bin", monkeypatch, squeue="true", scontrol=f"echo '{shown}'")
    with pytest.raises(
        ExecutorError, match=r"was finished \(Slurm job 7 ended: OUT_OF_MEMORY, raise slurm\.mem.*\); `"
    ):
        queue.wait_for(queue.Queued(unfinished, "7", new=True), NoView())


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [
        ("RunError: the disk is full", 1),
        ("ResumeError: input.path: a.jsonl changed since the run began", 4),
        ("InputError: a.jsonl: No such file", 2),
        ("JobFileError: input.id: no column 'txt'\nprompt: no column 'y'", 2),
        ("ZeroDivisionError: division by zero", 1),
        (None, 1),
    ],
)
def test_who_waits_reads_what_the_workers_of_an_array_failed_with_and_ends_as_they_did(
    unfinished: RunDir, monkeypatch: pytest.MonkeyPatch, message: str | None, exit_code: int
) -> None:
    state = WorkerState(Worker("w", "another node", 1, "1"), 3, "runner", "failed", message)
    replace_json(unfinished.worker_file("w"), asdict(state))
    monkeypatch.setattr(queue, "queued_jobs", lambda run: [])
    said = f": {re.escape(message)}" if message else ""
    with pytest.raises(BulkrunError, match=f"job 7 left .* finished{said}; `bulkrun logs") as raised:
        queue.wait_for(queue.Queued(unfinished, "7", new=True), NoView())
    assert raised.value.exit_code == exit_code
    assert ("the same command continues" in str(raised.value)) == (exit_code != 4), "it would find the same change"


def test_a_submit_that_finds_its_array_held_says_so(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    held = f'echo "7|7|7_[0]|PENDING||JobHeldUser|bulkrun-q|/|$2" > {tmp_path}/queue; echo 7'
    programs(tmp_path / "bin", monkeypatch, sbatch=held, squeue=f"cat {tmp_path}/queue")
    submit_job(Submission(spec=spec), NoView())
    again = submit_job(Submission(spec=spec), NoView())
    assert isinstance(again, queue.Queued) and not again.new
    assert again.standing == "Slurm job 7_[0] is PENDING (JobHeldUser): it is held; `scontrol release 7` lets it go"


@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_nothing_starts_anew_while_an_array_waits_that_would_work_on_it_unseen(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, executor: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    waits = f'echo "7|7|7_[0]|PENDING||Resources|bulkrun-q|/|$2" > {tmp_path}/queue; echo 7'
    programs(tmp_path / "bin", monkeypatch, sbatch=waits, squeue=f"cat {tmp_path}/queue")
    submit_job(Submission(spec=spec), NoView())
    asked = Submission(spec=spec.with_keys(run={"executor": executor}), fresh=True)
    with pytest.raises(RunError, match=r"Slurm job 7_\[0\] is PENDING .*`bulkrun cancel out` takes it out"):
        submit_job(asked, NoView())
    assert Path("out/.bulkrun/run.json").exists() and not list(Path().glob("out.*"))


def test_submits_at_the_same_time_put_one_array_into_the_queue(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    slow = f'sleep 1; echo "7|7|7_0|PENDING||None|bulkrun-q|/|$2" >> {tmp_path}/queue; echo 7'
    programs(tmp_path / "bin", monkeypatch, sbatch=slow, squeue=f"cat {tmp_path}/queue")
    (tmp_path / "queue").touch()
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: submit_job(Submission(spec=spec), NoView()), range(3)))
    assert sorted((one.job_id, one.new) for one in done if isinstance(one, queue.Queued)) == [
        ("7", False),
        ("7", False),
        ("7", True),
    ]
    assert len((tmp_path / "queue").read_text().splitlines()) == 1


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Worker], Iterator[None]]:
    """Waits for the turn that this worker has."""
    monkeypatch.setattr(queue_turn, "_LOOK_EVERY_S", 0.01)
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))

    @contextmanager
    def wait(owner: Worker) -> Iterator[None]:
        assert Claims(run, owner, LifeWatch(run)).take("submit")
        with queue_turn.turn_to_queue(run, CancelWatch(run), lambda _: None):
            yield

    return wait


def test_a_submit_that_died_blocks_no_other_one(
    waiting: Callable[[Worker], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting(replace(Worker.this_process(), started="before")):
        pass
    monkeypatch.setattr(queue_turn, "_TURN_S", 0.1)
    with waiting(Worker("a", "another host", 1, "1")):
        pass


@pytest.mark.parametrize(
    ("meanwhile", "error"),
    [
        (request_cancel, pytest.raises(Interrupted, match="by bulkrun cancel before anything was put into the queue")),
        (lambda run: run.run_json.unlink(), pytest.raises(ExecutorError, match="that began this run was refused")),
    ],
)
def test_who_waits_for_its_turn_sees_what_becomes_of_the_run(
    waiting: Callable[[Worker], Any], tmp_path: Path, meanwhile: Callable[[RunDir], None], error: Any
) -> None:
    threading.Timer(0.1, meanwhile, [RunDir(tmp_path / "out")]).start()
    with error, waiting(Worker("a", "another host", 1, "1")):
        pass


def test_a_queue_that_is_never_heard_of_again_ends_the_waiting_and_names_the_job(
    unfinished: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(run: RunDir) -> list[str]:
        raise ExecutorError("squeue: not found")

    monkeypatch.setattr(queue, "queued_jobs", dead)
    monkeypatch.setattr(queue, "_PATIENCE_S", 0.05)
    with pytest.raises(ExecutorError, match="squeue: not found; Slurm job 7 may still be there: the same command"):
        queue.wait_for(queue.Queued(unfinished, "7", new=True), NoView())


def test_a_cancel_ends_the_waiting_as_it_ends_a_run_that_works_here(
    unfinished: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled_meanwhile(run: RunDir) -> list[str]:
        request_cancel(run)
        return []

    monkeypatch.setattr(queue, "queued_jobs", cancelled_meanwhile)
    monkeypatch.setattr(cancel, "_LOOK_AGAIN_S", 0.0)
    with pytest.raises(Interrupted, match="stopped by bulkrun cancel: Slurm job 7 is taken out of the queue"):
        queue.wait_for(queue.Queued(unfinished, "7", new=True), NoView())

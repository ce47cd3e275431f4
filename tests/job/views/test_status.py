"""What status, verify, errors and list say of runs in every state, from files alone."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.parts import read_part_info, write_part
from bulkrun.data.storage.durable import replace_json
from bulkrun.errors import ErrorRateExceeded, RunError
from bulkrun.job.store.heartbeat import Heartbeat
from bulkrun.job.store.journal import read_outcomes
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import record_document
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.store.workers import Worker, WorkerState, read_workers
from bulkrun.job.update.cause import Retry
from bulkrun.job.update.staging import Update, begin_merge
from bulkrun.job.views.finished import finished_totals
from bulkrun.job.views.listing import find_runs, statuses
from bulkrun.job.views.row_errors import read_row_errors
from bulkrun.job.views.status import read_status
from bulkrun.job.views.verify import verify_run
from tests.job.fake_engine import FakeEngine
from tests.job.small_runs import enter, job, make_rows, oracle, results, start, write_plan
from tests.job.work.test_runner import StopAfter


def test_a_finished_run(tmp_path: Path) -> None:
    start(tmp_path / "out", make_rows(30), job(tmp_path / "out", n=2))
    status = read_status(RunDir(tmp_path / "out"))
    assert (status.state, status.rows_total, status.rows_done, status.error_rows) == (
        "completed_with_errors",
        60,
        60,
        8,
    )
    assert (status.shards_total, status.shards_committed) == (3, 3) and status.totals is not None
    assert status.cut == status.totals.cut > 0
    assert status.next_command == f"bulkrun errors {tmp_path / 'out'}"


def test_an_interrupted_run_counts_its_journals(tmp_path: Path) -> None:
    spec = job(tmp_path / "out", max_tokens=60)
    start(tmp_path / "out", make_rows(40), spec, should_stop=StopAfter(25), shard_rows=20)
    status = read_status(RunDir(tmp_path / "out"))
    assert status.state == "interrupted" and status.rows_total == 40 and 0 < status.rows_done < 40
    codes = [record.error_code for record in read_outcomes(RunDir(tmp_path / "out").journals_of(0)).answered.values()]
    assert status.error_rows == sum(code is not None for code in codes) > 0
    assert status.next_command == "bulkrun submit JOB" and status.last_commit_age_s is None


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    def failed() -> bool:
        raise RunError("the disk failed: it is gone")

    with pytest.raises(RunError):
        start(tmp_path / "out", make_rows(10), job(tmp_path / "out"), should_stop=failed)
    status = read_status(RunDir(tmp_path / "out"))
    assert status.state == "failed" and "the disk failed" in str(status.message)


def test_the_next_command_has_the_settings_of_the_first(tmp_path: Path) -> None:
    run, record = enter(tmp_path / "out", job(tmp_path / "out"))
    settings = ["output.path=a b", "run.workers=2"]
    replace_json(run.run_json, record_document(replace(record, job_file="my job.yaml", overrides=settings)))
    said = read_status(run).next_command
    assert said == "bulkrun submit 'my job.yaml' --set 'output.path=a b' --set run.workers=2"


@pytest.mark.parametrize("path", ["out", "./out/", "../out", "../../x/../out"])
def test_a_run_that_lies_where_it_may_have_begun_was_not_moved(tmp_path: Path, path: str) -> None:
    run, record = enter(tmp_path / "out", job(Path(path)))
    settings = [f"output.path={path}"]
    replace_json(run.run_json, record_document(replace(record, job_file="job.yaml", overrides=settings)))
    assert read_status(run).next_command == f"bulkrun submit job.yaml --set output.path={path}"


@pytest.mark.parametrize("path", ["first", "../first", "/somewhere/first"])
def test_the_next_command_of_a_run_that_was_moved_leads_to_it(tmp_path: Path, path: str) -> None:
    run, record = enter(tmp_path / "first", job(Path(path)))
    settings = [f"output.path={path}", "run.workers=2"]
    replace_json(run.run_json, record_document(replace(record, job_file="job.yaml", overrides=settings)))
    moved = run.root.rename(tmp_path / "second")
    said = read_status(RunDir(moved)).next_command
    assert said == f"bulkrun submit job.yaml --set run.workers=2 --set output.path={moved}"


def test_a_finished_run_whose_results_went_is_no_completed_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    start(run.root, make_rows(30), job(run.root))
    assert finished_totals(run) == read_totals(run)
    shutil.copy(run.part(0), run.part(99))
    assert str(read_status(RunDir(run.root)).message).endswith("says what does not belong there")
    run.part(99).unlink()
    run.part(0).unlink()
    status = read_status(RunDir(run.root))
    assert status.state == "failed" and status.next_command == f"bulkrun verify {run.root}"
    assert str(status.message).startswith("_SUCCESS says 30 rows, the parts hold 20: `bulkrun verify ")
    with pytest.raises(RunError, match="the parts hold 20"):
        finished_totals(RunDir(run.root))


def test_while_an_update_is_merged_the_parts_are_between_two_totals(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    start(run.root, make_rows(30), job(run.root))
    run.part(0).unlink()
    enter(run.staged.root, job(run.staged.root))
    update = Update(Retry(), generation=1, rows=0, first_row=30, next_row=30, first_part=9)
    replace_json(run.staged.update, update.to_json())
    begin_merge(run)
    assert read_status(RunDir(run.root)).state == "completed_with_errors"
    Heartbeat(run.staged, Worker.this_process(), dict).start()
    assert read_status(RunDir(run.root)).next_command == f"bulkrun watch {run.root}", "somebody is at it"


def test_a_planner_that_failed_is_why_the_others_were_stopped(tmp_path: Path) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    me = Worker.this_process()
    for name, role, ended, message, age_s in [
        ("p", "planner", "failed", "UsageError: no column", 20),
        ("w", "runner", "interrupted", None, 15),
        ("s", "supervisor", "failed", "no column", 14),
    ]:
        path = run.workers / f"{name}.json"
        replace_json(path, asdict(WorkerState(replace(me, id=name), 3, role, ended, message)))
        os.utime(path, (time.time() - age_s,) * 2)
    status = read_status(run)
    assert (status.state, status.message) == ("failed", "no column")


def test_a_submit_whose_model_is_loading_is_there(tmp_path: Path) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    write_plan(run, make_rows(10), 5)
    heartbeat = Heartbeat(run, Worker.this_process(), dict, role="supervisor")
    heartbeat.start()
    status = read_status(run)
    assert status.state == "running" and [worker.role for worker in status.workers] == ["supervisor"]
    heartbeat.stop("failed", "no such GPU")
    assert (read_status(run).state, read_status(run).message) == ("failed", "no such GPU")


def put_worker(run: RunDir, worker: Worker, age_s: float, **progress: float) -> None:
    path = run.workers / f"{worker.id}.json"
    replace_json(path, asdict(WorkerState(worker, 3, "runner", progress=progress)))
    os.utime(path, (time.time() - age_s,) * 2)


def test_running_planning_killed_and_stalled_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.job.store.workers.HEARTBEAT_S", 0.01)
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    me = replace(Worker.this_process(), id="me")
    assert read_status(run).state == "interrupted"
    put_worker(run, me, age_s=1)
    assert read_status(run).state == "planning"
    write_plan(run, make_rows(10), 5)
    put_worker(run, me, 1, rows_per_s=2.0, prompt_tokens_per_s=30.0, completion_tokens_per_s=10.0, remaining_tokens=400)
    status = read_status(run)
    assert (status.state, status.rows_per_s, status.tokens_per_s, status.eta_s) == ("running", 2.0, 40.0, 10.0)
    put_worker(run, me, age_s=100, rows_per_s=2.0)
    status = read_status(run)
    assert (status.state, status.rows_per_s) == ("stalled", 0) and "silent" in str(status.message)
    put_worker(run, replace(me, place="another machine"), age_s=100)
    assert read_status(run).state == "stalled"
    for age_s in (1, 100):  # a process of this machine that is gone is killed, however long ago
        put_worker(run, replace(me, started="another process"), age_s=age_s)
        assert read_status(run).state == "interrupted" and "was killed" in str(read_status(run).message)


def test_status_needs_no_torch_and_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run"):
        read_status(RunDir(tmp_path))
    modules = "bulkrun.job.views.status, bulkrun.job.views.verify, bulkrun.job.work.runner"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_verify_finds_nothing_in_a_whole_run(tmp_path: Path) -> None:
    start(tmp_path / "out", make_rows(30), job(tmp_path / "out", n=2))
    report = verify_run(RunDir(tmp_path / "out"))
    assert (report.ok, report.finished, report.parts, report.rows) == (True, True, 3, 60)


def test_verify_names_the_damaged_the_missing_and_the_swapped_part(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    start(run.root, make_rows(40), job(run.root))
    data = bytearray(run.part(1).read_bytes())
    data[40] ^= 1
    run.part(1).write_bytes(data)
    swapped = run.part(2).read_bytes()
    run.part(2).write_bytes(run.part(3).read_bytes())
    run.part(3).write_bytes(swapped)
    run.part(0).unlink()
    problems = "\n".join(verify_run(run).problems)
    assert "part-00001.parquet: damaged" in problems
    assert (
        "part-00002.parquet: wrong shard: 3 instead of 2" in problems and "part-00003.parquet: wrong rows" in problems
    )
    assert "_SUCCESS: parts: 4, found 2" in problems
    assert "part-00000.parquet: is not there" in problems


def test_verify_holds_a_footer_against_its_rows_and_the_plan(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    start(run.root, make_rows(12), job(run.root))
    path = run.part(0)
    table, info = pq.read_table(path), read_part_info(path)

    def problems(without: str | None = None, **footer: Any) -> str:
        path.unlink()
        write_part(path, table if without is None else table.drop_columns([without]), replace(info, **footer))
        return "\n".join(verify_run(run).problems)

    assert not problems()
    assert "part-00000.parquet: wrong run: 'x' instead of" in problems(run_id="x")
    assert "part-00000.parquet: wrong errors: {'timeout': 2} instead of" in problems(errors={"timeout": 2})
    assert "part-00000.parquet: wrong cut: 77 instead of" in problems(cut=77)
    assert "part-00000.parquet: wrong stopped: 77 instead of 0" in problems(stopped=77)
    assert "_SUCCESS: prompt_tokens: " in problems(prompt_tokens=1)
    assert "part-00000.parquet: its columns are not those of the plan" in problems(without="weight")


def test_a_damaged_part_is_redone_as_the_message_says(tmp_path: Path) -> None:
    run, rows, spec = RunDir(tmp_path / "out"), make_rows(40), job(tmp_path / "out")
    start(run.root, rows, spec)
    data = bytearray(run.part(1).read_bytes())
    data[40] ^= 1
    run.part(1).write_bytes(data)
    assert "delete this file and _SUCCESS, then run" in verify_run(run).problems[0]
    run.part(1).unlink()
    run.success.unlink()
    engine = FakeEngine()
    start(run.root, rows, spec, engine=engine)
    assert results(run.root) == oracle(rows, spec) and 0 < len(engine.seen) <= 10


def test_verify_names_a_torn_part_and_a_damaged_journal(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    start(run.root, make_rows(40), job(run.root, max_tokens=60), should_stop=StopAfter(25), shard_rows=20)
    (journal,) = run.journals_of(0)
    journal.write_bytes(b"x" + journal.read_bytes())
    run.part(1).write_bytes(b"PAR1")
    problems = "\n".join(verify_run(run).problems)
    assert f"{journal.name}: bad checksum in line 1" in problems
    assert "part-00001.parquet: not a whole Parquet file" in problems


def test_status_and_errors_list_the_journals_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, looks, real = RunDir(tmp_path / "out"), list[str](), os.scandir
    start(run.root, make_rows(40), job(run.root, max_tokens=60), should_stop=StopAfter(3), shard_rows=4)
    assert len(run.planned_shards() - run.committed_shards()) > 3 and run.journaled_shards()
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(Path(path).name) or real(path))
    read_status(run)
    assert looks.count("journal") == 1
    read_row_errors(run)
    assert looks.count("journal") == 2


def test_errors_are_counted_by_code_with_examples_before_and_after_the_end(tmp_path: Path) -> None:
    rows, spec = make_rows(60), job(tmp_path / "out", max_tokens=40)
    bad = rows[1].token_ids

    def engine() -> FakeEngine:
        return FakeEngine(refuse=lambda request: tuple(request.prompt_token_ids) == bad)

    start(tmp_path / "out", rows, spec, engine=engine(), should_stop=StopAfter(10), shard_rows=60)
    early = read_row_errors(RunDir(tmp_path / "out"))
    assert early.counts == {"bad_input": 9}
    start(tmp_path / "out", rows, spec, engine=engine(), shard_rows=60)
    report = read_row_errors(RunDir(tmp_path / "out"), examples=2)
    assert report.counts == {"bad_input": 9, "nan_logits": 1}
    assert [error.row for error in report.examples["bad_input"]] == [3, 10]
    assert report.examples["nan_logits"][0].message == "no"


def test_what_cannot_run_is_told_of_a_run_that_stopped_because_of_it(tmp_path: Path) -> None:
    def submit(max_error_rate: float) -> None:
        spec = job(tmp_path / "out", n=2, temperature=1.0, run={"max_error_rate": max_error_rate})
        start(tmp_path / "out", rows, spec)

    run, rows = RunDir(tmp_path / "out"), make_rows(140)
    with pytest.raises(ErrorRateExceeded, match="see `bulkrun errors`"):
        submit(0.0)
    assert not run.committed_shards()
    report = read_row_errors(run, examples=1)
    refused = [row.row for row in rows if row.error_code is not None]
    assert (report.counts, report.examples["bad_input"][0].row) == ({"bad_input": 2 * len(refused)}, refused[0])
    submit(1.0)
    assert read_row_errors(run).counts == report.counts
    run.part(0).rename(run.part(99))  # as `compact` does
    assert read_row_errors(run).counts == report.counts


def test_a_run_at_work_is_to_be_watched(tmp_path: Path) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    heartbeat = Heartbeat(run, Worker.this_process(), dict)
    heartbeat.start()
    status = read_status(run)
    heartbeat.stop("interrupted")
    assert (status.state, status.next_command) == ("planning", f"bulkrun watch {run.root}")


def test_an_error_row_has_the_id_that_its_input_row_has_before_and_after_the_end(tmp_path: Path) -> None:
    spec = job(tmp_path / "out", max_tokens=40)
    spec = spec.model_copy(update={"input": spec.input.model_copy(update={"id": "doc"})})
    for options in ({"should_stop": StopAfter(10)}, {}):
        start(tmp_path / "out", make_rows(60), spec, shard_rows=60, **options)
        [error, *_] = read_row_errors(RunDir(tmp_path / "out")).examples["bad_input"]
        assert (error.row, error.id) == (3, "text 3")
    start(tmp_path / "plain", make_rows(9), job(tmp_path / "plain"))
    assert read_row_errors(RunDir(tmp_path / "plain")).examples["bad_input"][0].id is None


def test_list_finds_runs_and_does_not_look_into_them(tmp_path: Path) -> None:
    deep = "d/e/e/p/e/r/a"
    for name in ("b", deep):
        enter(tmp_path / name, job(tmp_path / name))
    (tmp_path / "d/e/around").symlink_to(tmp_path)
    enter(tmp_path / "b/inner", job(tmp_path / "b/inner"))
    enter(tmp_path / ".hidden/run", job(tmp_path / ".hidden/run"))
    assert [run.root.relative_to(tmp_path).as_posix() for run in find_runs(tmp_path)] == ["b", deep]
    assert [run.root for run in find_runs(tmp_path / "b")] == [tmp_path / "b"]


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        enter(tmp_path / name, job(tmp_path / name))
    RunDir(tmp_path / "a").run_json.write_text("{")
    damaged, whole = statuses(tmp_path)
    assert (damaged.root, damaged.state) == (tmp_path / "a", "damaged") and "not a whole JSON file" in str(
        damaged.message
    )
    assert (whole.root, whole.state) == (tmp_path / "b", "interrupted")


def test_a_run_of_somebody_else_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "theirs"):
        enter(tmp_path / name, job(tmp_path / name))

    def only_mine(real: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def look(path: Path) -> Any:
            if path.is_relative_to(RunDir(tmp_path / "theirs").state):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path)

        return look

    for look in ("is_file", "read_bytes"):  # what a test as root cannot take from itself
        monkeypatch.setattr(Path, look, only_mine(getattr(Path, look)))
    mine, theirs = statuses(tmp_path)
    assert (mine.state, theirs.state) == ("interrupted", "unreadable")
    assert str(theirs.message).endswith("theirs/.bulkrun/run.json: Permission denied")


def test_a_worker_file_holds_live_numbers_until_its_goodbye(tmp_path: Path) -> None:
    start(tmp_path / "out", make_rows(20), job(tmp_path / "out"))
    (state,) = read_workers(RunDir(tmp_path / "out"))
    assert state.ended == "completed_with_errors" and state.progress["rows_done"] == 20

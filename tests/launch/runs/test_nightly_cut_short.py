"""Nights that a kill, a full disk or another process cut short, and results that were damaged since."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.parts import read_part_info
from bulkrun.errors import ResumeError, RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.update import merge
from bulkrun.job.update.compact import compact
from bulkrun.job.update.settle import settle_run
from bulkrun.job.update.staging import begin_merge
from bulkrun.job.views.logs import last_events
from bulkrun.job.views.status import read_status
from bulkrun.launch.runs import nightly
from bulkrun.launch.runs import submit as submit_module
from bulkrun.launch.runs.run import join
from bulkrun.launch.runs.submission import Submission
from bulkrun.request import Request
from tests.full_disk import file_size_limit
from tests.launch.nights import Nights, Silent, after, rows_of, stop_at, whole
from tests.s3_server import Bucket


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


@pytest.mark.parametrize("left", [5, 2])
def test_an_input_that_changes_between_its_comparison_and_its_copy_is_noticed(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    nights.write(rows_of(3))
    nights.submit()
    nights.write(rows_of(5))

    def compare_then_change(*args: Any, **options: Any) -> Any:
        changes = compare(*args, **options)
        nights.write(rows_of(left, start=1))
        return changes

    compare = nightly.compare
    with monkeypatch.context() as meanwhile, pytest.raises(ResumeError, match=r"rows\.jsonl changed"):
        meanwhile.setattr(nightly, "compare", compare_then_change)
        nights.submit()
    assert nights.ran == 0
    nights.write(rows_of(5, start=1))
    assert nights.submit().changes == {"new": 3, "changed": 0, "failed": 0, "unchanged": 2, "vanished": 1}
    whole(nights)


def test_a_full_disk_while_a_night_is_staged_is_named_and_half_of_it_does_not_stay_there(nights: Nights) -> None:
    payloads = random.Random(1)
    rows = [{**row, "more": payloads.randbytes(3000).hex()} for row in rows_of(60)]
    nights.write(rows[:3])
    nights.submit()
    nights.write(rows)
    with (
        file_size_limit(65536),
        pytest.raises(RunError, match=r"input\.subset: writing the rows to run failed.*ulimit"),
    ):
        nights.submit()
    assert not RunDir(nights.out).staged.root.exists()
    assert nights.submit().changes == {"new": 57, "changed": 0, "failed": 0, "unchanged": 3, "vanished": 0}


@pytest.mark.parametrize("name", ["update.json", "left.tmp"])
def test_a_file_that_the_disk_does_not_remove_is_named(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a night that has nothing to run, and of the rows of one that has."""
    nights.write(rows_of(3))
    nights.submit()
    remove, rows_left = Path.unlink, RunDir(nights.out).staged.tmp / name

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        remove(path, missing_ok=missing_ok)

    def leave_one(request: Request) -> bool:
        rows_left.touch()
        return False

    nights.write(rows_of(3 if name == "update.json" else 4))
    nights.refuse = leave_one
    with monkeypatch.context() as disk, pytest.raises(RunError, match=rf"{name}: removing failed: Input/output error"):
        disk.setattr(Path, "unlink", fail)
        nights.submit()
    nights.submit()
    whole(nights)


@pytest.mark.parametrize("full_refresh", [False, True])
def test_status_and_logs_of_a_run_tell_of_an_interrupted_night(nights: Nights, full_refresh: bool) -> None:
    nights.write(rows_of(3))
    nights.submit()
    nights.write(rows_of(40))
    run, seen = RunDir(nights.out), iter(range(20))
    before = [path.name for path in nights.out.iterdir()], len(last_events(run, 100))

    def stop(request: Request) -> bool:
        if next(seen, None) is None:
            raise KeyboardInterrupt
        return False

    nights.refuse = stop
    with pytest.raises(KeyboardInterrupt), nights.one_process():
        given = {"job_file": Path("a job.yaml"), "overrides": ("run.workers=2",), "full_refresh": full_refresh}
        submit_module.submit(Submission(spec=nights.spec(), **given), Silent())
    status = read_status(run)
    assert status.state == "completed" and status.update is not None and status.update.rows_done
    refresh = " --full-refresh" if full_refresh else ""
    assert status.next_command == f"bulkrun submit 'a job.yaml' --set run.workers=2{refresh}"
    assert status.update.next_command == status.next_command
    assert last_events(run, 100)[before[1]]["event"] == "started"
    assert [path.name for path in nights.out.iterdir()] == before[0]


def test_a_night_that_another_command_went_on_with_leaves_the_settings_of_that_one(nights: Nights) -> None:
    """Engine and pace are no part of what a night is known by: a time limit that was too short is not the run's."""
    nights.write(rows_of(3))
    nights.submit()
    nights.write(rows_of(40))
    run = RunDir(nights.out)
    for walltime, rows in ((6.0, 10), (7.0, 5)):
        stop_at(nights, rows)
        with pytest.raises(KeyboardInterrupt), nights.one_process():
            again = {"job_file": Path("job.yaml"), "overrides": (f"run.walltime={walltime}",)}
            submit_module.submit(Submission(spec=nights.spec(run__walltime=walltime), **again), Silent())
        assert read_status(run).next_command == f"bulkrun submit job.yaml --set run.walltime={walltime}"
    nights.refuse = lambda request: False
    nights.submit(engine__max_num_seqs=3)
    record = read_record(run)
    assert (record.job["run"]["walltime"], record.job["engine"]["max_num_seqs"], record.overrides) == (None, 3, [])
    whole(nights)


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), duckdb.OutOfMemoryException("cannot offload")]
)
def test_a_full_disk_while_the_input_is_compared_is_named_and_nothing_stays_there(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    nights.write(rows_of(3))
    nights.submit()
    nights.write(rows_of(4))

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("bulkrun.job.update.diff._write_picks", fail)
        with pytest.raises(
            RunError, match=r"tmp: comparing the input with the results failed: (No space.*free|cannot offload)"
        ):
            nights.submit()
    assert not RunDir(nights.out).staged.root.exists()
    assert nights.submit().worked


def test_a_night_that_has_nothing_to_run_brings_what_its_bucket_lacks(nights: Nights, bucket: Bucket) -> None:
    nights.settings |= {"output__path": bucket.url("out"), "output__state": str(nights.out)}
    nights.write(rows_of(3))
    nights.submit()
    whole = bucket.list()
    RunDir(nights.out).delivered.unlink()
    bucket.files.rm_file(f"{bucket.name}/out/_SUCCESS")
    done = nights.submit()
    assert (done.worked, done.uploaded) == (False, 0) and bucket.list() == whole


def test_results_that_have_no_keys_are_not_taken_for_a_night(nights: Nights) -> None:
    nights.write(rows_of(3))
    nights.submit(run__incremental=False)
    with pytest.raises(ResumeError, match=r"run.incremental.*\n.*--fresh"):
        nights.submit()


def cut_first_run(nights: Nights) -> None:
    """A first run that was killed, and an input that has one more row by now."""
    nights.write(rows_of(60))
    stop_at(nights, 30)
    with pytest.raises(KeyboardInterrupt):
        nights.submit()
    nights.refuse = lambda request: False
    nights.write(rows_of(61))


def test_a_first_run_whose_input_changed_keeps_what_it_finished(nights: Nights) -> None:
    cut_first_run(nights)
    nights.submit()
    assert 0 < nights.ran <= 35
    assert nights.results() == {row["id"]: nights.results()[row["id"]] for row in rows_of(61)}
    answers = {name: row["response"] for name, row in nights.results().items()}
    assert answers == {row["id"]: nights.expected(row["id"], row["text"]) for row in rows_of(61)}
    whole(nights)


def test_a_first_run_that_was_killed_while_it_was_ended_leaves_nothing_half_written(nights: Nights) -> None:
    cut_first_run(nights)
    (left := RunDir(nights.out).tmp / "success.0123456789abcdef.tmp").touch()
    nights.submit()
    assert not left.exists()
    whole(nights)


def test_a_first_run_that_ended_with_its_rows_is_whole_where_the_night_brings_nothing(nights: Nights) -> None:
    cut_first_run(nights)
    nights.write([])
    assert not nights.submit().worked and 0 < len(nights.results()) < 60
    whole(nights)


def test_a_night_whose_input_changed_keeps_what_it_finished(nights: Nights) -> None:
    nights.write(rows_of(5))
    nights.submit()
    nights.write(rows_of(65))
    stop_at(nights, 30)
    with pytest.raises(KeyboardInterrupt):
        nights.submit()
    assert read_status(RunDir(nights.out)).update is not None
    nights.refuse = lambda request: False
    nights.write(rows_of(66))
    nights.submit()
    assert 0 < nights.ran <= 36
    answers = {name: row["response"] for name, row in nights.results().items()}
    assert answers == {row["id"]: nights.expected(row["id"], row["text"]) for row in rows_of(66)}
    whole(nights)


def test_a_first_run_is_ended_by_one_at_a_time(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_first_run(nights)

    def settle_slowly(run: RunDir, record: RunRecord) -> RunTotals:
        with pytest.raises(RunError, match=f"process {os.getpid()}"):
            nights.submit()
        return settle_run(run, record)

    monkeypatch.setattr(nightly, "settle_run", settle_slowly)
    nights.submit()
    is_up_to_date(nights, rows_of(61))


def test_a_night_that_waited_while_another_ended_begins_where_that_one_ended(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_first_run(nights)
    monkeypatch.setattr(nightly, "hold", after(nights.submit, monkeypatch))
    assert not nights.submit().worked
    nights.write(rows := edited(62, "a"))
    assert nights.submit().exit_code == 0 and nights.ran == 4
    is_up_to_date(nights, rows)


def edited(count: int, text: str) -> list[dict[str, Any]]:
    """Rows of which the first three are other ones than last night."""
    return [{**row, "text": row["text"] + text * (number < 3)} for number, row in enumerate(rows_of(count))]


def is_up_to_date(nights: Nights, rows: list[dict[str, Any]]) -> None:
    answers = {name: row["response"] for name, row in nights.results().items()}
    assert answers == {row["id"]: nights.expected(row["id"], row["text"]) for row in rows}
    whole(nights)


@pytest.mark.parametrize("new_rows", [0, 1])
def test_without_success_a_run_of_many_nights_goes_on_with_what_its_parts_hold(nights: Nights, new_rows: int) -> None:
    nights.write(rows_of(20))
    nights.submit()
    for text in "abc":
        nights.write(edited(20 + new_rows, text))
        nights.submit()
    (nights.out / "_SUCCESS").unlink()
    for text, ran in (("c", 0), ("d", 3), ("e", 3)):  # the first as it was: a run that its plan could finish, it seems
        nights.write(rows := edited(20 + new_rows, text))
        assert nights.submit().exit_code == 0 and nights.ran == ran
        is_up_to_date(nights, rows)


def test_a_damaged_part_is_made_again_as_the_message_says(nights: Nights) -> None:
    nights.write(rows_of(20))
    nights.submit()
    nights.write(edited(20, "a"))
    nights.submit()
    damaged = next(path for path in nights.out.glob("*.parquet") if not read_part_info(path).generation)
    data = bytearray(damaged.read_bytes())
    data[60] ^= 1
    damaged.write_bytes(data)
    nights.write(rows := edited(20, "b"))
    with pytest.raises(RunError, match="delete this file and _SUCCESS, then run the same command again"):
        nights.submit()
    damaged.unlink()
    (nights.out / "_SUCCESS").unlink()
    assert nights.submit().exit_code == 0
    is_up_to_date(nights, rows)


def test_a_plan_that_a_later_night_outdated_does_not_run_again(nights: Nights) -> None:
    nights.write(rows_of(6))
    nights.submit(prompt__template="Tell {{ text }}")
    nights.write(rows := edited(6, "a"))
    nights.submit(flags={"full_refresh": True})
    for part in nights.out.glob("*.parquet"):  # with them goes what tells of a later night
        part.unlink()
    (nights.out / "_SUCCESS").unlink()
    with pytest.raises(RunError, match="submit its job again"):
        join(nights.out, None, Silent())
    assert nights.submit().exit_code == 0
    is_up_to_date(nights, rows)


@pytest.mark.parametrize(
    ("num_rows", "tonight", "said"),
    [
        (20, edited(22, "b"), r"is of generation 1, .*_SUCCESS of an earlier one"),
        (21, edited(22, "b"), r"_SUCCESS says 20 rows, the parts hold 21: .* delete .*_SUCCESS and submit the job"),
        (21, edited(21, "a"), "_SUCCESS says 20 rows, the parts hold 21"),
    ],
    ids=["as many rows", "more rows", "nothing new"],
)
def test_totals_of_another_night_are_refused_before_anything_runs(
    nights: Nights, num_rows: int, tonight: list[dict[str, Any]], said: str
) -> None:
    nights.write(rows_of(20))
    nights.submit()
    old = (nights.out / "_SUCCESS").read_bytes()
    nights.write(edited(num_rows, "a"))
    nights.submit()
    (nights.out / "_SUCCESS").write_bytes(old)
    nights.write(rows := tonight)
    with pytest.raises(RunError, match=said):
        nights.submit()
    assert nights.ran == 0
    (nights.out / "_SUCCESS").unlink()
    nights.submit()
    is_up_to_date(nights, rows)


def test_a_copy_without_its_empty_folders_goes_on_like_the_run_itself(nights: Nights) -> None:
    def drop_empty_folders() -> None:
        for folder in sorted((nights.out / ".bulkrun").rglob("*"), reverse=True):  # the inner ones first
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    nights.write(rows_of(20))
    nights.refuse = lambda request: request.request_id == "3:0"
    nights.submit()
    run = RunDir(nights.out)
    (run.claims / "plan.1").unlink()  # the only file there: who planned leaves its claim
    drop_empty_folders()
    assert not run.claims.exists() and not run.tmp.exists()
    nights.write(edited(21, "a"))
    assert nights.submit().totals.rows == 21
    nights.refuse = lambda request: False
    drop_empty_folders()
    assert nights.retry().totals.errors == {}
    drop_empty_folders()
    compact(run, 5, grace_s=0)
    whole(nights)


def test_a_first_run_whose_copy_lacks_its_empty_folders_is_continued(nights: Nights) -> None:
    nights.write(rows_of(20))
    stop_at(nights, 0)
    with pytest.raises(KeyboardInterrupt):
        nights.submit()
    nights.refuse = lambda request: False
    run = RunDir(nights.out)
    for folder in (run.claims, run.journal, run.tmp):
        shutil.rmtree(folder)
    totals = nights.submit().totals
    assert (totals.rows, totals.generation) == (20, 0), "by its own plan"
    whole(nights)


def part_with_row(run: RunDir, row: int) -> Path:
    return next(path for path in run.parts().values() if row in pq.read_table(path)["row"].to_pylist())


def test_a_night_over_a_lost_part_is_refused_before_anything_runs(nights: Nights) -> None:
    nights.write(rows_of(20))
    nights.submit()
    nights.write(rows_of(20, start=10))  # the first ten vanish: their results are kept
    lost = part_with_row(RunDir(nights.out), 0)
    aside = lost.rename(nights.folder / "aside")
    success = (nights.out / "_SUCCESS").read_bytes()
    with pytest.raises(RunError, match="_SUCCESS says 20 rows, the parts hold"):
        nights.submit()
    assert nights.ran == 0 and (nights.out / "_SUCCESS").read_bytes() == success
    aside.rename(lost)
    nights.submit()
    assert set(nights.results()) == {row["id"] for row in rows_of(30)}
    whole(nights)


def test_rows_that_are_lost_while_a_night_runs_are_not_left_out_of_its_totals(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(20))
    nights.submit()
    nights.write(edited(20, "a"))
    untouched = [path for path in nights.out.glob("*.parquet") if min(pq.read_table(path)["row"].to_pylist()) >= 3]

    def lose_a_part(run: RunDir) -> list[int]:
        untouched[0].rename(nights.folder / "aside")
        return begin_merge(run)

    success = (nights.out / "_SUCCESS").read_bytes()
    with monkeypatch.context() as meanwhile, pytest.raises(RunError, match=r"hold \d+ rows instead of 20"):
        meanwhile.setattr(merge, "begin_merge", lose_a_part)
        nights.submit()
    assert (nights.out / "_SUCCESS").read_bytes() == success
    (nights.folder / "aside").rename(untouched[0])
    assert nights.submit().totals.rows == 20 and nights.ran == 0
    whole(nights)


def test_an_answer_whose_part_is_gone_is_not_dropped_in_silence(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(20))
    nights.submit()
    nights.write(rows := edited(20, "a"))

    def lose_a_part(run: RunDir) -> list[int]:
        part_with_row(run, 0).unlink()
        return begin_merge(run)

    with monkeypatch.context() as meanwhile, pytest.raises(RunError, match=r"row 0, .* is in no part.*_SUCCESS"):
        meanwhile.setattr(merge, "begin_merge", lose_a_part)
        nights.submit()
    (nights.out / "_SUCCESS").unlink()
    assert nights.submit().exit_code == 0
    is_up_to_date(nights, rows)

"""compact: fewer and larger parts, every row once at every moment, whole after a kill at any step."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.parts import PartInfo, write_groups
from bulkrun.data.results.query import run_query
from bulkrun.data.storage import exchange
from bulkrun.errors import RunError
from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.update import compact as compact_module
from bulkrun.job.update import rewrite
from bulkrun.job.update.cause import Retry
from bulkrun.job.update.compact import compact
from bulkrun.job.update.staging import Update, close_staging, discard, open_staging, staged_record
from bulkrun.job.update.update_claim import hold
from bulkrun.job.views.finished import finished_totals
from bulkrun.job.views.row_errors import read_row_errors
from bulkrun.job.views.status import read_status
from bulkrun.job.views.verify import verify_run
from tests.job.planned_runs import COUNT, spec_for, submit, write_input


def finished(folder: Path, **output: Any) -> RunDir:
    """A run of 140 rows in 20 or more parts."""
    path, _ = write_input(folder)
    submit(spec_for(path, folder / "out", rows_per_file=7, **output))
    return RunDir(folder / "out")


def contents(run: RunDir) -> list[dict[str, Any]]:
    """All result rows by a plain read of the files, sorted."""
    glob = f"{run.root}/**/*.parquet"
    rows = duckdb.sql(f"SELECT * FROM read_parquet('{glob}', hive_partitioning = true)").to_arrow_table().to_pylist()
    return sorted(rows, key=lambda row: (row["row"], row["sample"]))


def files(run: RunDir) -> dict[str, int]:
    return {str(path.relative_to(run.root)): path.stat().st_ino for path in run.root.rglob("*") if path.is_file()}


def test_parts_become_few_rows_come_in_input_order_and_nothing_else_changes(tmp_path: Path) -> None:
    run = finished(tmp_path)
    before, totals, num_parts = contents(run), read_totals(run), len(run.parts())
    done = compact(run, 50, grace_s=0)
    assert num_parts >= 20
    assert (done.parts_before, done.parts_after, done.rows, done.worked) == (num_parts, 3, COUNT, True)
    assert contents(run) == before
    paths = [path for _, path in sorted(RunDir(run.root).parts().items())]
    assert [pq.read_table(path)["row"].to_pylist() for path in paths] == [
        list(range(0, 50)),
        list(range(50, 100)),
        list(range(100, COUNT)),
    ]
    after = read_totals(run)
    assert totals and after and (after.parts, after.generation, after.updates[-1]["kind"]) == (3, 1, "compact")
    for name in ("status", "rows", "ok", "errors", "prompt_tokens", "completion_tokens", "run_id", "finished"):
        assert getattr(after, name) == getattr(totals, name)
    assert verify_run(run).ok
    assert [event["parts_after"] for event in read_events(run) if event["event"] == "compacted"] == [3]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_part_numbers_are_never_used_again_and_the_second_time_does_nothing(tmp_path: Path) -> None:
    run = finished(tmp_path)
    seen = set(run.parts())
    for rows_per_file, parts in [(60, 3), (30, 5), (1000, 1)]:
        assert compact(run, rows_per_file, grace_s=0).parts_after == parts
        assert not seen & set(RunDir(run.root).parts())
        seen |= set(RunDir(run.root).parts())
        state = files(run)
        assert not compact(run, rows_per_file, grace_s=0).worked
        assert {name: inode for name, inode in files(run).items() if "workers/" not in name} == {
            name: inode for name, inode in state.items() if "workers/" not in name
        }


def test_each_partition_is_compacted_in_its_own_folder(tmp_path: Path) -> None:
    run = finished(tmp_path, partition_by=["lang", "ok"])
    before = contents(run)
    folders = {path.parent for path in run.parts().values()}
    done = compact(run, grace_s=0)
    assert contents(run) == before and done.parts_after == len(folders)
    assert {path.parent for path in RunDir(run.root).parts().values()} == folders
    table = run_query(run.root, "SELECT row, lang, ok FROM results")
    assert table.schema.field("ok").type == "bool" and table.num_rows == COUNT


def test_verify_finds_all_well_and_a_part_in_the_wrong_folder(tmp_path: Path) -> None:
    run = finished(tmp_path, partition_by=["lang"])
    compact(run, grace_s=0)
    report = verify_run(RunDir(run.root))
    assert report.ok and report.finished and (report.parts, report.rows) == (7, COUNT)
    part = next(iter(RunDir(run.root).parts().values()))
    other = next(folder for folder in run.root.glob("lang=*") if folder != part.parent)
    part.rename(other / part.name)
    assert any("wrong folder" in problem for problem in verify_run(RunDir(run.root)).problems)


def test_parts_that_are_lost_or_too_many_are_told_without_advice_that_ends_the_run(tmp_path: Path) -> None:
    """What a message about lost rows says is done: without `_SUCCESS` such a run can only begin anew."""
    run = finished(tmp_path)
    part = next(iter(run.parts().values()))
    shutil.copy(part, run.part(98))
    with pytest.raises(RunError, match=r"says what does not belong there; move it away, or submit .* with --fresh"):
        finished_totals(run)
    run.part(98).unlink()
    kept = part.rename(tmp_path / part.name)
    with pytest.raises(RunError, match=r"what is missing; bring it back .*, or delete .*_SUCCESS and submit the job"):
        finished_totals(run)
    kept.rename(part)
    compact(run, 50, grace_s=0)
    run = RunDir(run.root)
    next(iter(run.parts().values())).unlink()
    with pytest.raises(RunError, match=r"what is missing; bring it .*, or submit .* --fresh; leave .*_SUCCESS there"):
        finished_totals(run)


def test_samples_of_a_row_stay_in_one_file_in_order(tmp_path: Path) -> None:
    path, _ = write_input(tmp_path)
    spec = spec_for(path, tmp_path / "out", rows_per_file=9)
    submit(spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"n": 3, "temperature": 1.0})}))
    run = RunDir(tmp_path / "out")
    before = contents(run)
    compact(run, 50, grace_s=0)
    assert contents(run) == before and len(before) == 3 * COUNT
    tables = [pq.read_table(path) for _, path in sorted(RunDir(run.root).parts().items())]
    assert [table.num_rows for table in tables] == [150, 150, 120]
    keys = [key for table in tables for key in zip(table["row"].to_pylist(), table["sample"].to_pylist(), strict=True)]
    assert keys == [(row, sample) for row in range(COUNT) for sample in range(3)]


def test_what_samples_cost_that_were_not_kept_is_still_counted(tmp_path: Path) -> None:
    path, _ = write_input(tmp_path)
    spec = spec_for(path, tmp_path / "out", rows_per_file=9)
    best = {"n": 1, "best_of": 3, "temperature": 1.0}
    submit(spec.model_copy(update={"sampling": spec.sampling.model_copy(update=best)}))
    run = RunDir(tmp_path / "out")
    before = read_status(run)
    assert before.completion_tokens > sum(row["completion_tokens"] or 0 for row in contents(run))
    compact(run, 50, grace_s=0)
    after, totals = read_status(RunDir(run.root)), read_totals(run)
    assert (after.prompt_tokens, after.completion_tokens) == (before.prompt_tokens, before.completion_tokens)
    assert totals is not None and totals.completion_tokens == after.completion_tokens


def test_a_file_is_cut_where_it_would_not_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path)
    before = contents(run)
    monkeypatch.setattr(compact_module, "MAX_FILE_BYTES", 1)
    monkeypatch.setattr("bulkrun.data.tables.in_order.HELD_BYTES", 1000)
    monkeypatch.setattr("bulkrun.data.tables.in_order.SLICE_ROWS", 16)
    done = compact(run, grace_s=0)
    assert contents(run) == before and 140 / 16 <= done.parts_after < 140


def test_a_compacted_run_is_finished_for_submit_status_errors_and_query(tmp_path: Path) -> None:
    path, _ = write_input(tmp_path)
    spec = spec_for(path, tmp_path / "out", rows_per_file=7)
    submit(spec)
    run = RunDir(tmp_path / "out")
    compact(run, grace_s=0)
    state = files(run)
    again = submit(spec)
    assert again.state == "completed" and files(run) == state
    assert read_status(run).state == "completed" and read_status(run).rows_done == COUNT
    assert read_row_errors(run).counts == {}


def test_files_that_are_not_results_come_along(tmp_path: Path) -> None:
    run = finished(tmp_path, partition_by=["lang"])
    (run.root / "notes.txt").write_text("mine")
    (run.root / "lang=en" / "README").write_text("also mine")
    (run.root / "elsewhere").symlink_to("/nowhere")
    run.root.chmod(0o750)
    compact(run, grace_s=0)
    assert (run.root / "notes.txt").read_text() == "mine" and (run.root / "lang=en" / "README").exists()
    assert (run.root / "elsewhere").is_symlink() and run.root.stat().st_mode & 0o777 == 0o750
    assert run.state.stat().st_mode & 0o777 == 0o700
    assert RunDir(run.root).planned_shards() == run.planned_shards() != set()


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    path, _ = write_input(tmp_path)
    submit(spec_for(path, tmp_path / "out"), should_stop=lambda: True)
    with pytest.raises(RunError, match="not finished; submit its job again first"):
        compact(RunDir(tmp_path / "out"))
    with pytest.raises(RunError, match="not a run"):
        compact(RunDir(tmp_path))


def test_what_is_left_of_a_retry_that_died_while_it_was_staged_is_no_retry(tmp_path: Path) -> None:
    run = finished(tmp_path)
    record = read_record(run)
    with hold(run):
        open_staging(run, staged_record(run, record, record.job))
    assert compact(run, grace_s=0).worked
    assert not run.staged.root.exists()


def test_a_run_with_an_update_under_way_or_a_live_worker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path)
    record, totals = read_record(run), read_totals(run)
    assert totals is not None
    update = Update(Retry(), totals.generation + 1, 1, COUNT, COUNT, len(run.parts()))
    with hold(run):
        open_staging(run, staged_record(run, record, record.job))
        close_staging(run, update, lambda path: path.touch(), lambda: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"^out: a retry or an incremental update is under way"):
        compact(RunDir(Path("out")))
    with hold(run):
        discard(run)
    with hold(run), pytest.raises(RunError, match="a worker is running here"):
        compact(run)
    assert compact(run, grace_s=0).worked


def test_a_file_system_without_exchange_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path)
    before = files(run)

    def refuse(one: Path, other: Path) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(exchange, "_exchange", refuse)
    with pytest.raises(RunError, match=r"cannot|can exchange two directories.*not NFS.*nothing was changed"):
        compact(run)
    assert files(run) == before and sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out"]


def test_a_damaged_part_or_a_row_that_is_there_twice_changes_nothing(tmp_path: Path) -> None:
    run = finished(tmp_path)
    last = run.parts()[max(run.parts())]
    copy = last.with_name("part-99999.parquet")
    copy.write_bytes(last.read_bytes())
    with pytest.raises(RunError, match=r"row \d+ appears twice; nothing was changed"):
        compact(run)
    copy.unlink()
    good = bytearray(last.read_bytes())
    good[100] ^= 1
    last.write_bytes(good)
    with pytest.raises(RunError, match="damaged"):
        compact(run)
    assert RunDir(run.root).parts() == run.parts()
    last.unlink()
    with pytest.raises(RunError, match=r"_SUCCESS counts rows 140, the parts hold 13\d; nothing was changed"):
        compact(run)


def test_a_full_disk_changes_nothing_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path)
    before, written = files(run), []

    def write_until_full(path: Path, *arguments: Any, **options: Any) -> PartInfo:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        return write_groups(path, *arguments, **options)

    monkeypatch.setattr(rewrite, "write_groups", write_until_full)
    with pytest.raises(RunError, match="No space left on device; free some space"):
        compact(run, 50)
    results = {name: inode for name, inode in files(run).items() if "workers/" not in name}
    assert results == {name: inode for name, inode in before.items() if "workers/" not in name}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out"]


def test_a_directory_of_somebody_else_in_the_way_is_not_removed(tmp_path: Path) -> None:
    run = finished(tmp_path)
    mine = tmp_path / ".out.compact" / "precious.txt"
    mine.parent.mkdir()
    mine.write_text("x")
    with pytest.raises(RunError, match="in the way, and not made by bulkrun"):
        compact(run)
    assert mine.read_text() == "x"


def test_without_its_totals_a_compacted_run_is_not_computed_again(tmp_path: Path) -> None:
    path, _ = write_input(tmp_path)
    spec = spec_for(path, tmp_path / "out", rows_per_file=7)
    submit(spec)
    compact(RunDir(tmp_path / "out"), grace_s=0)
    RunDir(tmp_path / "out").success.unlink()
    with pytest.raises(RunError, match="compacted or updated after its end; restore _SUCCESS"):
        submit(spec)


def test_a_plain_glob_shows_each_row_once_at_every_moment(tmp_path: Path) -> None:
    run = finished(tmp_path, partition_by=["lang"])
    seen: list[tuple[int, int]] = []
    refused: list[str] = []
    stop = threading.Event()

    def read() -> None:
        connection = duckdb.connect()
        while not stop.is_set():
            try:
                sql = f"SELECT count(*), count(DISTINCT id) FROM read_parquet('{run.root}/**/*.parquet')"
                seen.append(connection.execute(sql).fetchall()[0])
                seen.append((ds.dataset(run.root, partitioning="hive").to_table(["id"]).num_rows, COUNT))
            except (duckdb.IOException, FileNotFoundError) as error:
                refused.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for rows_per_file in [50, 10, 70, 5, 1000, 20]:
        compact(run, rows_per_file, grace_s=0.05)
    stop.set()
    reader.join()
    assert seen and set(seen) == {(COUNT, COUNT)}
    assert all("part-" in message or "No files" in message for message in refused), refused


CHILD = """
import os, sys
from pathlib import Path
from bulkrun.data.storage import exchange
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update import compact as module

left = int(sys.argv[2])

def counted(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return function(*args, **kwargs)
    return call

# Every system call by which names or bytes become durable, and every removal.
for name in ("fsync", "link", "mkdir", "unlink", "rmdir", "rename", "replace"):
    setattr(os, name, counted(getattr(os, name)))
exchange._exchange = counted(exchange._exchange)
module.compact(RunDir(Path(sys.argv[1])), 50, grace_s=0)
print("left", left)
"""


def test_an_old_probe_of_a_killed_compact_is_removed(tmp_path: Path) -> None:
    run = finished(tmp_path)
    old, young = (tmp_path / f".bulkrun-probe.{name}" for name in ("old", "young"))
    for probe in (old, young):
        (probe / "one").mkdir(parents=True)
    os.utime(old, (0, 0))
    compact(run, grace_s=0)
    assert [probe.exists() for probe in (old, young)] == [False, True]


def compact_killed_at(run: RunDir, step: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(run.root), str(step)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def check_killed_at(template: RunDir, folder: Path, step: int) -> int:
    """Kill a compact of a copy of `template` at a step, look, and compact again; the child's exit status."""
    subprocess.run(["cp", "-a", str(template.root), str(folder)], check=True)
    run = RunDir(folder)
    before = contents(run)
    child = compact_killed_at(run, step)
    assert child.returncode in (0, -signal.SIGKILL), child.stderr
    assert contents(run) == before, f"killed at step {step}"
    assert compact(run, 50, grace_s=0).parts_after == 3
    assert contents(run) == before and read_totals(run) is not None
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}")] == []
    return child.returncode


@pytest.mark.parametrize("share", [0.3, 0.75, 0.95])
def test_killed_at_a_step_the_run_is_whole_and_the_same_command_completes_it(tmp_path: Path, share: float) -> None:
    run = finished(tmp_path)
    subprocess.run(["cp", "-a", str(run.root), str(tmp_path / "counting")], check=True)
    steps = 10**6 - int(compact_killed_at(RunDir(tmp_path / "counting"), 10**6).stdout.split()[-1])
    assert check_killed_at(run, tmp_path / "copy", int(share * steps)) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_step_the_run_is_whole_and_the_same_command_completes_it(tmp_path: Path) -> None:
    run, step = finished(tmp_path), 1
    while check_killed_at(run, tmp_path / f"copy{step}", step):
        step += 1
    assert step > 50

"""Views of a run on a disk that fails: the file is named, nothing is called damaged, and no half export stays."""

from __future__ import annotations

import errno
import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage import durable
from bulkrun.errors import RunError
from bulkrun.job.plan.shard_file import read_shard
from bulkrun.job.store.events import log_event, read_events
from bulkrun.job.store.journal import read_journal
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.logs import worker_logs
from tests.failing_disk import unreadable
from tests.job.small_runs import job, make_rows, start
from tests.job.views.test_export import export


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    start(tmp_path / "run", make_rows(20), job(tmp_path / "run"))
    return RunDir(tmp_path / "run")


def test_events_logs_and_journals_that_cannot_be_read_are_named(run: RunDir) -> None:
    run.logs.mkdir(exist_ok=True)
    (run.logs / "a.log").write_text("a")
    stat, whole = Path.stat, (run.logs / "a.log").stat()
    with pytest.raises(OSError, match=f"Input/output error: '{run.events}'"):
        unreadable(run.events)
        list(read_events(run))
    with pytest.raises(OSError, match=r"Input/output error: '.*/shard-1.jsonl'"):
        read_journal(unreadable(run.journal / "shard-1.jsonl"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match=r"Input/output error: '.*/a.log'"):
        unreadable(run.logs / "a.log")
        patch.setattr(
            Path, "stat", lambda path, **how: whole if path.suffix == ".log" else stat(path, **how)
        )  # or it has no size
        list(worker_logs(run, 5))


def test_a_shard_that_cannot_be_read_needs_no_fresh_start(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(RunError, match=r"round: reading failed: Too many levels.*run the same command again"):
        read_shard(tmp_path / "round")


def test_an_event_that_cannot_be_written_ends_nothing(run: RunDir) -> None:
    run.events.unlink()
    run.events.mkdir()
    log_event(run, "worker", "joined")


@pytest.mark.parametrize("format_", ["openai", "jsonl", "parquet"])
def test_an_export_whose_last_steps_fail_leaves_nothing_and_can_be_repeated(
    format_: Any, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"fsync": os.fsync, "replace": os.replace, "fsync_dir": durable.fsync_dir}
    for name, function in calls.items():
        for number in (1, 2) if format_ == "openai" else (1,):
            left = iter([None] * (number - 1))

            def fail(*given: Any, left: Any = left, function: Any = function) -> Any:
                if next(left, "now") == "now":
                    raise OSError(errno.EIO, "no")
                return function(*given)

            with monkeypatch.context() as patch:
                patch.setattr(durable if name == "fsync_dir" else os, name, fail)
                if name == "replace":
                    patch.setattr(Path, "replace", lambda path, target, fail=fail: fail(path, target))
                with pytest.raises(RunError, match=r"out.*Input/output error; .*run the same command again"):
                    export(run, format_, tmp_path / "out")
            assert [path.name for path in tmp_path.iterdir()] == ["run"], (name, number)
    export(run, format_, tmp_path / "out")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # what a finalizer could not say
def test_a_parquet_export_of_a_damaged_part_ends_with_its_error_alone(run: RunDir, tmp_path: Path) -> None:
    part = run.parts()[0]
    data = bytearray(part.read_bytes())
    data[random.Random(1).randrange(4, 40)] ^= 0xFF
    part.write_bytes(data)
    with pytest.raises(RunError, match="damaged"):
        export(run, "parquet", tmp_path / "out")
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

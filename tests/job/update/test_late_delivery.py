"""A finished run is brought into its bucket by somebody while nobody changes it, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage.durable import make_dirs, replace_json
from bulkrun.errors import RunError
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.workers import read_workers
from bulkrun.job.update.cause import Retry
from bulkrun.job.update.compact import compact
from bulkrun.job.update.late_delivery import deliver_late
from bulkrun.job.update.staging import Update, begin_merge
from bulkrun.job.update.update_claim import hold, kept_unchanged
from bulkrun.job.work.delivery import is_delivered
from tests.job.bucket_runs import start_bucket_run
from tests.s3_server import Bucket


@pytest.fixture
def behind(bucket: Bucket, tmp_path: Path) -> tuple[RunDir, RunRecord]:
    """A finished run of three parts, of which the bucket holds one and the run does not know which."""
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")
    for name in ("_SUCCESS", "part-00001.parquet", "part-00002.parquet"):
        bucket.files.rm_file(f"{bucket.name}/out/{name}")
    run.delivered.unlink()
    return run, read_record(run)


def never() -> bool:
    return False


def test_what_is_missing_is_brought_and_counted_and_then_the_store_is_asked_nothing(
    behind: tuple[RunDir, RunRecord], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, record = behind
    assert deliver_late(run, record, never) == 2
    assert is_delivered(run) and len(bucket.list("out/")) == 5
    monkeypatch.setattr(ObjectPrefix, "list", None)
    assert deliver_late(run, record, never) is None


def test_a_compact_beside_an_upload_is_refused_and_no_old_part_comes_after_it(
    behind: tuple[RunDir, RunRecord], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, record = behind
    put_new, refused = ObjectPrefix.put_new, []

    def slow(self: ObjectPrefix, *args: Any) -> bool:
        with pytest.raises(RunError, match="a worker is running here") as error:
            compact(run, grace_s=0.0)
        refused.append(error)
        return put_new(self, *args)

    monkeypatch.setattr(ObjectPrefix, "put_new", slow)
    assert deliver_late(run, record, never) == len(refused) == 2
    monkeypatch.setattr(ObjectPrefix, "put_new", put_new)
    assert compact(run, grace_s=0.0).worked
    (part,) = RunDir(run.root).parts()
    assert [key for key in bucket.list("out/") if "part" in key] == [f"out/part-{part:05d}.parquet"]


def test_nothing_is_brought_beside_a_change(behind: tuple[RunDir, RunRecord], bucket: Bucket) -> None:
    run, record = behind
    before = bucket.list()
    with hold(run), pytest.raises(RunError, match="a worker is running here"):
        deliver_late(run, record, never)
    assert bucket.list() == before
    assert deliver_late(run, record, never) == 2


def test_results_that_a_kill_left_half_changed_are_not_brought(
    behind: tuple[RunDir, RunRecord], bucket: Bucket
) -> None:
    run, record = behind
    before = bucket.list()
    make_dirs(run.staged.state)
    replace_json(run.staged.update, Update(Retry(), 1, 1, 24, 24, 3).to_json())
    begin_merge(run)
    with pytest.raises(RunError, match=r"being put into the results: `bulkrun retry .*` finishes that"):
        deliver_late(run, record, never)
    assert bucket.list() == before


def test_a_change_that_is_only_computed_keeps_nothing_back(behind: tuple[RunDir, RunRecord]) -> None:
    run, record = behind
    make_dirs(run.staged.state)
    replace_json(run.staged.update, Update(Retry(), 1, 1, 24, 24, 3).to_json())
    assert deliver_late(run, record, never) == 2


def test_a_change_sees_who_came_after_its_first_look(
    behind: tuple[RunDir, RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two look for each other at once: at least one of them must see the other."""
    run, _ = behind
    keeper = kept_unchanged(run)

    def between(*_: object) -> None:
        keeper.__enter__()

    monkeypatch.setattr("bulkrun.job.update.update_claim._forget_the_dead", between)
    with pytest.raises(RunError, match="a worker is running here"), hold(run):
        pytest.fail("changed beside a keeper")
    keeper.__exit__(None, None, None)
    assert not list(run.claims.glob("update.*"))


def test_several_may_bring_the_same(behind: tuple[RunDir, RunRecord]) -> None:
    run, record = behind
    with kept_unchanged(run):
        assert deliver_late(run, record, never) == 2


def test_the_heartbeats_of_those_who_brought_something_go_with_the_next_change(
    behind: tuple[RunDir, RunRecord],
) -> None:
    run, record = behind
    deliver_late(run, record, never)
    assert "keeper" in [state.role for state in read_workers(run)]
    with hold(run):
        assert "keeper" not in [state.role for state in read_workers(run)]

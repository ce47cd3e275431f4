"""What status, watch and verify say of a finished run whose bucket lacks something; that what they advise mends it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from bulkrun.errors import RunError
from bulkrun.job.store.heartbeat import present
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from bulkrun.job.update.compact import compact
from bulkrun.job.views.listing import statuses
from bulkrun.job.views.status import read_status
from bulkrun.job.views.verify import verify_run
from bulkrun.job.views.watch import watch_run
from bulkrun.job.work.delivery import _Delivery
from bulkrun.launch.runs.run import join
from tests.job.bucket_runs import start_bucket_run
from tests.launch.nights import Silent
from tests.s3_server import Bucket

PART = "out/part-00001.parquet"


@pytest.fixture
def run(bucket: Bucket, tmp_path: Path) -> RunDir:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    return RunDir(tmp_path / "s")


def remove(bucket: Bucket, key: str) -> None:
    bucket.files.rm_file(f"{bucket.name}/{key}")


def follow(run: RunDir, advice: str) -> int | None:
    """Do what a message says between backquotes; how many parts that uploaded."""
    assert f"bulkrun worker {run.root}" in advice
    return join(run.root, None, Silent()).uploaded


def test_a_whole_bucket_is_well(run: RunDir) -> None:
    assert verify_run(run).ok and read_status(run).state == "completed_with_errors"
    run.success.unlink()
    assert verify_run(run).ok, "of a run that is not finished nothing has to be there"


def test_a_run_that_could_not_be_delivered_says_so_everywhere(run: RunDir, bucket: Bucket) -> None:
    remove(bucket, PART)
    remove(bucket, "out/_SUCCESS")
    run.delivered.unlink()
    status = read_status(run)
    assert (status.state, status.next_command) == ("undelivered", f"bulkrun worker {run.root}")
    assert status.message == f"all rows are done, but not all results are in {bucket.url('out')}"
    assert [found.state for found in statuses(run.root.parent)] == ["undelivered"]
    (problem,) = verify_run(run).problems
    assert problem.startswith(f"{bucket.url('out')}: not all results are there yet")
    follow(run, problem)
    assert verify_run(run).ok and read_status(run).state == "completed_with_errors" and PART in bucket.list()


def test_while_somebody_uploads_the_run_is_not_done_and_watch_stays(run: RunDir) -> None:
    run.delivered.rename(run.root / "ledger")
    with present(run, Worker.this_process(), "keeper"):
        status = read_status(run)
        assert status.state == "running" and "are being uploaded" in str(status.message)
        seen = watch_run(run)
        next(seen), next(seen)
        (run.root / "ledger").rename(run.delivered)
        assert list(seen) == []


@pytest.mark.parametrize(("key", "parts"), [(PART, 1), ("out/_SUCCESS", 0)])
def test_what_somebody_removed_from_the_bucket_is_found_and_brought_again(
    run: RunDir, bucket: Bucket, key: str, parts: int
) -> None:
    whole = bucket.list()
    remove(bucket, key)
    (problem,) = verify_run(run).problems
    assert f"1 of 4 objects are not there ({key.removeprefix('out/')}): `bulkrun worker" in problem
    assert follow(run, problem) == parts
    assert bucket.list() == whole and verify_run(run).ok
    assert follow(run, problem) is None


def test_what_brings_it_again_may_be_broken_off_and_the_parts_change_then(
    run: RunDir, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(bucket, PART)
    (problem,) = verify_run(run).problems
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_Delivery, "put_all", Mock(side_effect=KeyboardInterrupt))
        follow(run, problem)
    assert compact(run, grace_s=0).worked
    assert verify_run(run).ok and len([key for key in bucket.list() if ".parquet" in key]) == 1


def test_what_somebody_put_over_a_part_or_beside_the_parts_is_found(run: RunDir, bucket: Bucket) -> None:
    whole = {key: bucket.get(key) for key in bucket.list()}
    bucket.put(PART, b"mine")
    bucket.put("out/copy.parquet", b"mine")
    bucket.put("out/README.md", b"mine")
    bucket.put("out/_SUCCESS", b"{}")
    beside, success, over, advice = verify_run(run).problems
    assert success == f"{bucket.url('out/_SUCCESS')}: another program put this; move it away"
    assert beside == f"{bucket.url('out')}/copy.parquet: not a part of this run; move it away"
    assert over == f"{bucket.url(PART)}: another program put this; move it away"
    for key in ("out/copy.parquet", "out/_SUCCESS", PART, "out/README.md"):
        remove(bucket, key)
    follow(run, advice)
    assert {key: bucket.get(key) for key in bucket.list()} == whole and verify_run(run).ok


def test_a_bucket_that_does_not_answer_is_not_said_to_be_well(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.job.store.object_store.ObjectPrefix.list", refuse)
    assert "ExpiredToken" in verify_run(run).problems[0]


def refuse(*_: object) -> None:
    raise RunError("s3://b/out: listing failed: ExpiredToken")

"""Parts on their way into the bucket while the run goes on: what fails is tried again, told, and in nobody's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage import patience
from bulkrun.job.store.events import read_events
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.work.uploads import Uploads
from tests.job.bucket_runs import start_bucket_run
from tests.s3_server import Bucket
from tests.waiting import wait_until

PARTS = [f"out/part-{number:05d}.parquet" for number in range(3)]


@pytest.fixture
def run(bucket: Bucket, tmp_path: Path) -> RunDir:
    """One whose parts an earlier attempt published, and whose bucket holds none of them."""
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    for key in PARTS:
        bucket.files.rm_file(f"{bucket.name}/{key}")
    return RunDir(tmp_path / "s")


def failures(run: RunDir) -> list[str]:
    return [event["reason"] for event in read_events(run) if event["event"] == "upload_failed"]


def put_failing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    left, put = iter(range(times)), ObjectPrefix._put

    def failing(self: ObjectPrefix, *args: Any) -> None:
        if next(left, None) is not None:
            raise ConnectionResetError
        put(self, *args)

    monkeypatch.setattr(ObjectPrefix, "_put", failing)


def test_parts_of_earlier_attempts_come_first_however_often_the_store_fails(
    run: RunDir, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    put_failing(monkeypatch, 3)
    uploads = Uploads(run, read_record(run), "me")
    uploads.start()
    wait_until(lambda: set(PARTS) <= set(bucket.list()), "the parts", 30)
    uploads.stop()
    assert len(failures(run)) == 3 and all(".parquet: uploading failed" in told for told in failures(run))


def test_a_part_of_this_worker_is_put_however_often_the_store_fails(
    run: RunDir, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(ObjectPrefix, "list", lambda _: {path.name: "" for path in run.parts().values()})
    put_failing(monkeypatch, 3)
    uploads = Uploads(run, read_record(run), "me")
    uploads.start()
    uploads.add(run.part(1))
    wait_until(lambda: PARTS[1] in bucket.list(), "the part", 30)
    uploads.stop()
    assert len(failures(run)) == 3


def test_a_store_that_fails_does_not_keep_a_worker_that_ends(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 1000.0)
    put_failing(monkeypatch, 10**6)
    uploads = Uploads(run, read_record(run), "me")
    uploads.start()
    wait_until(lambda: failures(run), "a failure", 30)
    uploads.stop()
    assert not uploads._thread.is_alive()

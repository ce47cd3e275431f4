from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset
import pyarrow.fs
import pytest

from bulkrun.data.results.parts import read_part_info, write_part
from bulkrun.data.storage import patience
from bulkrun.errors import Interrupted, ResumeError, RunError, UsageError
from bulkrun.job.store.object_store import ObjectPrefix, is_transient
from bulkrun.job.store.places import find_run
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.update.compact import compact
from bulkrun.job.work import delivery
from bulkrun.job.work.delivery import deliver, is_delivered
from tests.job.bucket_runs import ROWS, bucket_job, bucket_results, start_bucket_run
from tests.job.small_runs import enter, oracle, start
from tests.s3_server import SECRET, Bucket

ORACLE = oracle(ROWS, bucket_job("s3://b/p", Path("state")))
PARTS = [f"out/part-{number:05d}.parquet" for number in range(3)]
WHOLE = sorted(["out/_SUCCESS", "out/_bulkrun.json", *PARTS])


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)


def forget(folder: Path) -> None:
    """As if the ledger's last write had not reached the disk."""
    RunDir(folder).delivered.unlink()


def test_results_are_in_the_bucket_each_row_exactly_once_and_success_is_there(bucket: Bucket, tmp_path: Path) -> None:
    outcome = start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert outcome.state == "completed_with_errors"
    assert bucket.list() == WHOLE
    assert bucket_results(bucket, "out") == ORACLE
    assert json.loads(bucket.get("out/_SUCCESS")) == json.loads((tmp_path / "s/_SUCCESS").read_bytes())
    assert json.loads(bucket.get("out/_bulkrun.json"))["state"] == str(tmp_path / "s")


def test_success_is_put_after_every_part(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    put = ObjectPrefix.put

    def watched(self: ObjectPrefix, path: Path, name: str, nonce: str) -> None:
        seen.append([name, *bucket.list()])
        put(self, path, name, nonce)

    monkeypatch.setattr(ObjectPrefix, "put", watched)
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert seen == [["_SUCCESS", "out/_bulkrun.json", *PARTS]]


def test_other_tools_read_the_results_where_they_are(bucket: Bucket, s3_endpoint: str, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    remote = pyarrow.fs.S3FileSystem(endpoint_override=s3_endpoint.removeprefix("http://"), scheme="http")
    table = pyarrow.dataset.dataset(f"{bucket.name}/out", filesystem=remote, format="parquet").to_table()
    assert sorted(table["row"].to_pylist()) == [row["row"] for row in ORACLE]
    connection = duckdb.connect()
    connection.register_filesystem(bucket.files)
    query = f"SELECT count(*), count(DISTINCT row) FROM '{bucket.url('out')}/*.parquet'"
    assert connection.execute(query).fetchall() == [(24, 24)]


def test_a_finished_run_submitted_again_asks_the_store_nothing(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    bucket.files.clear_instance_cache()
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).totals is not None


def test_a_kill_at_any_step_around_the_upload_leaves_every_row_exactly_once(bucket: Bucket, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.job.bucket_runs", str(tmp_path), bucket.url("k")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps > 14  # each of which killed one run
    for step in range(steps):
        keys = [key.removeprefix(f"k/{step}/") for key in bucket.list(f"k/{step}/")]
        assert keys == [key.removeprefix("out/") for key in WHOLE], step
        assert bucket_results(bucket, f"k/{step}") == ORACLE, step


def test_parts_go_to_the_bucket_while_the_run_goes_on(bucket: Bucket, tmp_path: Path) -> None:
    from tests.job.fake_engine import FakeEngine

    def stop() -> bool:
        return PARTS[-1] in bucket.list("out/")

    outcome = start_bucket_run(tmp_path / "s", bucket.url("out"), should_stop=stop, engine=FakeEngine(step_s=0.02))
    assert outcome.state in ("interrupted", "completed_with_errors")
    assert set(bucket.list("out/")) & set(PARTS)
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).state == "completed_with_errors"
    assert bucket_results(bucket, "out") == ORACLE


def test_a_store_that_fails_for_a_while_costs_only_time(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = "SlowDown SlowDownWrite InternalError 503 TooManyRequests ConditionalRequestConflict RequestTimeout"
    failures = iter(codes.split())
    put = ObjectPrefix._put

    def failing(self: ObjectPrefix, *args: Any) -> None:
        if code := next(failures, None):
            raise OSError("sorry") from refused(code)
        put(self, *args)

    monkeypatch.setattr(ObjectPrefix, "_put", failing)
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).state == "completed_with_errors"
    assert bucket.list() == WHOLE and bucket_results(bucket, "out") == ORACLE


_STATUS = {
    "ConditionalRequestConflict": 409,
    "EntityTooLarge": 400,
    "ExpiredToken": 400,
    "InternalError": 500,
    "NotImplemented": 501,
    "RequestTimeout": 400,
    "TooManyRequests": 429,
}  # of the codes that are not sent with 503


def refused(code: str) -> Exception:
    from botocore.exceptions import ClientError

    return ClientError(
        {
            "Error": {"Code": code, "Message": f"no, {SECRET}"},
            "ResponseMetadata": {"HTTPStatusCode": _STATUS.get(code, 503)},
        },
        "PutObject",
    )


@pytest.mark.parametrize(
    ("code", "transient"), [("SlowDownRead", True), ("XMinioBackendDown", True), ("502", True)]
    + [(code, False) for code in ("NotImplemented", "ExpiredToken", "EntityTooLarge")],
)  # fmt: skip
def test_a_store_that_cannot_at_the_moment_is_told_from_one_that_never_will(code: str, transient: bool) -> None:
    error = RunError("no")
    error.__cause__ = refused(code)
    assert is_transient(error) is transient


def test_a_network_that_is_away_for_a_while_costs_only_time(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

    failures = iter([EndpointConnectionError, ReadTimeoutError] * 3)
    put = ObjectPrefix._put

    def failing(self: ObjectPrefix, *args: Any) -> None:
        if kind := next(failures, None):
            raise kind(endpoint_url="http://store")
        put(self, *args)

    monkeypatch.setattr(ObjectPrefix, "_put", failing)
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).state == "completed_with_errors"
    assert bucket.list() == WHOLE and bucket_results(bucket, "out") == ORACLE


def test_a_store_that_refuses_ends_the_run_after_all_rows_are_safe_and_the_next_start_goes_on(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ObjectPrefix, *args: Any) -> None:
        raise PermissionError("no") from refused("ExpiredToken")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPrefix, "_put", refuse)
        with pytest.raises(RunError, match=r"part-00000\.parquet: uploading failed.*ExpiredToken") as raised:
            start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert SECRET not in str(raised.value)
    assert not RunDir(tmp_path / "s").success.exists() and len(RunDir(tmp_path / "s").parts()) == 3
    assert SECRET not in (tmp_path / "s/.bulkrun/events.jsonl").read_text()
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).state == "completed_with_errors"
    assert bucket_results(bucket, "out") == ORACLE


def test_a_lost_reply_of_a_put_is_not_a_failure(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ObjectPrefix._put
    lost: set[str] = set()

    def losing(self: ObjectPrefix, path: Path, name: str, *args: Any) -> None:
        put(self, path, name, *args)
        if name not in lost:
            lost.add(name)
            raise OSError("connection reset") from refused("InternalError")

    monkeypatch.setattr(ObjectPrefix, "_put", losing)
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).state == "completed_with_errors"
    assert bucket_results(bucket, "out") == ORACLE and len(lost) == 4


def test_being_told_to_stop_while_the_store_fails_ends_it_soon(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    forget(tmp_path / "s")
    run, record = RunDir(tmp_path / "s"), read_record(RunDir(tmp_path / "s"))
    stop = threading.Event()

    def fail(self: ObjectPrefix) -> dict[str, str]:
        stop.set()
        raise RunError("no answer") from refused("SlowDown")

    def sleep(_: float) -> None:
        raise AssertionError("a pause goes on")

    monkeypatch.setattr(ObjectPrefix, "list", fail)
    monkeypatch.setattr(delivery.time, "sleep", sleep)
    with pytest.raises(Interrupted, match=r"whole in .*run the same command again"):
        deliver(run, record, stop.is_set)


@pytest.mark.parametrize("key", ["out/other.parquet", "out/README.md", "out/part-00000.parquet"])
def test_a_prefix_with_somebody_elses_objects_is_refused_before_anything_runs(
    bucket: Bucket, tmp_path: Path, key: str
) -> None:
    bucket.put(key, b"mine")
    with pytest.raises(UsageError, match="holds objects that do not belong to a run"):
        enter(tmp_path / "s", bucket_job(bucket.url("out"), tmp_path / "s"))
    assert not (tmp_path / "s").exists() and bucket.list() == [key] and bucket.get(key) == b"mine"


def test_a_neighbour_that_begins_alike_is_not_in_the_way(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("out2/other.parquet", b"mine")
    bucket.put("output", b"mine")
    bucket.put("out", b"mine")
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert bucket.list("out/") == WHOLE and bucket.get("out") == b"mine"


def test_an_empty_object_that_stands_for_the_folder_is_nobodys(bucket: Bucket, tmp_path: Path) -> None:
    for folder in ("out/", "out/lang=en/"):
        bucket.put(folder, b"")
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).state == "completed_with_errors"
    assert bucket_results(bucket, "out") == ORACLE


def test_a_prefix_of_another_run_is_refused_with_where_that_run_is(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    with pytest.raises(ResumeError, match=f"another run.*{tmp_path / 's'}"):
        enter(tmp_path / "t", bucket_job(bucket.url("out"), tmp_path / "t"))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("first", ["pre", "pre/run", ""])
def test_a_prefix_inside_another_runs_is_refused_with_the_name_of_that_one(
    bucket: Bucket, tmp_path: Path, first: str
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url(first))
    before = bucket.list()
    with pytest.raises(UsageError, match=rf"lies in the results of another run \({bucket.url(first).rstrip('/')}\)"):
        enter(tmp_path / "t", bucket_job(bucket.url("pre/run/x/y"), tmp_path / "t"))
    assert not (tmp_path / "t").exists() and bucket.list() == before
    if first:
        enter(tmp_path / "t", bucket_job(bucket.url("pre2/run/x/y"), tmp_path / "t"))


def test_a_parent_is_looked_at_until_the_store_has_time_for_it(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("pre"))
    failures, head = iter(range(2)), ObjectPrefix._head

    def failing(self: ObjectPrefix, name: str) -> dict[str, Any]:
        if next(failures, None) is not None:
            raise RunError("no time") from refused("SlowDown")
        return head(self, name)

    monkeypatch.setattr(ObjectPrefix, "_head", failing)
    with pytest.raises(UsageError, match="lies in the results of another run"):
        enter(tmp_path / "t", bucket_job(bucket.url("pre/run"), tmp_path / "t"))
    assert not (tmp_path / "t").exists() and not list(failures)


@pytest.mark.parametrize("outer", ["pre", ""])
def test_a_prefix_around_another_runs_is_refused_with_the_name_of_that_one(
    bucket: Bucket, tmp_path: Path, outer: str
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("pre/run"))
    with pytest.raises(UsageError, match=rf"has another run's results in it \({bucket.url('pre/run')}\)"):
        enter(tmp_path / "t", bucket_job(bucket.url(outer), tmp_path / "t"))


def test_a_parent_that_may_not_be_looked_at_is_nobodys(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(bucket.files)._call_s3

    async def call(files: Any, method: str, *args: Any, **options: Any) -> Any:
        if method == "head_object" and not options["Key"].startswith("mine/"):
            raise PermissionError("Forbidden")
        return await real(files, method, *args, **options)

    monkeypatch.setattr(type(bucket.files), "_call_s3", call)
    enter(tmp_path / "s", bucket_job(bucket.url("mine/out"), tmp_path / "s"))
    assert bucket.list() == ["mine/out/_bulkrun.json"]


def unfinished(folder: Path, url: str, bucket: Bucket) -> RunDir:
    """As if the last shard were not done yet."""
    start_bucket_run(folder, url)
    run = RunDir(folder)
    run.parts()[2].unlink()
    run.success.unlink()
    for key in ("out/_SUCCESS", PARTS[2]):
        bucket.files.rm_file(f"{bucket.name}/{key}")
    return run


def test_an_unfinished_run_puts_its_name_again_beside_its_results(bucket: Bucket, tmp_path: Path) -> None:
    unfinished(tmp_path / "s", bucket.url("out"), bucket)
    bucket.files.rm_file(f"{bucket.name}/out/_bulkrun.json")
    bucket.put("out/other.parquet", b"mine")
    with pytest.raises(UsageError, match=r"\(other.parquet\) and no _bulkrun.json; move them away, then run it again"):
        start_bucket_run(tmp_path / "s", bucket.url("out"))
    bucket.files.rm_file(f"{bucket.name}/out/other.parquet")
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert bucket.list() == WHOLE and bucket_results(bucket, "out") == ORACLE


@pytest.mark.parametrize("named", [True, False])
def test_a_part_that_was_damaged_and_is_made_again_takes_the_place_of_the_one_that_was_brought(
    bucket: Bucket, tmp_path: Path, named: bool
) -> None:
    """What `verify` advises, whether or not somebody deleted the name of the run too."""
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")
    run.parts()[2].unlink()
    run.success.unlink()
    if not named:
        bucket.files.rm_file(f"{bucket.name}/out/_bulkrun.json")
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert bucket.list() == WHOLE and bucket_results(bucket, "out") == ORACLE
    assert bucket.get(PARTS[2]) == run.part(2).read_bytes()


def test_a_run_whose_prefix_is_another_runs_by_now_puts_nothing_there(bucket: Bucket, tmp_path: Path) -> None:
    unfinished(tmp_path / "s", bucket.url("out"), bucket)
    bucket.put("out/_bulkrun.json", json.dumps({"run_id": "x", "state": "/theirs", "host": "node7"}).encode())
    before = {key: bucket.get(key) for key in bucket.list()}
    with pytest.raises(ResumeError, match=r"another run \(x\), whose state is in /theirs on node7"):
        start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert {key: bucket.get(key) for key in bucket.list()} == before


@pytest.mark.parametrize(("owner", "said"), [(b"{", "not JSON"), (b"[]", "not a JSON object")])
def test_an_owner_that_another_program_wrote_is_told_by_its_name(
    bucket: Bucket, tmp_path: Path, owner: bytes, said: str
) -> None:
    bucket.put("out/_bulkrun.json", owner)
    with pytest.raises(RunError, match=rf"out/_bulkrun\.json: {said}.*another program wrote it"):
        enter(tmp_path / "s", bucket_job(bucket.url("out"), tmp_path / "s"))


def test_a_run_that_has_planned_nothing_takes_another_job_in_its_own_bucket(bucket: Bucket, tmp_path: Path) -> None:
    spec = bucket_job(bucket.url("out"), tmp_path / "s")
    enter(tmp_path / "s", spec)
    enter(tmp_path / "s", spec.with_keys(sampling={"max_tokens": 3}))
    assert read_record(RunDir(tmp_path / "s")).job["sampling"]["max_tokens"] == 3


def test_a_run_that_moved_says_in_the_bucket_where_it_is_now(bucket: Bucket, tmp_path: Path) -> None:
    unfinished(tmp_path / "s", bucket.url("out"), bucket).root.rename(tmp_path / "moved")
    start_bucket_run(tmp_path / "moved", bucket.url("out"))
    assert json.loads(bucket.get("out/_bulkrun.json"))["state"] == str(tmp_path / "moved")
    assert find_run(bucket.url("out")).root == tmp_path / "moved"


def test_the_same_prefix_with_a_slash_is_the_same_run(bucket: Bucket, tmp_path: Path) -> None:
    unfinished(tmp_path / "s", bucket.url("out"), bucket)
    assert start_bucket_run(tmp_path / "s", bucket.url("out/")).state == "completed_with_errors"
    assert bucket.list() == WHOLE and bucket_results(bucket, "out") == ORACLE


def test_the_state_of_one_bucket_is_not_taken_for_another(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    with pytest.raises(ResumeError, match="holds the state of the results in"):
        enter(tmp_path / "s", bucket_job(bucket.url("elsewhere"), tmp_path / "s"))


def test_fresh_moves_no_objects_and_says_so(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    spec = bucket_job(bucket.url("out"), tmp_path / "s")
    with pytest.raises(ResumeError, match="--fresh moves directories aside, not objects"):
        enter(tmp_path / "s", spec, fresh=True)
    assert RunDir(tmp_path / "s").success.exists()
    for key in bucket.list("out/"):
        bucket.files.rm_file(f"{bucket.name}/{key}")
    start(tmp_path / "s", ROWS, spec, shard_rows=8) if enter(tmp_path / "s", spec, fresh=True) else None
    assert bucket.list() == WHOLE


def test_a_missing_bucket_is_named_before_anything_runs(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such bucket"):
        enter(tmp_path / "s", bucket_job("s3://no-such-bucket-here/out", tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_a_store_without_conditional_puts_is_refused_each_time_before_anything_runs(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignoring = type(bucket.files).call_s3

    def call_s3(self: Any, *args: Any, IfNoneMatch: str = "", **options: Any) -> Any:
        return ignoring(self, *args, **options)

    monkeypatch.setattr(type(bucket.files), "call_s3", call_s3)
    for _ in range(2):
        with pytest.raises(RunError, match="does not support `If-None-Match"):
            enter(tmp_path / "s", bucket_job(bucket.url("out"), tmp_path / "s"))


def test_anothers_object_under_a_parts_name_is_never_overwritten(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = bucket_job(bucket.url("out"), tmp_path / "s")
    enter(tmp_path / "s", spec)
    bucket.put(PARTS[1], b"mine")
    with pytest.raises(RunError, match=r"part-00001\.parquet: another program put this"):
        start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert bucket.get(PARTS[1]) == b"mine" and "out/_SUCCESS" not in bucket.list()


def test_anothers_parquet_among_the_results_is_reported_not_removed(bucket: Bucket, tmp_path: Path) -> None:
    enter(tmp_path / "s", bucket_job(bucket.url("out"), tmp_path / "s"))
    bucket.put("out/copy.parquet", b"mine")
    with pytest.raises(RunError, match=r"copy\.parquet: not a part of this run"):
        start_bucket_run(tmp_path / "s", bucket.url("out"))
    assert bucket.get("out/copy.parquet") == b"mine"


def new_generation(run: RunDir, keep: set[int]) -> None:
    """Change a finished run as an update does: other contents for part 1, parts not in `keep` gone, new totals."""
    from dataclasses import replace

    import pyarrow as pa

    from bulkrun.data.results.parts import read_part_columns

    for shard, path in run.parts().items():
        if shard not in keep:
            path.unlink()
    table = pa.concat_tables(read_part_columns(run.part(1)))
    info = replace(read_part_info(run.part(1)), attempt="new", generation=1)
    write_part(run.tmp / "new.tmp", table, info)
    (run.tmp / "new.tmp").replace(run.part(1))
    totals = json.loads(run.success.read_bytes())
    run.success.write_text(json.dumps({**totals, "generation": 1, "nonce": "new"}))


def test_a_later_generation_that_is_refused_leaves_the_old_one_whole(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")
    new_generation(run, {1})
    bucket.put("out/copy.parquet", b"mine")
    before = {key: bucket.get(key) for key in bucket.list()}
    with pytest.raises(RunError, match=r"copy\.parquet: not a part of this run"):
        deliver(run, read_record(run))
    assert {key: bucket.get(key) for key in bucket.list()} == before


@pytest.mark.parametrize("keep", [{0, 1, 2}, {1}])
def test_a_later_generation_replaces_objects_and_takes_success_away_meanwhile(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: set[int]
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run, record = RunDir(tmp_path / "s"), read_record(RunDir(tmp_path / "s"))
    new_generation(run, keep)
    assert not is_delivered(run)
    seen = []

    def watch(change: Any) -> Any:
        def changed(self: ObjectPrefix, *args: Any) -> Any:
            seen.append((args[-2] if len(args) == 3 else args[0], "out/_SUCCESS" in bucket.list()))
            return change(self, *args)

        return changed

    for verb in ("put", "put_new", "remove"):
        monkeypatch.setattr(ObjectPrefix, verb, watch(getattr(ObjectPrefix, verb)))
    deliver(run, record)
    gone = [(f"part-{number:05d}.parquet", False) for number in sorted({0, 1, 2} - keep)]
    put_and_put_new = [("part-00001.parquet", False)] * 2
    assert seen == [("_SUCCESS", True), *put_and_put_new, *gone, ("_SUCCESS", False)]
    assert [key for key in bucket.list() if "part" in key] == [PARTS[number] for number in sorted(keep)]
    assert bucket.get(PARTS[1]) == run.part(1).read_bytes()
    assert json.loads(bucket.get("out/_SUCCESS"))["generation"] == 1 and is_delivered(run)


def test_compact_brings_its_parts_into_the_bucket_and_the_old_ones_out(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")
    assert compact(run, grace_s=0.0).worked
    (part,) = RunDir(run.root).parts().values()
    assert bucket.list("out/") == ["out/_SUCCESS", "out/_bulkrun.json", f"out/{part.name}"]
    assert sorted(bucket_results(bucket, "out"), key=lambda row: (row["row"], row["sample"])) == ORACLE


def test_a_compact_that_was_killed_before_it_uploads_is_continued_by_the_same_command(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("bulkrun.job.update.compact.deliver", die)
        with pytest.raises(Killed):
            compact(run, grace_s=0.0)
    assert bucket.list() == WHOLE
    assert not compact(run, grace_s=0.0).worked
    (part,) = RunDir(run.root).parts().values()
    assert bucket.list("out/") == ["out/_SUCCESS", "out/_bulkrun.json", f"out/{part.name}"]


def test_parts_of_a_generation_whose_delivery_was_killed_go_with_the_next(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run, put_new = RunDir(tmp_path / "s"), ObjectPrefix.put_new

    def put_and_die(self: ObjectPrefix, *args: Any) -> None:
        put_new(self, *args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPrefix, "put_new", put_and_die)
        with pytest.raises(Killed):
            compact(run, 12, grace_s=0.0)
    assert compact(run, grace_s=0.0).worked
    (part,) = RunDir(run.root).parts().values()
    assert bucket.list("out/") == ["out/_SUCCESS", "out/_bulkrun.json", f"out/{part.name}"]


class Killed(BaseException):
    """The process ends here."""


def test_a_later_generation_whose_delivery_is_broken_off_anywhere_is_brought_by_the_next(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(20):
        folder, url = tmp_path / str(step), bucket.url(str(step))
        start_bucket_run(folder, url)
        run, record = RunDir(folder), read_record(RunDir(folder))
        new_generation(run, {1, 2})
        with monkeypatch.context() as patch:
            left = iter(range(step))

            def mortal(change: Any, left: Any = left) -> Any:
                def changed(*args: Any) -> Any:
                    if next(left, None) is None:
                        raise Killed
                    return change(*args)

                return changed

            for verb in ("put", "put_new", "remove"):
                patch.setattr(ObjectPrefix, verb, mortal(getattr(ObjectPrefix, verb)))
            patch.setattr(delivery, "replace_json", mortal(delivery.replace_json))
            try:
                deliver(run, record)
                break
            except Killed:
                pass
        deliver(run, record)
        assert is_delivered(run)
        names = ["_SUCCESS", "_bulkrun.json", "part-00001.parquet", "part-00002.parquet"]
        assert bucket.list(f"{step}/") == [f"{step}/{name}" for name in names]
        assert bucket.get(f"{step}/part-00001.parquet") == run.part(1).read_bytes()
        assert bucket.get(f"{step}/_SUCCESS") == run.success.read_bytes()
    assert 5 < step < 20


def test_delivery_is_safe_to_repeat_after_the_ledger_was_lost(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    before = {key: bucket.get(key) for key in bucket.list()}
    forget(tmp_path / "s")
    deliver(RunDir(tmp_path / "s"), read_record(RunDir(tmp_path / "s")))
    assert {key: bucket.get(key) for key in bucket.list()} == before


def test_a_part_in_several_pieces_is_invisible_until_it_is_whole(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulkrun.job.store.object_store._PIECE_BYTES", 5 * 2**20)
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * (12 * 2**12))
    prefix = ObjectPrefix(bucket.url("out"))
    calls: list[list[str]] = []
    call_s3 = type(prefix._files)._call_s3

    async def watched(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if method in ("upload_part", "complete_multipart_upload"):
            calls.append(await visible(self))
        return await call_s3(self, method, *args, **options)

    async def visible(files: Any) -> list[str]:
        listed = await call_s3(files, "list_objects_v2", Bucket=bucket.name)
        return [entry["Key"] for entry in listed.get("Contents", [])]

    monkeypatch.setattr(type(prefix._files), "_call_s3", watched)
    assert prefix.put_new(big, "big", "one")
    assert len(calls) > 2 and not any(calls)
    assert bucket.get("out/big") == big.read_bytes()
    assert prefix.holds(big, "big", "one", prefix.list()["big"])
    assert not prefix.put_new(big, "big", "two") and prefix.nonce("big") == "one"


def broken_off(bucket: Bucket, key: str) -> None:
    """An upload of which one piece came."""
    upload = bucket.files.call_s3("create_multipart_upload", Bucket=bucket.name, Key=key)["UploadId"]
    bucket.files.call_s3("upload_part", Bucket=bucket.name, Key=key, PartNumber=1, UploadId=upload, Body=b"piece")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_delivery_ends_the_uploads_of_its_parts_that_were_broken_off(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    ours = [PARTS[1], "out/_SUCCESS"]
    for key in (*ours, "out/other.bin", "out2/part-00001.parquet"):
        broken_off(bucket, key)
    call_s3 = type(bucket.files).call_s3

    def call(files: Any, method: str, **options: Any) -> Any:
        if method == "abort_multipart_upload" and not allowed:
            raise PermissionError("no") from refused("AccessDenied")
        return call_s3(files, method, **options)

    monkeypatch.setattr(type(bucket.files), "call_s3", call)
    assert start_bucket_run(tmp_path / "s", bucket.url("out")).state == "completed_with_errors"
    left = bucket.files.call_s3("list_multipart_uploads", Bucket=bucket.name)["Uploads"]
    assert [upload["Key"] in ours for upload in left].count(True) == (0 if allowed else 2) and len(left) >= 2
    assert is_delivered(RunDir(tmp_path / "s"))


def upload_is_gone() -> Exception:
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {"HTTPStatusCode": 404}}, "Complete")


def test_a_lost_reply_to_the_last_request_of_an_upload_is_not_a_failure(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"rows")
    prefix, put = ObjectPrefix(bucket.url("out")), ObjectPrefix._put
    completes = iter([False, True])  # one that somebody ended, then one whose reply was lost

    def losing(self: ObjectPrefix, *args: Any) -> None:
        if next(completes):
            put(self, *args)
        raise FileNotFoundError("no upload") from upload_is_gone()

    monkeypatch.setattr(ObjectPrefix, "_put", losing)
    with pytest.raises(RunError, match="upload was ended") as raised:
        prefix.put_new(tmp_path / "file", "name", "one")
    assert is_transient(raised.value)
    assert prefix.put_new(tmp_path / "file", "name", "one") and bucket.get("out/name") == b"rows"


@pytest.mark.parametrize("start", ["new", "continued", "fresh"])
def test_a_store_that_has_no_time_when_a_run_begins_is_asked_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    failures, listed = iter(range(3)), ObjectPrefix.list
    if start == "continued":
        enter(tmp_path / "s", bucket_job(bucket.url("out"), tmp_path / "s"))

    def failing(self: ObjectPrefix) -> dict[str, str]:
        if next(failures, None) is not None:
            raise RunError("no time") from refused("SlowDown")
        return listed(self)

    monkeypatch.setattr(ObjectPrefix, "list", failing)
    enter(tmp_path / "s", bucket_job(bucket.url("out"), tmp_path / "s"), fresh=start == "fresh")
    assert bucket.list() == ["out/_bulkrun.json"] and not list(failures)


def test_a_put_may_be_answered_later_than_a_reading() -> None:
    s3fs = pytest.importorskip("s3fs")
    puts = ObjectPrefix("s3://bucket/out")._files
    assert puts.config_kwargs["read_timeout"] > s3fs.S3FileSystem.read_timeout
    assert puts.retries < s3fs.S3FileSystem.retries  # so that a store that never answers takes no longer than before


@pytest.mark.parametrize("name", ["lang=en%20us/part-00000.parquet", "a b+c&d=é/part-00001.parquet", "x/[y]*?.parquet"])
def test_names_of_partitions_come_back_as_they_are(bucket: Bucket, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"rows")
    prefix = ObjectPrefix(bucket.url("out"))
    assert prefix.put_new(tmp_path / "file", name, "one") and prefix.put_new(tmp_path / "file", name, "one")
    assert list(prefix.list()) == [name]
    assert prefix.holds(tmp_path / "file", name, "one", prefix.list()[name])
    prefix.remove(name)
    assert not prefix.list()


def test_a_local_run_needs_no_s3fs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    from tests.job.small_runs import job

    assert start(tmp_path / "r", ROWS, job(tmp_path / "r"), shard_rows=8).state == "completed_with_errors"
    with pytest.raises(RunError, match=r"pip install 's3fs"):
        enter(tmp_path / "s", bucket_job("s3://bucket/out", tmp_path / "s"))


def test_pauses_between_tries_grow_and_end(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    forget(tmp_path / "s")
    clock, pauses = [0.0], []

    def wait(self: Any, pause: float) -> None:
        pauses.append(pause)
        clock[0] += pause

    def fail(self: ObjectPrefix) -> dict[str, str]:
        raise RunError("no answer") from refused("SlowDown")

    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(delivery.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(delivery._Delivery, "_wait", wait)
    monkeypatch.setattr(ObjectPrefix, "list", fail)
    with pytest.raises(RunError, match="no answer"):
        deliver(RunDir(tmp_path / "s"), read_record(RunDir(tmp_path / "s")))
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and sum(pauses) <= 300

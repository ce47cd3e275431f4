from __future__ import annotations

import gzip
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.files import find_files
from bulkrun.data.inputs.reader import open_input
from bulkrun.data.storage import patience, remote
from bulkrun.errors import InputError, RunError
from tests.data.reading import read, read_all
from tests.s3_server import KEY, SECRET, Bucket, Requests


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


ROWS = [{"id": number, "text": f"text {number}"} for number in range(5000)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.parquet", parquet(ROWS, row_group_size=700)),
        ("a.jsonl", lines(ROWS)),
        ("a.jsonl.gz", gzip.compress(lines(ROWS))),
        ("a.jsonl.zst", zstd(lines(ROWS))),
    ],
)
def test_every_format_reads_from_an_object_as_from_a_file(bucket: Bucket, name: str, data: bytes) -> None:
    rows, errors = read(bucket.put(f"in/{name}", data))
    assert rows == ROWS and not errors


def test_csv_reads_from_an_object(bucket: Bucket) -> None:
    rows, errors = read(bucket.put("in/a.csv", b'id,text\n1,"a\nb"\n2\n3,c\n'))
    assert rows == [{"id": "1", "text": "a\nb"}, {"id": None, "text": None}, {"id": "3", "text": "c"}]
    assert [(at, error.code) for at, error in errors.items()] == [(1, "bad_input")]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in", ["in/a.jsonl", "in/b.jsonl", "in/sub/c.jsonl"]),
        ("in/", ["in/a.jsonl", "in/b.jsonl", "in/sub/c.jsonl"]),
        ("in/*.jsonl", ["in/a.jsonl", "in/b.jsonl"]),
        ("in/**/*.jsonl", ["in/a.jsonl", "in/b.jsonl", "in/sub/c.jsonl"]),
        ("in/su*", ["in/sub/c.jsonl"]),
        ("od*", ["odd/[x] y.jsonl", "odd/p=a%20b+c/é.jsonl"]),
        ("in/b.jsonl", ["in/b.jsonl"]),
        ("in/_hidden/d.jsonl", ["in/_hidden/d.jsonl"]),
        ("in/_hidden/*.jsonl", ["in/_hidden/d.jsonl"]),
        ("odd/[x] y.jsonl", ["odd/[x] y.jsonl"]),
        ("odd/p=a%20b+c/*.jsonl", ["odd/p=a%20b+c/é.jsonl"]),
    ],
)
def test_a_pattern_means_the_same_objects_as_it_would_mean_files(
    bucket: Bucket, tmp_path: Path, pattern: str, expected: list[str]
) -> None:
    keys = ["in/a.jsonl", "in/b.jsonl", "in/sub/c.jsonl", "in/_hidden/d.jsonl", "in/.e.jsonl", "in/README"]
    for key in [*keys, "inner.jsonl", "odd/[x] y.jsonl", "odd/p=a%20b+c/é.jsonl"]:
        bucket.put(key, lines(ROWS[:1]))
        (tmp_path / key).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / key).write_bytes(lines(ROWS[:1]))
    bucket.put("in/", b"")  # how some tools mark a folder
    assert [str(file.path) for file in find_files(bucket.url(pattern))] == [bucket.url(key) for key in expected]
    local = [str(file.path) for file in find_files(str(tmp_path / pattern))]
    assert [file.folders for file in find_files(bucket.url(pattern))] == [
        file.folders for file in find_files(str(tmp_path / pattern))
    ]
    assert local == [str(tmp_path / key) for key in expected]


def test_a_list_names_each_object_once(bucket: Bucket) -> None:
    url = bucket.put("in/a.jsonl", lines(ROWS[:2]))
    assert len(find_files([url, bucket.url("in/*.jsonl"), bucket.url("in")])) == 1


def test_a_broken_line_of_an_object_is_an_error_row_that_names_the_line(bucket: Bucket) -> None:
    url = bucket.put("a.jsonl", b'{"text": "a"}\n{"text": \n\xff\n{"text": "b"}')
    rows, errors = read(url)
    assert [row["text"] for row in rows] == ["a", None, None, "b"]
    assert errors[1].message.startswith(f"{url}:2: ") and errors[2].message.startswith(f"{url}:3: ")


def test_a_torn_parquet_object_is_refused_before_anything_runs(bucket: Bucket) -> None:
    url = bucket.put("a.parquet", parquet(ROWS)[:-100])
    with pytest.raises(InputError, match=r"a\.parquet: not a whole Parquet file"):
        read(url)


def test_an_object_cut_off_in_its_compressed_middle_is_refused(bucket: Bucket) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: cannot be read as gzip"):
        read(bucket.put("a.jsonl.gz", gzip.compress(lines(ROWS))[:2000]))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 500), kind=st.sampled_from(["a.parquet", "a.jsonl", "a.jsonl.zst"]))
def test_reading_resumes_from_any_position_of_an_object(bucket: Bucket, start: int, kind: str) -> None:
    data = {"a.parquet": parquet(ROWS[:500], row_group_size=70), "a.jsonl": lines(ROWS[:500])}
    data["a.jsonl.zst"] = zstd(data["a.jsonl"])
    with open_input(bucket.put(kind, data[kind])) as dataset:
        rows, errors = read_all(dataset, Position(0, start))
    assert rows == ROWS[start:500] and not errors


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_an_object_that_changes_between_planning_and_reading_is_noticed(bucket: Bucket, name: str) -> None:
    make = {"a.parquet": parquet, "a.jsonl": lines}[name]
    url = bucket.put(name, make(ROWS))
    with open_input(url) as dataset:
        before = dataset.files[0].fingerprint()
        bucket.put(name, make([{**row, "text": "other"} for row in ROWS]))
        with pytest.raises(InputError, match=f"{name}.*changed"):
            read_all(dataset)
    assert find_files(url)[0].fingerprint() != before


def test_an_object_that_changes_while_it_is_read_is_noticed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.data.storage.remote.READ_AHEAD_BYTES", 2**18)
    big = [{"id": number, "text": "x" * 2000} for number in range(5000)]  # more than is read ahead
    with open_input(bucket.put("a.jsonl", lines(big))) as dataset:
        batches = dataset.batches()
        next(batches)
        bucket.put("a.jsonl", lines(big[:-1]))
        with pytest.raises(InputError, match=r"a\.jsonl.*changed"):
            list(batches)


def test_fingerprint_is_that_of_the_same_object_every_time(bucket: Bucket) -> None:
    url = bucket.put("a.jsonl", lines(ROWS))
    assert find_files(url)[0].fingerprint() == find_files(url)[0].fingerprint()


@pytest.mark.parametrize(("name", "make"), [("a.parquet", parquet), ("a.jsonl", lines)])
def test_sql_picks_rows_of_objects(bucket: Bucket, name: str, make: Any) -> None:
    rows, _ = read(bucket.put(name, make(ROWS)), sql="SELECT id FROM input WHERE id % 1000 = 7 ORDER BY id")
    assert [row["id"] for row in rows] == [7, 1007, 2007, 3007, 4007]


def test_sql_takes_an_object_whose_name_is_a_glob_for_that_object(bucket: Bucket) -> None:
    names = ("in1.parquet", "in[12].parquet", "in2.parquet")
    urls = [bucket.put(name, parquet([{"id": number}])) for number, name in enumerate(names)]
    assert read(urls[1:], sql="SELECT id FROM input ORDER BY id")[0] == [{"id": 1}, {"id": 2}]


def test_sql_over_an_object_can_read_no_other_object(bucket: Bucket) -> None:
    bucket.put("secret.parquet", parquet(ROWS))
    url = bucket.put("a.parquet", parquet(ROWS))
    with pytest.raises(InputError, match=r"input\.sql"):
        read(url, sql=f"SELECT * FROM '{bucket.url('secret.parquet')}'")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://no-such-bucket-here/a.jsonl", "no such bucket in http://127.0.0.1.*AWS_ENDPOINT_URL"),
        ("s3://{bucket}/none.jsonl", "does not exist"),
        ("s3://{bucket}/none/*.jsonl", "nothing matches"),
        ("s3://{bucket}/a.txt", "unknown kind of input file '.txt'"),
        ("s3:///a.jsonl", "names no bucket"),
        ("s3://*/a.jsonl", "names no bucket"),
        ("s3://{bucket}/a.txt?versionId=3", "names a version, and only the latest is read"),
        ("gs://bucket/a.jsonl", "neither a local path nor s3://"),
    ],
)
def test_a_path_that_names_nothing_says_what_is_wrong(bucket: Bucket, path: str, message: str) -> None:
    bucket.put("a.txt", b"x")
    with pytest.raises(InputError, match=message):
        find_files(path.format(bucket=bucket.name))


def test_keys_in_a_path_are_refused_and_not_repeated(bucket: Bucket) -> None:
    with pytest.raises(InputError, match="AWS_ACCESS_KEY_ID") as refused:
        find_files(f"s3://{KEY}:{SECRET}@{bucket.name}/a.jsonl")
    assert KEY not in str(refused.value) and SECRET not in str(refused.value)


def test_missing_keys_are_named_by_their_variables(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    url = bucket.put("a.jsonl", lines(ROWS))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    bucket.files.clear_instance_cache()
    with pytest.raises(InputError, match="no keys were found; set AWS_ACCESS_KEY_ID"):
        find_files(url)


def test_a_store_that_does_not_answer_is_named_without_the_password_in_its_url(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://me:{SECRET}@127.0.0.1:9")
    bucket.files.clear_instance_cache()
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:9 does not answer") as refused:
        find_files(bucket.url("a.jsonl"))
    assert SECRET not in str(refused.value)


def test_without_s3fs_the_message_says_what_to_install(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"pip install 's3fs"):
        find_files(bucket.url("a.jsonl"))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_store_that_has_no_time_for_a_while_is_asked_again(
    bucket: Bucket, requests_made: Requests, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    url = bucket.put(name, {"a.parquet": parquet, "a.jsonl": lines}[name](ROWS))
    requests_made.failing.update(head_object=3)
    with open_input(url) as dataset:
        requests_made.failing.update(head_object=3, get_object=3)
        rows, errors = read_all(dataset)
    assert rows == ROWS and not errors and not +requests_made.failing


def test_a_body_that_is_cut_off_is_asked_for_again(
    bucket: Bucket, requests_made: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiohttp import ClientPayloadError

    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    (file,) = find_files(bucket.put("a.jsonl", lines(ROWS)))
    requests_made.failing.update(get_object=3)
    requests_made.refusal = ClientPayloadError("cut")
    assert file.path.open("rb").read(10) == lines(ROWS)[:10] and not +requests_made.failing


def test_a_store_that_has_no_time_for_long_is_given_up(
    bucket: Bucket, requests_made: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote, "_PATIENCE_S", 1.0)  # room for some tries on a busy machine
    (file,) = find_files(bucket.put("a.jsonl", lines(ROWS)))
    requests_made.failing.update(get_object=1000)
    with pytest.raises(RunError, match=r"a\.jsonl: reading failed: ServiceUnavailable; run the same command again"):
        file.path.open("rb").read(10)
    assert 1 < requests_made.asked["get_object"] < 20


def test_a_signal_ends_a_pause_at_once(
    bucket: Bucket, requests_made: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 200.0)
    url = bucket.put("a.jsonl", lines(ROWS))
    requests_made.failing.update(head_object=1)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Stopped):
            find_files(url)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_is_broken_off_says_nothing_when_python_ends(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    monkeypatch.setattr(sys, "is_finalizing", lambda: ends)
    remote.connect().loop.call_exception_handler({"message": "Task was destroyed but it is pending!"})
    assert bool(caplog.records) is not ends


def test_reading_an_object_asks_for_it_twice_each_time(bucket: Bucket, requests_made: Requests) -> None:
    for number in range(5):
        bucket.put(f"in/{number}.jsonl", lines(ROWS[number : number + 1]))
    files = find_files(bucket.url("in/"))
    requests_made.asked.clear()
    for file in files:
        with file.path.open("rb") as stream:
            assert stream.read()
    assert requests_made.asked == {"head_object": 5, "get_object": 5}


@pytest.mark.parametrize("when", ["opening", "reading"])
def test_an_object_that_is_removed_meanwhile_is_said_to_be(bucket: Bucket, when: str) -> None:
    (file,) = find_files(bucket.put("a.jsonl", lines(ROWS)))
    with pytest.raises(InputError, match=r"a\.jsonl: it was removed since the run looked at it; give the run an input"):
        if when == "opening":
            bucket.files.rm(bucket.url("a.jsonl"))
        with file.path.open("rb") as stream:
            bucket.files.rm(bucket.url("a.jsonl"))
            stream.read()

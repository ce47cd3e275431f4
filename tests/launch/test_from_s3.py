"""The shipped job with input and results in a bucket, by the command line, against a local store."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from bulkrun.cli import main
from bulkrun.data.inputs.files import find_files
from bulkrun.errors import InputError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch.preparation.input_files import check_unchanged, facts_of
from bulkrun.launch.preparation.prepare import PreparedJob
from tests.job.without_model import start_without_model
from tests.launch.one_process import one_process
from tests.s3_server import SECRET, Bucket, Requests

JOB = Path(__file__).parent.parent.parent / "jobs" / "from_s3.yaml"
BODY = "    # what it is for is not said\n    # anywhere in this function\n"
ROWS = [
    {
        "id": f"m.f{number}",
        "module": "m",
        "name": f"f{number}",
        "source": f"def f{number}(self):\n{BODY}    return self.items[{number}]\n",
    }
    for number in range(12)
]


@pytest.fixture
def store(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket with the input, and an empty place for the states of runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    start_without_model(monkeypatch)
    for half, rows in enumerate((ROWS[:6], ROWS[6:])):
        bucket.put(f"functions/{half}.parquet", parquet(rows))
    return bucket


def parquet(rows: list[dict[str, str]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def bulkrun(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def submit(store: Bucket, *changes: str) -> Result:
    """The command with all of its work in this process, on a fake engine."""
    with one_process():
        return submit_with_processes(store, *changes)


def submit_with_processes(store: Bucket, *changes: str) -> Result:
    given = [f"input.path={store.url('functions/*.parquet')}", f"output.path={store.url('summaries')}"]
    options = [part for change in (*given, "engine.dtype=float32", *changes) for part in ("--set", change)]
    return bulkrun("submit", str(JOB), *options)


def rows_in_bucket(store: Bucket) -> list[dict[str, object]]:
    parts = [store.get(key) for key in store.list("summaries/") if key.endswith(".parquet")]
    return [row for part in parts for row in pq.read_table(pa.BufferReader(part)).to_pylist()]


def test_from_s3_runs_into_a_bucket_and_its_url_is_the_run(store: Bucket) -> None:
    done = submit_with_processes(store)
    assert done.exit_code == 0, done.stderr
    assert f"results  {store.url('summaries')}/*.parquet" in done.stderr and SECRET not in done.stderr
    rows = rows_in_bucket(store)
    assert sorted(str(row["name"]) for row in rows) == sorted(row["name"] for row in ROWS)
    assert all(row["response"] for row in rows) and "summaries/_SUCCESS" in store.list()
    url = store.url("summaries")
    assert json.loads(bulkrun("status", url, "--json").stdout)["state"] == "completed"
    counted = json.loads(bulkrun("query", url, "SELECT count(*) AS rows FROM results", "--json").stdout)
    assert counted["rows"] == [{"rows": len(ROWS)}]
    assert bulkrun("verify", url).exit_code == 0
    again = submit(store)
    assert again.exit_code == 0 and "nothing to do" in again.stderr


def test_what_a_slurm_run_could_not_deliver_the_same_command_delivers(store: Bucket, tmp_path: Path) -> None:
    assert submit(store).exit_code == 0
    whole = store.list()
    next((tmp_path / "state").glob("bulkrun/runs/*/.bulkrun/delivered.json")).unlink()
    store.files.rm(f"{store.name}/summaries/_SUCCESS")
    again = submit(store, "run.executor=slurm")
    assert again.exit_code == 0 and "and _SUCCESS were uploaded to s3://" in again.stderr and store.list() == whole


def test_input_that_changed_in_the_bucket_is_noticed_on_resume(store: Bucket) -> None:
    assert submit(store).exit_code == 0
    store.put("functions/0.parquet", store.get("functions/1.parquet"))
    changed = submit(store)
    assert changed.exit_code == 4 and "input.files" in changed.stderr


def test_input_that_changes_between_submit_and_planning_is_noticed(
    store: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = PreparedJob.enter

    def enter_then_change(*args: Any, **options: Any) -> Any:
        record = enter(*args, **options)
        store.put("functions/0.parquet", store.get("functions/1.parquet"))
        return record

    monkeypatch.setattr(PreparedJob, "enter", enter_then_change)
    changed = submit(store)
    assert changed.exit_code == 4 and "0.parquet changed since the run began" in changed.stderr
    assert not rows_in_bucket(store)


def test_objects_are_looked_at_again_by_one_listing(store: Bucket, requests_made: Requests) -> None:
    paths = [store.url("functions/"), store.url("more/0.jsonl")]
    for number in range(10):
        store.put(f"functions/{number}.parquet", parquet(ROWS[:1]))
    store.put("more/0.jsonl", b'{"id": 1}\n')
    spec = JobSpec.model_validate({"name": "x", "model": "m", "input": {"path": paths}, "output": {"path": "out"}})
    files = find_files(paths)
    known = facts_of(files)
    requests_made.asked.clear()
    check_unchanged(spec, files, known)
    assert requests_made.asked["head_object"] == len(paths), "whether each path is an object"
    store.put("functions/7.parquet", parquet(ROWS[1:2]))
    with pytest.raises(InputError, match=r"7\.parquet: it was changed since"):
        check_unchanged(spec, files, known)
    store.files.rm(store.url("functions/3.parquet"))
    with pytest.raises(InputError, match=r"3\.parquet: it was removed since"):
        check_unchanged(spec, files, known)


def test_incremental_nights_bring_the_bucket_up_to_date(store: Bucket) -> None:
    nights = ("run.incremental=true", "input.columns=[id, module, name]", "input.sql=null")
    first = submit(store, *nights)
    assert first.exit_code == 0, first.stderr
    rows = [{**row, "source": "def changed(self):\n    return self.other"} for row in ROWS[:1]] + ROWS[1:6]
    store.put("functions/0.parquet", parquet([*rows, {**ROWS[0], "id": "m.new", "name": "new"}]))
    before = {key: store.get(key) for key in store.list("summaries/")}
    second = submit(store, *nights)
    assert second.exit_code == 0 and "1 new, 1 changed" in second.stderr, second.stderr
    found = [str(row["name"]) for row in rows_in_bucket(store)]
    assert sorted(found) == sorted([*(row["name"] for row in ROWS), "new"])
    assert store.get("summaries/_SUCCESS") != before["summaries/_SUCCESS"]


def test_a_url_without_a_run_here_says_where_it_is(
    store: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("summaries/_bulkrun.json", b'{"run_id": "x", "state": "/nowhere/else", "host": "node7"}')
    elsewhere = CliRunner().invoke(main, ["status", store.url("summaries")])
    assert "/nowhere/else on node7" in elsewhere.stderr
    nothing = CliRunner().invoke(main, ["status", store.url("nothing")])
    assert "no such object" in nothing.stderr


def test_a_url_finds_a_state_that_is_not_at_the_usual_place(store: Bucket, tmp_path: Path) -> None:
    assert submit(store, f"output.state={tmp_path / 'mine'}", "run.limit=2").exit_code == 0
    assert (tmp_path / "mine/_SUCCESS").exists()
    assert json.loads(bulkrun("status", store.url("summaries"), "--json").stdout)["rows_total"] == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("output.path=gs://bucket/x", "output.path: a directory or s3://BUCKET/PREFIX"),
        ("output.path=s3://key:secret@bucket/x", "without keys"),
        ("output.path=s3://bucket//a/b", "output.path: no name between two slashes"),
        ("output.path='s3://bucket/a?versionId=3'", "no ?versionId="),
        ("output={path: out, state: st}", "state: only with path: s3://"),
    ],
)
def test_an_output_that_cannot_be_is_a_mistake_in_the_job_file(store: Bucket, change: str, problem: str) -> None:
    refused = CliRunner().invoke(main, ["validate", str(JOB), "--set", change])
    assert problem in refused.stderr

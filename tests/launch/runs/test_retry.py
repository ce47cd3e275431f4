"""`retry`: failed rows run again and nothing else; an old success is never lost; whose run changed is refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from bulkrun.errors import JobFileError, ResumeError, RunError, UsageError
from bulkrun.job.plan.shard_file import read_shard
from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.update.staging import begin_merge
from bulkrun.job.update.update_claim import hold
from bulkrun.job.views.status import read_status
from bulkrun.job.work.delivery import _Delivery, is_delivered
from bulkrun.request import Completion, Request, RowError
from tests.full_disk import file_size_limit
from tests.job.fake_engine import FakeEngine
from tests.launch.nights import Nights, after, whole
from tests.s3_server import Bucket
from tests.text.tool_templates import HERMES

LONG = "x " * 400


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path, {"run__incremental": False})


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "text": f"text {number}"} for number in range(count)]


def fail_requests(nights: Nights, *request_ids: str) -> None:
    nights.refuse = lambda request: request.request_id in request_ids


def test_failed_rows_run_again_and_only_these(nights: Nights) -> None:
    nights.write(rows_of(20))
    fail_requests(nights, "3:0", "11:0")
    assert nights.submit().exit_code == 3
    before = nights.results()
    fail_requests(nights)
    done = nights.retry()
    assert (done.exit_code, nights.ran, done.totals.errors) == (0, 2, {})
    after = nights.results()
    for name in ("r3", "r11"):
        assert after[name]["response"] == nights.expected(name, f"text {name[1:]}")
        assert after[name]["row"] == before[name]["row"]
        del before[name], after[name]
    assert after == before
    whole(nights)


class _Slow(FakeEngine):
    """All outputs run out of time."""

    def _completion(self, request: Request, tokens: tuple[int, ...]) -> Completion:
        done = super()._completion(request, tokens)
        return replace(done, finish_reason="timeout", error=RowError("timeout", "over"))


def test_outputs_that_were_stopped_and_ran_again_are_not_counted_as_stopped(nights: Nights) -> None:
    nights.write([{"id": f"r{number}", "text": "the same"} for number in range(3)])
    nights.make_engine = _Slow
    assert (totals := nights.submit().totals).stopped == totals.errors["timeout"] == 3
    nights.make_engine = None
    assert nights.retry().totals.stopped == 0
    whole(nights)


def test_an_override_mends_what_the_plan_refused_and_is_recorded(nights: Nights) -> None:
    nights.write([*rows_of(3), {"id": "long", "text": LONG}])
    assert nights.submit(engine__max_model_len=64).totals.errors == {"too_long": 1}
    assert nights.retry().totals.errors == {"too_long": 1}
    done = nights.retry("run.on_too_long=truncate_right", "sampling.max_tokens=3")
    assert (done.exit_code, nights.ran) == (0, 1)
    assert 0 < len(nights.results()["long"]["response"]) <= 3
    recorded = json.loads((nights.out / "_SUCCESS").read_text())["updates"]
    assert recorded[-1]["overrides"] == ["run.on_too_long=truncate_right", "sampling.max_tokens=3"]
    assert [event["kind"] for event in read_events(RunDir(nights.out)) if event["event"] == "updated"] == ["retry"] * 2
    whole(nights)


def test_only_rows_with_the_given_codes_run(nights: Nights) -> None:
    nights.write([*rows_of(6), {"id": "empty", "text": None}])
    fail_requests(nights, "2:0")
    assert nights.submit().totals.errors == {"bad_input": 1, "nan_logits": 1}
    fail_requests(nights)
    done = nights.retry(codes=["nan_logits", "timeout"])  # any of them
    assert (nights.ran, done.totals.errors, done.exit_code) == (1, {"bad_input": 1}, 3)
    assert not nights.retry(codes=["timeout"]).worked
    with pytest.raises(
        UsageError, match=r"--code time_out: no such error code; did you mean timeout\? \(in this run: bad"
    ):
        nights.retry(codes=["time_out"])


def test_success_beats_failure_sample_by_sample(nights: Nights) -> None:
    nights.settings |= {"sampling__n": 3, "sampling__temperature": 0.9}
    nights.write(rows_of(4))
    fail_requests(nights, "2:1")
    nights.submit()
    fail_requests(nights, "0:0", "0:2")  # in the staged run the row is the first; now two others fail
    done = nights.retry()
    assert (nights.ran, done.totals.errors, done.totals.rows) == (3, {}, 4)
    whole(nights)


def test_a_row_that_fails_again_gets_the_newer_error(nights: Nights) -> None:
    nights.write([{"id": "long", "text": LONG}])
    nights.submit(engine__max_model_len=64)
    fail_requests(nights, "0:0")
    done = nights.retry("run.on_too_long=truncate_left")
    assert (done.exit_code, done.totals.errors) == (3, {"nan_logits": 1})


def test_without_ids_a_retried_row_has_the_noise_of_its_first_try(nights: Nights) -> None:
    nights.settings |= {"input__id": None, "sampling__temperature": 0.9}
    nights.write(rows_of(9))
    nights.submit()
    truth = nights.results()
    (nights.out).rename(nights.folder / "first")
    fail_requests(nights, "7:0", "4:0")
    nights.submit()
    fail_requests(nights)
    nights.retry()
    assert nights.results() == truth


def test_rows_that_could_not_be_read_are_carried_as_errors(nights: Nights) -> None:
    nights.write([*rows_of(2), '{"id": "torn'])
    first = nights.submit().totals.errors
    message = nights.results()[None]["error_message"]
    assert nights.retry().totals.errors == first == {"bad_input": 1}
    assert nights.results()[None]["error_message"] == message


def test_a_run_that_is_not_finished_is_not_retried(nights: Nights) -> None:
    nights.write(rows_of(3))

    def refuse(request: Request) -> bool:
        raise KeyboardInterrupt

    nights.refuse = refuse
    with pytest.raises(KeyboardInterrupt):
        nights.submit()
    with pytest.raises(UsageError, match=r"not finished.*bulkrun submit"):
        nights.retry()


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ((), 1.0),
        (("run.row_timeout=9",), 1.0),
        (("run.max_error_rate=0.25",), 0.25),
        (("run={max_error_rate: 0.25}",), 0.25),
    ],
)
def test_rows_that_failed_may_all_fail_again_unless_the_retry_says_less(
    nights: Nights, overrides: tuple[str, ...], limit: float
) -> None:
    nights.settings["run__max_error_rate"] = 0.5
    nights.write(rows_of(6))
    fail_requests(nights, "2:0")
    nights.submit()
    nights.refuse = interrupt
    with pytest.raises(KeyboardInterrupt):
        nights.retry(*overrides)
    assert read_record(RunDir(nights.out).staged).job["run"]["max_error_rate"] == limit


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("input.id=null", UsageError, "prompt, sampling, run, engine, nothing else"),
        ("output.compression=gzip", UsageError, "nothing else"),
        ("sampling.n=2", UsageError, "a fixed number of samples"),
        (
            "sampling={n: 2}",
            UsageError,
            "sampling.n would be 2, and it is 1: the results have a fixed number of samples",
        ),
        ("sampling.logprobs=1", UsageError, "logprobs"),
        ("run.limit=1", UsageError, "run.limit"),
        ("sampling.temprature=1", JobFileError, "temperature"),
        ("sampling.max_tokens=many", JobFileError, "sampling.max_tokens"),
    ],
)
def test_an_override_that_cannot_be_is_refused_by_name(
    nights: Nights, override: str, error: type[Exception], said: str
) -> None:
    nights.write([*rows_of(1), {"id": "empty", "text": None}])
    nights.submit()
    with pytest.raises(error, match=said):
        nights.retry(override)
    assert not RunDir(nights.out).staged.root.exists() or nights.retry().worked


def test_a_retry_may_name_the_file_of_a_schema_with_the_same_columns(nights: Nights) -> None:
    schemas = {"same": {"a": {"type": "integer", "minimum": 3}}, "other": {"a": {"type": "string"}}}
    for name, properties in schemas.items():
        (nights.folder / f"{name}.json").write_text(json.dumps({"type": "object", "properties": properties}))
    nights.settings["sampling__structured_outputs"] = {"json": str(nights.folder / "same.json")}
    nights.write(rows_of(3))
    assert nights.submit().totals.errors == {"invalid_schema": 3}
    assert nights.retry(f"sampling.structured_outputs={{json: {nights.folder}/same.json}}").worked and nights.ran == 3
    with pytest.raises(UsageError, match=r"would change the columns of the results \(parsed\)"):
        nights.retry(f"sampling.structured_outputs.json={nights.folder}/other.json")


def test_a_retry_whose_tools_would_need_a_column_is_refused(nights: Nights) -> None:
    """The chat template tells the form of calls, which would be taken out of the responses and have no place."""
    (nights.folder / "hermes.jinja").write_text(HERMES)
    nights.settings["prompt"] = {"template": "{{ text }}", "chat_template": str(nights.folder / "hermes.jinja")}
    nights.write([*rows_of(1), {"id": "empty", "text": None}])
    nights.submit()
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(UsageError, match=r"would change the columns of the results \(tool_calls\)"):
        nights.retry("prompt.template=look", f"prompt.tools=[{json.dumps(tool)}]")


def test_a_changed_input_is_refused_with_the_difference(nights: Nights) -> None:
    nights.write([*rows_of(2), {"id": "empty", "text": None}])
    nights.submit()
    nights.write([*rows_of(3), {"id": "empty", "text": None}])
    with pytest.raises(ResumeError, match=r"input.files") as refused:
        nights.retry()
    assert refused.value.exit_code == 4


def test_a_touched_input_with_a_snapshot_is_not_a_change(nights: Nights) -> None:
    nights.settings |= {"input__sql": "SELECT * FROM input ORDER BY id DESC"}
    nights.write(rows_of(5))
    fail_requests(nights, "1:0")
    nights.submit()
    os.utime(nights.folder / "rows.jsonl", (1, 1))
    fail_requests(nights)
    assert nights.retry().exit_code == 0
    assert nights.results()["r3"]["response"] == nights.expected("r3", "text 3")


def test_another_retry_under_way_is_named_and_the_same_one_goes_on(nights: Nights) -> None:
    nights.write(rows_of(6))
    fail_requests(nights, "2:0", "4:0")
    nights.submit()
    nights.refuse = interrupt
    with pytest.raises(KeyboardInterrupt):
        nights.retry("sampling.max_tokens=4")
    fail_requests(nights)
    assert read_status(RunDir(nights.out)).next_command == (
        f"bulkrun retry {nights.out} --failed --set sampling.max_tokens=4"
    )
    with pytest.raises(UsageError, match=r"--set sampling.max_tokens=4.*--discard"):
        nights.retry()
    assert nights.retry("sampling.max_tokens=4").exit_code == 0
    assert nights.results()["r2"]["response"] == nights.expected("r2", "text 2", sampling__max_tokens=4)
    whole(nights)


def test_the_plan_of_a_retry_is_that_of_the_run_where_it_lies_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage_retry(text: str) -> None:
        folder = tmp_path / "now"
        folder.mkdir()
        nights = Nights(folder, {"run__incremental": False})
        nights.write([{"id": f"{text}{number}", "text": text} for number in range(6)])
        nights.refuse = lambda request: True
        nights.submit()
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr("tests.launch.one_process.plan_run", interrupted)
            nights.retry()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    stage_retry("mine")
    moved = (tmp_path / "now").rename(tmp_path / "moved")
    stage_retry("other")  # where the first one was
    staged = RunDir(moved / "out").staged
    command = [
        sys.executable,
        "-m",
        "bulkrun.launch.processes.planner",
        str(staged.root),
        read_record(staged).run_id,
        str(os.getpid()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = [ids for shard in staged.planned_shards() for ids in planned_ids(staged.shard(shard))]
    assert sorted(planned) == [f"mine{number}" for number in range(6)]


def planned_ids(shard: Path) -> list[str]:
    _, table = read_shard(shard)
    return [row["id"] for row in table["passthrough"].to_pylist()]


def test_discard_begins_another_retry(nights: Nights) -> None:
    nights.write(rows_of(6))
    fail_requests(nights, "2:0")
    nights.submit()
    nights.refuse = interrupt
    with pytest.raises(KeyboardInterrupt):
        nights.retry("sampling.max_tokens=4")
    fail_requests(nights)
    nights.retry(begin_anew=True)
    assert nights.results()["r2"]["response"] == nights.expected("r2", "text 2")


def test_discard_throws_nothing_away_of_a_retry_that_was_killed_while_it_merged(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(6))
    fail_requests(nights, "2:0")
    nights.submit()
    fail_requests(nights)

    def killed(run: RunDir) -> list[int]:
        begin_merge(run)
        raise KeyboardInterrupt

    with monkeypatch.context() as meanwhile, pytest.raises(KeyboardInterrupt):
        meanwhile.setattr("bulkrun.job.update.merge.begin_merge", killed)
        nights.retry("sampling.max_tokens=4")
    assert not nights.retry(begin_anew=True).worked and nights.ran == 0
    assert nights.results()["r2"]["response"] == nights.expected("r2", "text 2", sampling__max_tokens=4)
    whole(nights)


def test_a_retry_after_success_was_lost_and_found_again_by_the_plan_keeps_its_answers(nights: Nights) -> None:
    nights.write(rows_of(20))
    fail_requests(nights, "3:0", "11:0")
    nights.submit()
    fail_requests(nights, "0:0")  # the first of the two
    assert nights.retry().totals.errors == {"nan_logits": 1}
    (nights.out / "_SUCCESS").unlink()
    assert nights.submit().totals.generation == 1 and nights.ran == 0
    fail_requests(nights)
    assert (nights.retry().totals.errors, nights.ran) == ({}, 1)
    assert nights.results()["r3"]["response"] == nights.expected("r3", "text 3")
    whole(nights)


def test_a_retry_over_a_lost_part_is_refused_before_anything_runs(nights: Nights) -> None:
    nights.write(rows_of(20))
    fail_requests(nights, "3:0", "11:0")
    nights.submit()
    fail_requests(nights)
    success = (nights.out / "_SUCCESS").read_bytes()
    min(nights.out.glob("part-*.parquet")).unlink()
    with pytest.raises(RunError, match=r"_SUCCESS says 20 rows, .* delete .*_SUCCESS and submit the job again"):
        nights.retry()
    assert nights.ran == 0 and (nights.out / "_SUCCESS").read_bytes() == success
    (nights.out / "_SUCCESS").unlink()
    nights.submit()
    assert set(nights.results()) == {row["id"] for row in rows_of(20)}
    nights.retry()
    whole(nights)


def test_two_writers_on_one_run_the_second_is_told_who_holds_it(nights: Nights) -> None:
    nights.write([*rows_of(1), {"id": "empty", "text": None}])
    nights.submit()
    with hold(RunDir(nights.out)), pytest.raises(RunError, match=f"process {os.getpid()}"):
        nights.retry()
    assert nights.retry().worked
    assert not list(RunDir(nights.out).claims.glob("update.*"))


def test_a_retry_that_waited_while_a_night_ended_changes_what_that_one_left(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.settings |= {"run__incremental": True}
    nights.write(rows_of(9))
    fail_requests(nights, "3:0", "5:0")
    nights.submit()
    nights.write(rows_of(10))

    def night() -> None:
        nights.submit()
        fail_requests(nights)

    fail_requests(nights, "0:0")
    monkeypatch.setattr("bulkrun.launch.runs.retry.hold", after(night, monkeypatch))
    done = nights.retry()
    assert (done.totals.errors, done.totals.generation, done.totals.rows) == ({}, 2, 10)
    assert nights.results()["r3"]["response"] == nights.expected("r3", "text 3")
    whole(nights)


def test_an_incremental_run_finds_its_failed_rows_by_id_and_the_night_after_leaves_them_alone(nights: Nights) -> None:
    nights.settings |= {"run__incremental": True}
    rows = rows_of(9)
    nights.write(rows)
    fail_requests(nights, "3:0")
    nights.submit()
    rows.reverse()
    nights.write(rows)
    fail_requests(nights)
    assert nights.retry("sampling.max_tokens=4").exit_code == 0
    assert nights.results()["r3"]["response"] == nights.expected("r3", "text 3", sampling__max_tokens=4)
    assert not nights.submit().worked
    whole(nights)


def test_a_retry_runs_all_failed_rows_after_a_night_that_read_a_few(nights: Nights) -> None:
    nights.settings |= {"run__incremental": True}
    nights.write(rows_of(10))
    nights.refuse = lambda request: True
    nights.submit()
    nights.refuse = lambda request: False
    assert nights.submit(run__limit=2).totals.errors == {"nan_logits": 8}
    done = nights.retry()
    assert (nights.ran, done.totals.errors, done.exit_code) == (8, {}, 0)
    assert nights.results()["r9"]["response"] == nights.expected("r9", "text 9")
    whole(nights)


@pytest.mark.parametrize("on_vanished", ["keep", "drop"])
def test_large_parts_are_put_together_by_reference(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, on_vanished: str
) -> None:
    monkeypatch.setattr("bulkrun.job.update.replace_rows._COPIED_BYTES", 0)
    nights.settings |= {"run__incremental": True, "run__on_vanished": on_vanished}
    nights.write(rows_of(20))
    fail_requests(nights, "3:0", "4:0", "9:0")
    nights.submit()
    fail_requests(nights)
    assert nights.retry().totals.errors == {}
    nights.write(rows_of(20)[6:])
    nights.submit()
    left = range(6 if on_vanished == "drop" else 0, 20)
    expected = {f"r{row}": nights.expected(f"r{row}", f"text {row}") for row in left}
    assert {name: row["response"] for name, row in nights.results().items()} == expected
    whole(nights)


@pytest.mark.parametrize("incremental", [False, True])
def test_another_prompt_may_read_a_column_that_the_first_one_did_not(nights: Nights, incremental: bool) -> None:
    nights.settings |= {"input__columns": ["id"], "run__incremental": incremental}
    nights.write([{**row, "more": f"more {number}"} for number, row in enumerate(rows_of(5))])
    fail_requests(nights, "3:0")
    nights.submit()
    fail_requests(nights)
    assert nights.retry("prompt.template=Say {{ more }}").exit_code == 0
    assert nights.results()["r3"]["response"] == nights.expected("r3", "more 3")


def test_rows_of_an_openai_batch_keep_their_ids_in_a_retry_with_another_prompt(nights: Nights) -> None:
    nights.settings |= {"prompt": {}, "input__id": None, "input__columns": ["url"], "sampling__temperature": 1.0}
    asked: list[list[Any]] = [[{"role": "user", "content": "Say c0"}], []]
    lines = [{"url": "/v1/chat/completions", "body": {"messages": messages}} for messages in asked]
    nights.write([{"custom_id": f"c{number}", **line} for number, line in enumerate(lines)])
    assert nights.submit().totals.errors == {"empty_prompt": 1}
    assert nights.retry("prompt.template='Say {{ custom_id }}'").exit_code == 0
    rows = duckdb.sql(f"SELECT custom_id, response FROM '{nights.out}/*.parquet' ORDER BY row").fetchall()
    assert rows == [(name, nights.expected(name, name)) for name in ("c0", "c1")]
    whole(nights)


def test_partition_folders_keep_their_rows(nights: Nights) -> None:
    nights.settings |= {"output__partition_by": ["lang"]}
    nights.write([{**row, "lang": "en" if number % 2 else "de"} for number, row in enumerate(rows_of(12))])
    fail_requests(nights, "2:0", "7:0")
    nights.submit()
    fail_requests(nights)
    done = nights.retry()
    assert (done.exit_code, done.totals.rows) == (0, 12)
    assert {path.parent.name for path in nights.out.glob("*/*.parquet")} == {"lang=en", "lang=de"}
    whole(nights)


def test_a_full_disk_while_a_retry_is_staged_is_named_and_half_of_it_does_not_stay_there(nights: Nights) -> None:
    payloads = random.Random(1)
    nights.write([{**row, "more": payloads.randbytes(3000).hex()} for row in rows_of(60)])
    nights.refuse = lambda request: True
    nights.submit()
    fail_requests(nights)
    with (
        file_size_limit(65536),
        pytest.raises(RunError, match=r"input\.subset: writing the rows to run failed.*ulimit"),
    ):
        nights.retry()
    assert not RunDir(nights.out).staged.root.exists()
    assert nights.retry().exit_code == 0


def test_what_samples_cost_that_were_not_kept_is_still_counted(nights: Nights) -> None:
    nights.settings |= {"sampling": {"max_tokens": 6, "temperature": 0.9, "best_of": 3}}
    nights.write(rows_of(20))
    fail_requests(nights, *(f"3:{sample}" for sample in range(3)))

    def not_kept(totals: RunTotals) -> int:
        return totals.completion_tokens - sum(row["completion_tokens"] for row in nights.results().values())

    before = not_kept(nights.submit().totals)
    fail_requests(nights)
    assert not_kept(nights.retry().totals) >= before > 0


def test_a_retry_that_was_killed_while_it_uploads_is_continued_by_the_same_command(
    nights: Nights, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.settings |= {"output__path": bucket.url("out"), "output__state": str(nights.out)}
    nights.write(rows_of(12))
    fail_requests(nights, "3:0")
    nights.submit()
    fail_requests(nights)
    with monkeypatch.context() as patch:
        patch.setattr(_Delivery, "_bring", kill)  # after the old _SUCCESS was taken out of the bucket
        with pytest.raises(KeyboardInterrupt):
            nights.retry()
    assert "out/_SUCCESS" not in bucket.list()
    again = nights.retry()
    assert (again.worked, again.exit_code) == (False, 0)
    assert is_delivered(RunDir(nights.out))
    assert {key.removeprefix("out/"): bucket.get(key) for key in bucket.list() if "_bulkrun" not in key} == {
        path.name: path.read_bytes() for path in nights.out.iterdir() if path.is_file()
    }


def kill(*_: object) -> None:
    raise KeyboardInterrupt


def interrupt(request: Request) -> bool:
    raise KeyboardInterrupt

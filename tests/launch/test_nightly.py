"""Incremental nights: only what is new, changed or failed runs, and each id is there once."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.data.parts import read_part_info
from bulkrun.errors import ErrorRateExceeded, InputError, ResumeError, RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.update import merge
from bulkrun.job.update.compact import compact
from bulkrun.job.update.settle import settle_run
from bulkrun.job.update.staging import begin_merge, is_merging
from bulkrun.job.views.logs import last_events
from bulkrun.job.views.status import read_status
from bulkrun.job.views.verify import verify_run
from bulkrun.job.work.finish import RunTotals
from bulkrun.launch import nightly
from bulkrun.launch import submit as submit_module
from bulkrun.launch.prepare import BUNDLED_ROOT
from bulkrun.launch.preview import plan_job
from bulkrun.request import Request
from tests.full_disk import file_size_limit
from tests.job.fake_engine import FakeEngine
from tests.launch.nights import Nights, Silent, after


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def rows_of(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "text": f"text {number}"} for number in range(start, start + count)]


def whole(nights: Nights) -> None:
    report = verify_run(RunDir(nights.out))
    assert report.ok, report.problems


def test_whole_dataset_fingerprint_appending_1_row_runs_exactly_1_generation(nights: Nights) -> None:
    nights.write(rows_of(40))
    assert nights.submit().exit_code == 0
    before = nights.results()
    nights.write(rows_of(41))
    done = nights.submit()
    assert nights.ran == 1
    assert done.changes == {"new": 1, "changed": 0, "failed": 0, "unchanged": 40, "vanished": 0}
    after = nights.results()
    assert after.pop("r40")["response"] == nights.expected("r40", "text 40")
    assert after == before
    whole(nights)


def test_the_same_night_again_does_nothing_and_exits_0(nights: Nights) -> None:
    nights.write(rows_of(10))
    nights.submit()
    parts = {path: path.stat().st_ino for path in nights.out.iterdir()}
    done = nights.submit()
    assert (done.worked, done.exit_code, nights.ran) == (False, 0, 0)
    assert {path: path.stat().st_ino for path in nights.out.iterdir()} == parts
    assert not RunDir(nights.out).staged.root.exists()


def test_hash_of_file_paths_a_row_edited_under_the_same_name_runs_again(nights: Nights) -> None:
    rows = rows_of(20)
    nights.write(rows)
    nights.submit()
    numbers = {name: row["row"] for name, row in nights.results().items()}
    rows[7]["text"] = "other 7"  # as long as it was
    nights.write(rows)
    assert nights.submit().changes == {"new": 0, "changed": 1, "failed": 0, "unchanged": 19, "vanished": 0}
    assert nights.ran == 1
    after = nights.results()
    assert after["r7"]["response"] == nights.expected("r7", "other 7")
    assert after["r7"]["text"] == "other 7"
    assert {name: row["row"] for name, row in after.items()} == numbers
    whole(nights)


def test_skip_by_count_a_shuffled_input_runs_nothing(nights: Nights) -> None:
    rows = rows_of(30)
    nights.write(rows)
    nights.submit()
    random.Random(1).shuffle(rows)
    nights.write(rows)
    assert not nights.submit().worked
    assert nights.ran == 0


@pytest.mark.parametrize("key", ["sampling__max_tokens", "sampling__seed", "prompt__template"])
def test_cache_key_lacks_params_a_changed_template_or_sampling_is_no_stale_hit(nights: Nights, key: str) -> None:
    nights.write(rows_of(9))
    nights.submit()
    value = {"sampling__max_tokens": 5, "sampling__seed": 3, "prompt__template": "Say it: {{ text }}"}[key]
    with pytest.raises(ResumeError, match="--full-refresh") as refused:
        nights.submit(**{key: value})
    assert key.replace("__", ".") in str(refused.value)
    done = nights.submit(flags={"full_refresh": True}, **{key: value})
    assert done.changes is not None and done.changes["changed"] == 9
    assert nights.ran == 9
    assert not nights.submit(**{key: value}).worked
    whole(nights)


def test_cache_key_lacks_model_other_weights_under_the_same_path_are_no_stale_hit(nights: Nights) -> None:
    model = nights.folder / "model"
    shutil.copytree(BUNDLED_ROOT / "tiny", model)
    nights.settings["model"] = str(model)
    nights.write(rows_of(4))
    nights.submit()
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(ResumeError, match=r"model.fingerprint"):
        nights.submit()
    assert nights.submit(flags={"full_refresh": True}).worked
    assert nights.ran == 4


def test_cached_value_carries_another_rows_id_rows_with_one_prompt_keep_their_own(nights: Nights) -> None:
    nights.write([{"id": name, "text": "the same"} for name in "abcd"])
    nights.submit()
    nights.write([{"id": name, "text": "the same"} for name in "edcba"])
    assert nights.submit().changes == {"new": 1, "changed": 0, "failed": 0, "unchanged": 4, "vanished": 0}
    assert {name: row["id"] for name, row in nights.results().items()} == {name: name for name in "abcde"}


def test_cache_key_an_engine_only_setting_is_still_a_hit(nights: Nights) -> None:
    nights.write(rows_of(9))
    nights.submit()
    assert not nights.submit(engine__max_num_seqs=3, run__checkpoint_every=1.0).worked
    assert nights.ran == 0


def test_vanished_rows_stay_or_go_as_asked_and_their_numbers_are_never_given_again(nights: Nights) -> None:
    nights.write(rows_of(12))
    nights.submit()
    nights.write(rows_of(10))
    assert not nights.submit().worked
    assert len(nights.results()) == 12
    done = nights.submit(run__on_vanished="drop")
    assert done.worked and nights.ran == 0 and done.totals.rows == 10
    assert set(nights.results()) == {f"r{number}" for number in range(10)}
    whole(nights)
    nights.write([*rows_of(10), {"id": "late", "text": "x"}])
    nights.submit(run__on_vanished="drop")
    assert nights.results()["late"]["row"] == 12


def test_failed_rows_run_again_each_night_and_refused_ones_do_not(nights: Nights) -> None:
    nights.write([*rows_of(6), {"id": "empty", "text": None}, '{"id": "torn'])
    nights.refuse = lambda request: request.request_id == "2:0"
    assert nights.submit().exit_code == 3
    done = nights.submit()  # nothing of the input changed; in the staged run the row has another number
    assert done.changes == {"new": 0, "changed": 0, "failed": 1, "unchanged": 7, "vanished": 0}
    assert nights.ran == 1
    assert nights.results()["r2"]["response"] == nights.expected("r2", "text 2")
    assert done.totals.errors == {"bad_input": 2}
    assert not nights.submit().worked
    whole(nights)


def test_rows_that_failed_before_end_no_night_and_many_new_ones_do(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_HOUSEKEEPING_S", "_HOUSEKEEPING_PAUSE"):  # the limit is asked while rows are left: after each step
        monkeypatch.setattr(f"bulkrun.job.work.runner.{pause}", 0)
    nights.make_engine = lambda: FakeEngine(4, refuse=nights.refuse, step_s=0.02)
    hopeless: set[tuple[int, ...]] = set()
    nights.refuse = lambda request: hopeless.add(tuple(request.prompt_token_ids)) is None
    nights.write(rows_of(110))
    assert nights.submit().totals.errors == {"nan_logits": 110}
    nights.settings["run__max_error_rate"] = 0.5
    nights.refuse = lambda request: tuple(request.prompt_token_ids) in hopeless
    nights.write(rows_of(111))
    assert nights.submit().totals.rows == 111 and nights.ran == 111
    nights.refuse = lambda request: False
    assert nights.submit().exit_code == 0
    nights.refuse = lambda request: True
    nights.write(rows_of(261))
    with pytest.raises(ErrorRateExceeded):
        nights.submit()


def test_a_mended_line_replaces_its_error_row(nights: Nights) -> None:
    nights.write([*rows_of(3), '{"id": "torn'])
    nights.submit()
    nights.write([*rows_of(3), {"id": "torn", "text": "whole now"}])
    done = nights.submit()
    assert done.exit_code == 0
    assert done.totals.rows == 4
    assert nights.results()["torn"]["response"] == nights.expected("torn", "whole now")
    whole(nights)


def test_ids_that_are_not_unique_are_refused(nights: Nights) -> None:
    nights.write([*rows_of(3), *rows_of(1)])
    with pytest.raises(InputError, match=r"'r0' in rows 0, 3.*unique"):
        nights.submit()
    nights.write(rows_of(3))
    nights.submit()
    nights.write([*rows_of(3), *rows_of(1)])
    with pytest.raises(InputError, match=r"'r0' in rows 0, 3.*unique"):
        nights.submit()


def test_a_row_without_an_id_is_an_error_row(nights: Nights) -> None:
    nights.write([*rows_of(3), {"id": None, "text": "who"}])
    assert nights.submit().totals.errors == {"bad_input": 1}
    assert "needs an id" in nights.results()[None]["error_message"]
    nights.write([*rows_of(4), {"id": None, "text": "who"}])
    assert nights.submit().changes == {"new": 1, "changed": 0, "failed": 0, "unchanged": 4, "vanished": 0}


def test_other_columns_are_refused_with_the_difference(nights: Nights) -> None:
    nights.write(rows_of(3))
    nights.submit()
    nights.write([{**row, "lang": "en"} for row in rows_of(4)])
    with pytest.raises(ResumeError, match="lang: none -> string"):
        nights.submit()


OPTIONAL: list[Any] = [3, True, 1.5, "text", ["a"], [1], {"a": 1, "b": [True]}]


@pytest.mark.parametrize("value", OPTIONAL, ids=repr)
@pytest.mark.parametrize("parquet", [False, True])
def test_a_night_in_which_an_optional_column_holds_nulls_alone_fits(nights: Nights, value: Any, parquet: bool) -> None:
    def write(rows: list[dict[str, Any]]) -> None:
        nights.write(rows)
        pq.write_table(pa.Table.from_pylist(rows), nights.folder / "rows.parquet")

    nights.settings["input__path"] = str(nights.folder / f"rows.{'parquet' if parquet else 'jsonl'}")
    write([{**row, "note": value} for row in rows_of(2)])
    nights.submit()
    write([{**row, "note": None} for row in rows_of(4)])
    assert nights.submit().changes == {"new": 2, "changed": 0, "failed": 0, "unchanged": 2, "vanished": 0}
    assert [row["note"] for row in nights.results().values()].count(None) == 2
    write([{**row, "note": value} for row in rows_of(5)])
    assert nights.submit().exit_code == 0
    assert nights.results()["r4"]["note"] == value
    whole(nights)


def scored(count: int, *scores: float) -> list[dict[str, Any]]:
    return [{**row, "score": score} for row, score in zip(rows_of(count), scores, strict=True)]


UNFIT = 2**53 + 1  # no double is equal to it


def test_ids_of_a_narrower_type_than_last_night_name_the_same_rows(nights: Nights) -> None:
    def named(*ids: float) -> list[dict[str, Any]]:
        return [{"id": id_, "text": f"text {id_}"} for id_ in ids]

    big = 1_700_000_000_000  # as a double it reads 1.7e+12
    nights.write(named(big + 0.5, big, 1, 2**53))
    nights.submit()
    nights.write(named(big, 1, 2**53, big + 7, UNFIT))
    assert nights.submit().changes == {"new": 2, "changed": 0, "failed": 0, "unchanged": 3, "vanished": 1}
    assert nights.ran == 1
    assert set(nights.results()) == {big + 0.5, big, 1, 2**53, big + 7, None}, "a double is no name for the last one"
    assert not nights.submit().worked


def test_ids_that_are_times_are_the_same_rows_in_another_resolution(nights: Nights) -> None:
    def write(unit: str) -> None:
        ids = pa.array([1, 2, 3], pa.timestamp("s")).cast(pa.timestamp(unit))
        pq.write_table(pa.table({"id": ids, "text": ["a", "b", "c"]}), nights.folder / "rows.parquet")

    nights.settings["input__path"] = str(nights.folder / "rows.parquet")
    write("ns")
    nights.submit()
    write("us")
    assert not nights.submit().worked


def test_a_value_that_the_results_cannot_hold_is_its_rows_error_before_anything_runs(nights: Nights) -> None:
    nights.write(scored(2, 1.5, 2.0))
    nights.submit()
    nights.write(scored(4, 7, 2, UNFIT, 3))
    done = nights.submit()
    assert (done.exit_code, nights.ran) == (3, 1) and done.totals.errors == {"bad_input": 1}
    results = nights.results()
    assert [results[f"r{row}"]["score"] for row in range(4)] == [1.5, 2.0, None, 3.0]
    assert (
        f"'score': Integer value {UNFIT}" in results["r2"]["error_message"]
        and "double" in results["r2"]["error_message"]
    )
    assert results["r3"]["response"] == nights.expected("r3", "text 3")
    assert not nights.submit().worked and nights.retry("sampling.max_tokens=4").totals.errors
    nights.write(scored(4, 7, 2, 4, 3))
    assert nights.submit().exit_code == 0 and nights.ran == 1
    assert nights.results()["r2"]["score"] == 4.0
    whole(nights)


def test_a_merge_that_met_a_value_without_a_place_goes_on(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    nights.write(scored(2, 1.5, 2.0))
    nights.submit()
    nights.write(scored(4, 1, 2, UNFIT, 3))
    with monkeypatch.context() as before:  # as it was: found when all was computed
        before.setattr(nightly, "fit_dataset", lambda dataset, columns, there: dataset)
        before.setattr(merge, "fit_table", lambda table, schema: table.cast(schema))
        with pytest.raises((pa.ArrowInvalid, ValueError)):
            nights.submit()
    assert is_merging(RunDir(nights.out))
    done = nights.submit()
    assert (nights.ran, done.totals.errors) == (0, {"bad_input": 1})
    row = nights.results()["r2"]
    assert (row["score"], row["response"]) == (None, nights.expected("r2", "text 2"))
    nights.submit()
    whole(nights)


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


def test_a_column_that_nobody_reads_fails_no_row_and_late_ones_are_told(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulkrun.data.jsonl.SAMPLE_LINES", 16)
    told: list[str] = []
    monkeypatch.setattr(Silent, "phase", lambda view, text: told.append(text))
    nights.settings["input__columns"] = ["id", "nest"]
    rows = [{**row, "odd": 1, "nest": {"a": 1}} for row in rows_of(18)]
    nights.write(rows)
    nights.submit()
    nights.write([*rows, {"id": "r18", "text": "text 18", "odd": 0.5, "nest": {"a": 1, "late": 2}}])
    done = nights.submit()
    assert (done.exit_code, nights.ran) == (0, 1)
    assert [text for text in told if "'nest.late' is not in the output" in text]
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
        submit_module.submit(nights.spec(), Silent(), **given)
    status = read_status(run)
    assert status.state == "completed" and status.update is not None and status.update.rows_done
    refresh = " --full-refresh" if full_refresh else ""
    assert status.next_command == f"bulkrun submit 'a job.yaml' --set run.workers=2{refresh}"
    assert status.update.next_command == status.next_command
    assert last_events(run, 100)[before[1]]["event"] == "started"
    assert [path.name for path in nights.out.iterdir()] == before[0]


def test_what_a_kill_leaves_of_a_merged_night_is_no_night_under_way(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(3))
    nights.submit()
    nights.write(rows_of(5))
    run, kept, finish = RunDir(nights.out), nights.folder / "kept", merge._finish

    def finish_and_keep(*given: Any) -> RunTotals:
        totals = finish(*given)
        shutil.copytree(run.staged.root, kept)
        return totals

    monkeypatch.setattr(merge, "_finish", finish_and_keep)
    nights.submit()
    shutil.copytree(kept, run.staged.root)
    run.staged.run_json.unlink()  # the removal came as far as this
    status = read_status(run)
    assert (status.state, status.update) == ("completed", None)
    whole(nights)
    assert compact(run, grace_s=0).rows == 5
    assert not nights.submit().worked


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


def test_results_that_have_no_keys_are_not_taken_for_a_night(nights: Nights) -> None:
    nights.write(rows_of(3))
    nights.submit(run__incremental=False)
    with pytest.raises(ResumeError, match=r"run.incremental.*\n.*--fresh"):
        nights.submit()


def test_plan_says_what_would_change_and_changes_nothing(nights: Nights) -> None:
    nights.write(rows_of(5))
    nights.submit()
    before = sorted(path.name for path in nights.out.rglob("*"))
    rows = [*rows_of(4), {"id": "r4", "text": "other"}, {"id": "new", "text": "x"}]
    nights.write(rows)
    report, changes = plan_job(nights.spec())
    assert changes == {"new": 1, "changed": 1, "failed": 0, "unchanged": 4, "vanished": 0}
    assert report.counters.rows == 2
    assert sorted(path.name for path in nights.out.rglob("*")) == before


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


@pytest.mark.parametrize("key", ["sampling__max_tokens", "prompt__template"])
def test_a_full_refresh_of_many_nights_runs_each_row_once_whatever_the_input_does(nights: Nights, key: str) -> None:
    changed: dict[str, Any] = {key: {"sampling__max_tokens": 5, "prompt__template": "Say  {{ text }}"}[key]}
    nights.write(rows_of(60))
    nights.submit()
    for night in range(1, 4):
        nights.write(rows_of(60 + night))
        stop_at(nights, 15)
        with pytest.raises(KeyboardInterrupt):
            nights.submit(flags={"full_refresh": True}, **changed)
    with pytest.raises(ResumeError, match="--full-refresh runs every row with these"):
        nights.submit(**changed)
    nights.refuse = lambda request: False
    nights.submit(flags={"full_refresh": True}, **changed)
    assert 0 < nights.ran <= 63 - 3 * (15 - 5), "of each night but what a kill finds in the engine"
    assert set(nights.results()) == {row["id"] for row in rows_of(63)}
    assert not nights.submit(**changed).worked
    whole(nights)


def test_a_full_refresh_with_the_same_settings_runs_every_row(nights: Nights) -> None:
    nights.write(rows_of(9))
    nights.submit()
    assert nights.submit(flags={"full_refresh": True}).worked and nights.ran == 9


def test_a_full_refresh_that_has_nothing_to_run_takes_the_new_settings(nights: Nights) -> None:
    nights.write(rows_of(3))
    nights.submit()
    changed = {"run__on_too_long": "truncate_left"}  # nothing is too long today
    with pytest.raises(ResumeError, match="--full-refresh"):
        nights.submit(**changed)
    nights.submit(flags={"full_refresh": True}, **changed)
    assert nights.ran == 0
    assert not nights.submit(**changed).worked, "the settings are those of the results now"
    nights.write(rows_of(4))
    assert nights.submit(**changed).totals.rows == 4 and nights.ran == 1
    whole(nights)


def test_a_full_refresh_with_another_model_is_continued_by_the_same_command(nights: Nights) -> None:
    nights.write(rows_of(60))
    nights.submit()
    stop_at(nights, 30)
    with pytest.raises(KeyboardInterrupt):
        nights.submit(flags={"full_refresh": True}, engine__load_format="dummy")
    nights.refuse = lambda request: False
    done = nights.submit(flags={"full_refresh": True}, engine__load_format="dummy")
    assert done.changes is not None and done.changes["changed"] == 60
    assert 0 < nights.ran <= 35
    assert not nights.submit(engine__load_format="dummy").worked
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


def test_totals_of_another_night_are_refused_before_anything_runs(nights: Nights) -> None:
    nights.write(rows_of(20))
    nights.submit()
    old = (nights.out / "_SUCCESS").read_bytes()
    nights.write(edited(21, "a"))
    nights.submit()
    (nights.out / "_SUCCESS").write_bytes(old)
    nights.write(rows := edited(22, "b"))
    with pytest.raises(RunError, match=r"is of generation 1, .*_SUCCESS of an earlier one"):
        nights.submit()
    assert nights.ran == 0
    (nights.out / "_SUCCESS").unlink()
    nights.submit()
    is_up_to_date(nights, rows)


def test_an_answer_whose_part_is_gone_is_not_dropped_in_silence(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(20))
    nights.submit()
    nights.write(rows := edited(20, "a"))

    def lose_a_part(run: RunDir) -> list[int]:
        next(path for path in run.parts().values() if 0 in pq.read_table(path)["row"].to_pylist()).unlink()
        return begin_merge(run)

    with monkeypatch.context() as meanwhile, pytest.raises(RunError, match=r"row 0, .* is in no part.*_SUCCESS"):
        meanwhile.setattr(merge, "begin_merge", lose_a_part)
        nights.submit()
    (nights.out / "_SUCCESS").unlink()
    assert nights.submit().exit_code == 0
    is_up_to_date(nights, rows)


def stop_at(nights: Nights, generations: int) -> None:
    """Interrupt the fake engine after so many requests have ended."""
    seen: list[str] = []

    def refuse(request: Request) -> bool:
        if request.request_id not in seen:
            seen.append(request.request_id)
        if len(seen) > generations:
            raise KeyboardInterrupt
        return False

    nights.refuse = refuse


TEXTS = st.dictionaries(st.sampled_from([f"r{number}" for number in range(12)]), st.integers(0, 3), max_size=12)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXTS.filter(bool), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_after_any_nights_the_results_are_those_of_one_run_over_the_last_input(
    tmp_path_factory: pytest.TempPathFactory, inputs: list[dict[str, int]], order: random.Random
) -> None:
    nights = Nights(tmp_path_factory.mktemp("nights"), {"run__on_vanished": "drop", "output__rows_per_file": 3})
    last: dict[str, int] = {}
    for texts in inputs:
        names = order.sample(sorted(texts), len(texts))
        nights.write([{"id": name, "text": f"v{texts[name]}"} for name in names])
        nights.submit()
        new_prompts = {name: text for name, text in texts.items() if last.get(name) != text}
        assert nights.ran <= len(new_prompts)
        last = texts
        answers = {name: row["response"] for name, row in nights.results().items()}
        assert answers == {name: nights.expected(name, f"v{text}") for name, text in texts.items()}
    whole(nights)


def test_a_night_of_an_empty_file_changes_nothing_and_drops_nothing(nights: Nights) -> None:
    nights.write([{"id": "a", "text": "one", "size": 1}, {"id": "b", "text": "two", "size": 2}])
    nights.submit()
    before = nights.results()
    (nights.folder / "rows.jsonl").write_text("")
    assert nights.submit().exit_code == 0 and nights.results() == before
    with pytest.raises(InputError, match="no rows at all"):
        nights.submit(run__on_vanished="drop")
    assert nights.results() == before
    nights.write([{"id": "a", "text": "one", "size": 1}, {"id": "c", "text": "three", "size": 3}])
    assert nights.submit().exit_code == 0 and set(nights.results()) == {"a", "b", "c"}


def test_a_first_night_without_rows_is_gone_on_with(nights: Nights) -> None:
    (nights.folder / "rows.jsonl").write_text("")
    assert nights.submit().exit_code == 0
    nights.write([{"id": "a", "text": "one"}])
    assert nights.submit().exit_code == 0 and set(nights.results()) == {"a"}

"""Incremental nights: only what is new, changed or failed runs, and each id is there once."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.errors import ErrorRateExceeded, InputError, ResumeError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.update import merge
from bulkrun.job.update.compact import compact
from bulkrun.job.views.status import read_status
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.runs.preview import plan_job
from tests.job.fake_engine import FakeEngine
from tests.launch.nights import Nights, rows_of, whole


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


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
    assert done.worked and nights.ran == 0 and done.totals.rows == 10 and done.totals.updates[-1]["whole"]
    assert set(nights.results()) == {f"r{number}" for number in range(10)}
    whole(nights)
    compact(RunDir(nights.out), grace_s=0)
    status = read_status(RunDir(nights.out))
    assert (status.rows_total, status.rows_done, status.shards_total) == (10, 10, 1)
    nights.write([*rows_of(10), {"id": "late", "text": "x"}])
    done = nights.submit(run__on_vanished="drop")
    assert nights.results()["late"]["row"] == 12
    assert [update["kind"] for update in done.totals.updates] == ["incremental", "compact", "incremental"]


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
    # The limit is asked while rows are left: after each step.
    monkeypatch.setattr("bulkrun.job.work.pace._BUSY_PAUSE_S", (0, 0))
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


def test_plan_says_what_would_change_and_changes_nothing(nights: Nights) -> None:
    nights.write(rows_of(5))
    nights.submit()
    before = sorted(path.name for path in nights.out.rglob("*"))
    rows = [*rows_of(4), {"id": "r4", "text": "other"}, {"id": "new", "text": "x"}]
    nights.write(rows)
    report, changes, *_ = plan_job(nights.spec())
    assert changes == {"new": 1, "changed": 1, "failed": 0, "unchanged": 4, "vanished": 0}
    assert report.counters.rows == 2
    assert sorted(path.name for path in nights.out.rglob("*")) == before


TEXTS = st.dictionaries(st.sampled_from([f"r{number}" for number in range(12)]), st.integers(0, 3), max_size=12)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("of", ["batch", "messages", "prompt"])
def test_an_empty_file_is_no_other_input_where_columns_tell_the_prompt(nights: Nights, of: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    row = {"batch": batch, "messages": {"id": "a", "messages": body["messages"]}, "prompt": {"id": "a", "prompt": "x"}}
    nights.settings |= {"prompt": {}, "input__id": "custom_id" if of == "batch" else "id"}
    nights.write([row[of]])
    nights.submit()
    nights.write([])
    done = nights.submit()
    assert (done.exit_code, done.worked, done.totals.rows) == (0, False, 1)
    nights.write([row[of]])
    assert not nights.submit().worked


def test_a_first_night_without_rows_is_gone_on_with(nights: Nights) -> None:
    (nights.folder / "rows.jsonl").write_text("")
    assert nights.submit().exit_code == 0
    nights.write([{"id": "a", "text": "one"}])
    assert nights.submit().exit_code == 0 and set(nights.results()) == {"a"}

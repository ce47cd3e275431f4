"""--full-refresh: every row once with the settings of today, and what was finished stays finished."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import ResumeError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update import merge
from bulkrun.job.update.staging import begin_merge
from bulkrun.launch.runs import nightly
from tests.launch.nights import Nights, after, rows_of, stop_at, whole


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


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


def test_a_refresh_that_was_killed_while_it_merged_is_not_undone_by_a_night_with_the_settings_of_before(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"sampling__max_tokens": 5}
    nights.write(rows_of(9))
    nights.submit()

    def killed(run: RunDir) -> list[int]:
        begin_merge(run)
        raise KeyboardInterrupt

    with monkeypatch.context() as meanwhile, pytest.raises(KeyboardInterrupt):
        meanwhile.setattr(merge, "begin_merge", killed)
        nights.submit(flags={"full_refresh": True}, **changed)
    with pytest.raises(ResumeError, match=r"sampling\.max_tokens"):
        nights.submit()
    assert nights.ran == 0 and not nights.submit(**changed).worked
    answers = {name: row["response"] for name, row in nights.results().items()}
    assert answers == {row["id"]: nights.expected(row["id"], row["text"], **changed) for row in rows_of(9)}
    whole(nights)


def test_a_night_that_waited_for_a_refresh_is_held_against_its_settings(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(9))
    nights.submit()
    refresh = partial(nights.submit, flags={"full_refresh": True}, sampling__max_tokens=5)
    monkeypatch.setattr(nightly, "hold", after(refresh, monkeypatch))
    with pytest.raises(ResumeError, match=r"sampling\.max_tokens"):
        nights.submit()
    whole(nights)


def test_a_full_refresh_with_the_same_settings_runs_every_row(nights: Nights) -> None:
    nights.write(rows_of(9))
    nights.submit()
    assert nights.submit(flags={"full_refresh": True}).worked and nights.ran == 9
    with pytest.raises(ResumeError, match="cannot stand side by side"):
        nights.submit(flags={"full_refresh": True}, sampling__n=2)


@pytest.mark.parametrize(
    "changed",
    [
        {"sampling__logprobs": 0},
        {"sampling__best_of": 2, "sampling__temperature": 1.0},
        {"sampling__structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    ],
    ids=["logprobs", "best of", "parsed"],
)
def test_a_full_refresh_is_not_named_where_other_columns_do_not_let_it(nights: Nights, changed: dict[str, Any]) -> None:
    nights.write(rows_of(3))
    nights.submit()
    with pytest.raises(ResumeError, match="cannot stand side by side: --fresh") as refused:
        nights.submit(**changed)
    assert "--full-refresh" not in str(refused.value)
    with pytest.raises(ResumeError, match="the columns are not those of the results there"):
        nights.submit(flags={"full_refresh": True}, **changed)
    nights.write(rows_of(0))
    nights.submit(flags={"fresh": True})
    with pytest.raises(ResumeError, match="--full-refresh runs every row"):  # there are no rows yet to stand beside
        nights.submit(**changed)
    assert not nights.submit(flags={"full_refresh": True}, **changed).totals.rows


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

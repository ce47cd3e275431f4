"""Nights over rows that the plan refuses: their errors are those of tonight's input, and no success goes for them."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from bulkrun.job.plan.row_key import row_keys, told_by
from bulkrun.job.update import diff
from tests.job.fake_engine import FakeEmbedder
from tests.launch.nights import Nights, rows_of, whole


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_a_refused_row_that_changed_is_refused_anew_by_tonights_words(nights: Nights) -> None:
    nights.settings["prompt__template"] = "Say {{ text }} {{ more }}"
    nights.write([{"id": "a", "text": None, "more": "x"}, {"id": "b", "text": "u", "more": "v"}])
    assert nights.submit().exit_code == 3
    nights.write([{"id": "a", "text": "now there", "more": None}, {"id": "b", "text": "u", "more": "v"}])
    done = nights.submit()
    assert done.changes == {"new": 0, "changed": 1, "failed": 0, "unchanged": 1, "vanished": 0}
    assert done.exit_code == 3 and nights.ran == 0
    row = nights.results()["a"]
    assert (row["text"], row["more"]) == ("now there", None) and "prints 'more'" in row["error_message"]
    assert not nights.submit().worked
    whole(nights)


def test_rows_without_an_id_are_those_of_tonights_broken_lines(nights: Nights) -> None:
    def told() -> list[str]:
        rows = duckdb.sql(f"SELECT error_message FROM '{nights.out}/*.parquet' WHERE id IS NULL").fetchall()
        return sorted(message.rpartition("/")[2][:12] for (message,) in rows)

    nights.write([*rows_of(1), '{"id": "r1', *rows_of(1, 2), *rows_of(1, 3)])
    nights.submit()
    assert told() == ["rows.jsonl:2"]
    nights.write([*rows_of(3), '{"id": "r3'])
    assert nights.submit().exit_code == 3 and nights.ran == 1
    assert told() == ["rows.jsonl:4"]
    nights.write(['{"id": "new', *rows_of(3), '{"id": "r3'])
    assert nights.submit().exit_code == 3 and nights.ran == 0
    assert told() == ["rows.jsonl:1", "rows.jsonl:5"]
    assert not nights.submit().worked
    nights.write(rows_of(4))
    assert nights.submit().exit_code == 0 and told() == []
    whole(nights)


def test_a_success_that_a_retry_made_of_a_refused_row_stays(nights: Nights) -> None:
    nights.write([*rows_of(2), {"id": "empty", "text": None}, {"id": "other", "text": None}])
    nights.submit()
    nights.refuse = lambda request: request.request_id == "1:0"
    assert nights.retry("prompt.template=Say {{ text or id }}").totals.errors == {"nan_logits": 1}
    nights.refuse = lambda request: False
    nights.write([*rows_of(2), {"id": "empty", "text": None}, {"id": "other", "text": None}])
    done = nights.submit()
    assert done.changes == {"new": 0, "changed": 0, "failed": 1, "unchanged": 3, "vanished": 0}
    assert done.totals.errors == {"bad_input": 1} and nights.results()["empty"]["response"]
    assert not nights.submit().worked
    whole(nights)


LONG = "word " * 200


@pytest.fixture
def vectors(tmp_path: Path) -> Nights:
    """A job that embeds, whose texts do not stand in its results."""
    settings = {"task": "embed", "sampling": {}, "prompt": {"column": "text"}, "embedding": {"pooling": "mean"}}
    made = Nights(tmp_path, settings | {"engine": {"max_model_len": 64}, "input__columns": ["id"]})
    made.make_engine = lambda: FakeEmbedder(4)
    return made


def test_a_success_that_a_retry_made_goes_when_its_text_is_another_that_is_refused_alike(vectors: Nights) -> None:
    rows = [*rows_of(2), {"id": "long", "text": f"{LONG} a"}]
    vectors.write(rows)
    assert vectors.submit().totals.errors == {"too_long": 1}
    assert vectors.retry("run.on_too_long=truncate_right").exit_code == 0
    vectors.write(rows[::-1])
    assert not vectors.submit().worked
    vectors.write([*rows_of(2), {"id": "long", "text": f"{LONG} b"}])
    done = vectors.submit()
    assert done.changes is not None and done.changes["changed"] == 1 and done.totals.errors == {"too_long": 1}
    assert vectors.results()["long"]["embedding"] is None
    assert vectors.retry("run.on_too_long=truncate_right").exit_code == 0
    assert not vectors.submit().worked
    whole(vectors)


def test_a_success_that_a_retry_made_with_other_settings_goes_with_a_full_refresh(vectors: Nights) -> None:
    vectors.write([*rows_of(2), {"id": "long", "text": LONG}])
    vectors.submit()
    assert vectors.retry("run.on_too_long=truncate_right").exit_code == 0
    changed = {"embedding": {"pooling": "last"}}
    done = vectors.submit(flags={"full_refresh": True}, **changed)
    assert done.changes is not None and done.changes["changed"] == 3 and done.totals.errors == {"too_long": 1}
    assert not vectors.submit(**changed).worked
    whole(vectors)


def test_refused_rows_whose_keys_are_of_an_earlier_bulkrun_stay(
    vectors: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys were of the columns of the results alone, as those that a plan makes are."""
    vectors.write([*rows_of(2), {"id": "long", "text": LONG}])
    vectors.submit()
    with monkeypatch.context() as before:
        before.setattr(diff, "row_keys", lambda rows, salt: row_keys(told_by(rows, ["id"]), salt))
        assert vectors.retry("run.on_too_long=truncate_right").exit_code == 0
    assert not vectors.submit().worked

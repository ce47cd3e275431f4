"""find_changes over two parts made by hand: why a row runs, and what becomes of one that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.inputs.reader import open_input
from bulkrun.data.results.parts import PartInfo, write_part
from bulkrun.data.results.schema import output_schema
from bulkrun.errors import InputError
from bulkrun.job.plan.plan_input import PlanInput
from bulkrun.job.plan.result_columns import result_fields
from bulkrun.job.plan.row_key import row_keys
from bulkrun.job.store.fingerprint import KeySalt
from bulkrun.job.update.diff import Changes, Reasons, find_changes
from tests.job.plan.planning import BOS, CharacterCodec, job, write_jsonl

SALT = KeySalt("what all rows have in common")
REFUSED = "column 'text': null is not text"
Row = tuple[str | None, str, str | None]  # id, text (empty: none), error code
RESULTS: list[Row] = [("a", "one", None), ("b", "two", "timeout"), ("c", "three", None), ("d", "", "bad_input")]


def key_of(name: str | None, text: str) -> str:
    """As a plan would make it: of the tokens that run, or of what was refused."""
    columns = {
        "token_ids": pa.array([[BOS, *map(ord, text)] if text else None], pa.list_(pa.int32())),
        "overrides": pa.array([None], pa.string()),
        "error_code": pa.array([None if text else "bad_input"], pa.string()),
        "passthrough": pa.array([{"id": name, "text": text or None}]),
    }
    return row_keys(pa.RecordBatch.from_pydict(columns), SALT)[0]


class Job:
    """An incremental job in a folder; `results` lie in two parts."""

    def __init__(self, folder: Path, results: list[Row]) -> None:
        self._folder = folder
        half = len(results) // 2
        self._parts = [
            self._write(0, list(enumerate(results))[:half]),
            self._write(1, list(enumerate(results))[half:]),
        ]

    def _spec(self, **run: Any) -> Any:
        path = self._folder / "in.jsonl"
        return job(path, input={"path": str(path), "id": "id"}, run={"incremental": True, **run})

    def _write(self, number: int, rows: list[tuple[int, Row]]) -> Path:
        schema = output_schema(pa.schema([("id", pa.string())]), result_fields(self._spec()))
        columns = [
            {"id": name, "row": row, "sample": 0, "error_code": code, "row_key": key_of(name, text)}
            | {"error_message": None if text else REFUSED, "finish_reason": "stop"}
            | {"prompt_tokens": 0, "completion_tokens": 0}
            for row, (name, text, code) in rows
        ]
        path = self._folder / f"part-{number:05d}.parquet"
        info = PartInfo("run", "plan", number, "first", len(rows), len(rows), {}, 0, 0, {})
        write_part(path, pa.Table.from_pylist(columns, schema=schema), info)
        return path

    def changes(self, today: list[tuple[str | None, str]], reasons: Reasons | None = None, **run: Any) -> Changes:
        write_jsonl(self._folder / "in.jsonl", [{"id": name, "text": text or None} for name, text in today])
        spec = self._spec(**run)
        with open_input(spec.input.path) as dataset:
            source = PlanInput(spec, dataset, CharacterCodec(), 10_000)
            return find_changes(source, self._parts, SALT, len(RESULTS), reasons or Reasons(), self._folder)


@pytest.fixture
def nightly(tmp_path: Path) -> Job:
    return Job(tmp_path, RESULTS)


def picked(changes: Changes) -> list[tuple[int, int, bool]]:
    """Place in the input, result row, whether an old success stays."""
    rows = [row for batch in changes.read_picks() for row in batch.to_pylist()]
    return [(row["position"], row["row"], row["keep_success"]) for row in rows]


def test_new_changed_and_failed_rows_run_and_the_others_do_not(nightly: Job) -> None:
    found = nightly.changes([("x", "new"), ("c", "other"), ("b", "two"), ("a", "one"), ("d", ""), ("y", "new too")])
    assert found.counts == {"new": 2, "changed": 1, "failed": 1, "unchanged": 2, "vanished": 0}
    assert picked(found) == [(0, 4, False), (1, 2, False), (2, 1, True), (5, 5, False)]
    assert (found.rows, found.rows_today, found.dropped) == (4, 6, [])


def test_a_row_that_was_refused_runs_once_it_says_something_else(nightly: Job) -> None:
    same = [("a", "one"), ("b", "two"), ("c", "three")]
    assert nightly.changes([*same, ("d", "")]).counts["unchanged"] == 3, "it would be refused again"
    assert picked(nightly.changes([*same, ("d", "four")]))[-1] == (3, 3, False)


@pytest.mark.parametrize(("drop", "dropped"), [(True, [1, 2]), (False, [])])
def test_results_of_rows_that_are_gone_are_dropped_only_where_that_is_asked(
    nightly: Job, drop: bool, dropped: list[int]
) -> None:
    found = nightly.changes([("a", "one"), ("d", "")], Reasons(drop_vanished=drop))
    assert (found.counts["vanished"], found.dropped, found.rows) == (2, dropped, 0)


def test_what_a_limit_left_unread_is_not_gone(nightly: Job) -> None:
    found = nightly.changes([("a", "one"), ("b", "two")], Reasons(drop_vanished=True), limit=1)
    assert (found.vanished, found.beyond_limit, found.dropped) == (0, 3, [])


def test_everything_runs_again_if_asked_but_for_what_would_be_refused_again(nightly: Job) -> None:
    found = nightly.changes([("a", "one"), ("b", "two"), ("c", "three"), ("d", "")], Reasons(everything=True))
    assert picked(found) == [(0, 0, False), (1, 1, False), (2, 2, False)]


@pytest.mark.parametrize(("codes", "rows"), [((), [1, 3]), (("bad_input",), [3]), (("too_long",), [])])
def test_a_retry_runs_rows_with_an_error_whatever_else_changed(
    nightly: Job, codes: tuple[str, ...], rows: list[int]
) -> None:
    today = [("a", "other"), ("b", "two"), ("c", "three"), ("d", "")]
    found = nightly.changes(today, Reasons(failed_only=True, codes=codes))
    assert [row for _, row, _ in picked(found)] == rows and found.dropped == []


def test_rows_without_an_id_are_told_apart_by_their_order_and_go_with_their_lines(tmp_path: Path) -> None:
    nightly = Job(tmp_path, [(None, "", "bad_input"), ("a", "one", None), (None, "", "bad_input")])
    found = nightly.changes([("a", "one"), (None, "")])
    assert (found.counts["unchanged"], found.counts["vanished"], found.dropped) == (2, 1, [2])
    assert nightly.changes([("a", "one"), (None, "")], Reasons(failed_only=True)).dropped == [], "a retry drops nothing"


def test_two_rows_of_one_id_are_refused_with_their_places(nightly: Job) -> None:
    with pytest.raises(InputError, match=r"column 'id' names two rows alike: 'a' in rows 0, 2"):
        nightly.changes([("a", "one"), ("b", "two"), ("a", "three")])

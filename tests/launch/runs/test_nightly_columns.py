"""Nights whose columns and values are not those of the results: what fits, what is refused, what is one row's error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.errors import ResumeError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update import merge
from bulkrun.job.update.staging import is_merging
from bulkrun.launch.runs import update_input
from tests.launch.nights import Nights, Silent, rows_of, whole


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_other_columns_are_refused_with_the_difference(nights: Nights) -> None:
    nights.write(rows_of(3))
    nights.submit()
    nights.write([{**row, "lang": "en"} for row in rows_of(4)])
    with pytest.raises(ResumeError, match="lang: none -> string"):
        nights.submit()


def test_another_type_of_parsed_outputs_is_refused_with_what_can_be_done(nights: Nights) -> None:
    def structured(kind: str) -> dict[str, Any]:
        return {"json": {"type": "object", "properties": {"a": {"type": kind}}}}

    nights.settings["sampling__structured_outputs"] = structured("integer")
    nights.write(rows_of(3))
    nights.submit()
    nights.settings["sampling__structured_outputs"] = structured("number")
    with pytest.raises(ResumeError, match=r"parsed: struct<a: int64> -> struct<a: double>\n--fresh moves the old"):
        nights.submit(flags={"full_refresh": True})


OPTIONAL: list[Any] = [
    3,
    True,
    "text",
    ["a"],
    {"a": 1, "b": [True]},
    *(pytest.param(x, marks=pytest.mark.slow) for x in (1.5, [1])),
]


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


def test_times_of_another_zone_are_the_same_times(nights: Nights) -> None:
    def write(zone: str, *seconds: int) -> None:
        times = pa.array(seconds, pa.timestamp("s", zone)).cast(pa.timestamp("us", zone))
        names = [f"r{second}" for second in seconds]
        pq.write_table(pa.table({"id": names, "text": names, "at": times}), nights.folder / "rows.parquet")

    nights.settings["input__path"] = str(nights.folder / "rows.parquet")
    write("America/New_York", 1, 2)
    nights.submit()
    write("UTC", 1, 2, 3)
    assert nights.submit().changes == {"new": 1, "changed": 0, "failed": 0, "unchanged": 2, "vanished": 0}
    assert {row["at"].timestamp() for row in nights.results().values()} == {1, 2, 3}
    assert not nights.submit().worked
    whole(nights)


LARGE: dict[str, tuple[Any, pa.DataType, pa.DataType]] = {  # a value, its type last night and tonight
    "words": ("a", pa.string(), pa.large_string()),
    "bytes": (b"a", pa.binary(), pa.large_binary()),
    "list": (["a"], pa.list_(pa.string()), pa.large_list(pa.large_string())),
    "mixed": (["a"], pa.large_list(pa.string()), pa.list_(pa.large_string())),
    "inside": ({"x": [1]}, pa.struct([("x", pa.list_(pa.int64()))]), pa.struct([("x", pa.large_list(pa.int32()))])),
}


def test_large_texts_and_lists_are_texts_and_lists(nights: Nights) -> None:
    def write(count: int, tonight: bool) -> None:
        rows = pa.Table.from_pylist(rows_of(count))
        for name, (value, *kinds) in LARGE.items():
            rows = rows.append_column(name, pa.array([value] * count, kinds[tonight]))
        pq.write_table(rows, nights.folder / "rows.parquet")

    nights.settings["input__path"] = str(nights.folder / "rows.parquet")
    write(2, tonight=False)
    nights.submit()
    write(3, tonight=True)
    assert nights.submit().changes == {"new": 1, "changed": 0, "failed": 0, "unchanged": 2, "vanished": 0}
    wanted = {name: value for name, (value, *_) in LARGE.items()}
    assert [{name: row[name] for name in LARGE} for row in nights.results().values()] == [wanted] * 3
    whole(nights)


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
        before.setattr(update_input, "fit_dataset", lambda dataset, columns, there: dataset)
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


def test_a_column_that_nobody_reads_fails_no_row_and_late_ones_are_told(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 16)
    told: list[str] = []
    monkeypatch.setattr(Silent, "phase", lambda view, text: told.append(text))
    nights.settings["input__columns"] = ["id", "nest"]
    rows = [{**row, "odd": 1, "nest": {"a": 1}} for row in rows_of(18)]
    nights.write(rows)
    nights.submit()
    nights.write([*rows, {"id": "r18", "text": "text 18", "odd": 0.5, "nest": {"a": 1, "late": 2}}])
    done = nights.submit()
    assert (done.exit_code, nights.ran) == (0, 1)
    assert [text for text in told if "'nest.late' is neither in prompts nor in the output" in text]
    whole(nights)

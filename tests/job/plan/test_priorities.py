"""`input.priority`: better rows run first, within a shard and across them; a value that is none is a row's error."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.shard_work import open_shard
from tests.job.plan.planning import job, make_plan, read_rows, read_shards, write_jsonl, write_parquet


def _table(root: Path, priorities: list[int | None]) -> Path:
    """Prompts whose lengths say nothing of their priorities."""
    texts = [f"{'long ' * (row * 7 % 5)}prompt {row}" for row in range(len(priorities))]
    return write_parquet(root / "in.parquet", {"text": texts, "urgency": priorities})


def test_rows_run_by_priority_first_whatever_their_shard(tmp_path: Path) -> None:
    priorities: list[int | None] = [(row * 5) % 4 - 1 for row in range(40)]
    path = _table(tmp_path, priorities)
    make_plan(tmp_path / "run", job(path, input={"priority": "urgency"}, output={"rows_per_file": 7}))
    ran = [
        row["priority"]
        for _, rows in read_shards(tmp_path / "run")
        for row in sorted(rows, key=lambda row: row["order"])
    ]
    assert ran == sorted(priorities) and len(set(ran)) == 4  # type: ignore[type-var]


def test_requests_carry_the_priority_of_their_row(tmp_path: Path) -> None:
    priorities = [3, None, -2, 0, 3]
    spec = job(_table(tmp_path, priorities), input={"priority": "urgency", "columns": ["text"]})
    make_plan(tmp_path / "run", spec)
    work = open_shard(RunDir(tmp_path / "run"), 0, spec.sampling)
    asked = [(generation.rows[0], generation.request.priority) for generation in work.generations]
    assert dict(asked) == {row: priority or 0 for row, priority in enumerate(priorities)}
    assert [priority for _, priority in asked] == [-2, 0, 0, 3, 3]


def test_equal_prompts_of_one_shard_are_generated_once_with_the_best_priority(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "same", "p": priority} for priority in (4, 1, 2)])
    spec = job(path, input={"priority": "p"})
    make_plan(tmp_path / "run", spec)
    (generation,) = open_shard(RunDir(tmp_path / "run"), 0, spec.sampling).generations
    assert (sorted(generation.rows), generation.request.priority) == ([0, 1, 2], 1)


@pytest.mark.parametrize("rows_per_file", [None, 4])
def test_the_plan_counts_the_generations_that_run(tmp_path: Path, rows_per_file: int | None) -> None:
    texts = [{"text": f"prompt {row % 3}", "p": row % 2} for row in range(30)] + [{"text": 5, "p": "none"}]
    spec = job(
        write_jsonl(tmp_path / "in.jsonl", texts), input={"priority": "p"}, output={"rows_per_file": rows_per_file}
    )
    counters = make_plan(tmp_path / "run", spec).counters
    run = RunDir(tmp_path / "run")
    asked = [
        one.request for shard in range(counters.shards) for one in open_shard(run, shard, spec.sampling).generations
    ]
    assert counters.duplicate_prompts == counters.rows - len(asked) - counters.errors["bad_input"]
    assert counters.unique_prompt_tokens == sum(len(request.prompt_token_ids) for request in asked)
    assert len(asked) == 3 if rows_per_file is None else len(asked) > 6


def test_without_the_key_all_are_equal(tmp_path: Path) -> None:
    make_plan(tmp_path / "run", job(_table(tmp_path, [5, 1, 3])))
    assert [row["priority"] for row in read_rows(tmp_path / "run")] == [0, 0, 0]


@pytest.mark.parametrize("value", [1.5, "high", True, 2**40, -(2**40), [1]])
def test_a_priority_that_is_no_integer_is_an_error_of_its_row(value: object, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "a", "p": value}])
    make_plan(tmp_path / "run", job(path, input={"priority": "p"}))
    (row,) = read_rows(tmp_path / "run")
    assert row["error_code"] == "bad_input"
    assert "input.priority: column 'p' is" in row["error_message"]


def test_a_column_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"input\.priority: the input has no column 'urgancy'; did you mean 'urg"):
        make_plan(tmp_path / "run", job(_table(tmp_path, [1]), input={"priority": "urgancy"}))


def test_a_sum_of_duckdb_is_a_priority_though_it_is_a_decimal(tmp_path: Path) -> None:
    path, sums = tmp_path / "in.parquet", [Decimal(7), Decimal("-1"), None]
    pq.write_table(pa.table({"text": ["a", "b", "c"], "p": pa.array(sums, pa.decimal128(38, 0))}), path)
    make_plan(tmp_path / "run", job(path, input={"priority": "p"}))
    assert [row["priority"] for row in read_rows(tmp_path / "run")] == [7, -1, 0]


def test_integers_that_a_null_or_a_fraction_made_doubles_of_are_priorities(tmp_path: Path) -> None:
    doubles = write_parquet(tmp_path / "nulls.parquet", {"text": ["a", "b", "c"], "p": [3.0, None, -1.0]})
    fraction = write_jsonl(tmp_path / "in.jsonl", [{"text": "a", "p": number} for number in (3, 0.5, -1)])
    (tmp_path / "pandas.csv").write_text("text,p\na,3.0\nb,\nc,-1.\nd,2.5\n")
    for name, path in (("nulls", doubles), ("fraction", fraction), ("csv", tmp_path / "pandas.csv")):
        make_plan(tmp_path / name, job(path, input={"priority": "p"}))
        rows = read_rows(tmp_path / name)
        assert [rows[0]["priority"], rows[2]["priority"]] == [3, -1]
        failed = [row["row"] for row in rows if row["error_code"] == "bad_input"]
        assert failed == {"nulls": [], "fraction": [1], "csv": [3]}[name]


def test_a_priority_that_python_cannot_hold_is_an_error_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "p": pa.array([None, 10**8], pa.date32())}), path)
    make_plan(tmp_path / "run", job(path, input={"priority": "p", "columns": ["text"]}))
    assert [row["error_code"] for row in read_rows(tmp_path / "run")] == [None, "bad_input"]


def test_text_that_is_an_integer_is_a_priority_because_csv_has_only_text(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text,p\na,2\nb, -7\nc,x\nd,1.5\ne,99999999999\n")
    make_plan(tmp_path / "run", job(path, input={"priority": "p"}))
    rows = read_rows(tmp_path / "run")
    assert [row["priority"] for row in rows[:2]] == [2, -7]
    assert [row["error_code"] for row in rows] == [None, None, "bad_input", "bad_input", "bad_input"]

"""Rows that name an adapter: each shard is of one, and what no row can run with is an error row that wants none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.plan.report import PlanReport
from bulkrun.job.prompts.own_values import own_values
from tests.job.plan.planning import job, make_plan, read_rows, read_shards, write_jsonl, write_parquet

ADAPTERS = {"legal": "loras/legal", "poems": "loras/poems", "7": "loras/seven"}
GIVEN = ["legal", "poems", "7", None, "", "none", "legl"]  # `none` is the model's own name


def planned(tmp_path: Path, columns: dict[str, list[Any]], name: str | None = "lora", **sections: Any) -> PlanReport:
    path = write_parquet(tmp_path / "in.parquet", columns)
    given = {"input": {"adapter": name}} if name else {}
    sections = {**given, "engine": {"adapters": ADAPTERS}, **sections}
    return make_plan(tmp_path / "run", job(path, **sections))


def many(count: int = 600) -> dict[str, list[Any]]:
    rng = random.Random(2)
    return {
        "text": [f"text {rng.randrange(40)}" for _ in range(count)],
        "lora": [rng.choice(GIVEN) for _ in range(count)],
        "lang": [rng.choice(["de", "en"]) for _ in range(count)],
    }


@pytest.mark.parametrize("folders", [[], ["lang"]])
def test_a_shard_is_of_one_adapter_and_one_folder_and_no_row_is_lost(tmp_path: Path, folders: list[str]) -> None:
    rows = many()
    planned(tmp_path, rows, run={"window_rows": 250}, output={"partition_by": folders, "rows_per_file": 20})
    assert [row["row"] for row in read_rows(tmp_path / "run")] == list(range(len(rows["text"])))
    for info, of_shard in read_shards(tmp_path / "run"):
        able = [row for row in of_shard if row["error_code"] is None]
        named = {rows["lora"][row["row"]] for row in able}
        assert {own_values(row["overrides"]).adapter for row in able} <= {info.adapter}
        assert named <= {info.adapter} if info.adapter else named <= {None, "", "none"}
        assert not folders or len({rows["lang"][row["row"]] for row in of_shard}) == 1


def test_equal_prompts_for_different_adapters_are_not_one(tmp_path: Path) -> None:
    report = planned(tmp_path, {"text": ["same"] * 6, "lora": ["legal", "legal", "poems", None, "", "poems"]})
    assert report.counters.duplicate_prompts == 3
    assert sorted(info.adapter for info, _ in read_shards(tmp_path / "run")) == ["", "legal", "poems"]


def test_what_is_no_adapter_is_said_and_makes_no_shard_of_its_own(tmp_path: Path) -> None:
    planned(tmp_path, {"text": ["a"] * 4, "lora": ["legl", "poems", "poems", "other"]})
    rows = read_rows(tmp_path / "run")
    assert [row["error_message"] for row in rows] == [
        "column 'lora' (input.adapter): 'legl' is none of engine.adapters; did you mean 'legal'?",
        *(None, None),
        "column 'lora' (input.adapter): 'other' is none of engine.adapters; there are: legal, poems, 7",
    ]
    assert [info.adapter for info, _ in read_shards(tmp_path / "run")] == ["poems"], "no model is loaded for nothing"


def test_rows_that_all_cannot_run_want_no_adapter(tmp_path: Path) -> None:
    planned(tmp_path, {"text": ["a"], "lora": ["legl"]})
    assert [info.adapter for info, _ in read_shards(tmp_path / "run")] == [""]


def test_numbers_name_adapters_too_and_other_values_none(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "a", "lora": 7.0}, {"text": "b", "lora": 8.5}])
    make_plan(tmp_path / "run", job(path, input={"adapter": "lora"}, engine={"adapters": ADAPTERS}))
    rows = read_rows(tmp_path / "run")
    assert own_values(rows[0]["overrides"]) == ({}, "7", ())
    assert rows[1]["error_message"].startswith("column 'lora' (input.adapter): 8.5 is none of engine.adapters;")


def test_so_do_integers(tmp_path: Path) -> None:
    planned(tmp_path, {"text": ["a", "b"], "lora": [7, None]})
    assert [own_values(row["overrides"]).adapter for row in read_rows(tmp_path / "run")] == ["7", ""]


def test_so_does_their_text_as_pandas_writes_a_column_with_a_null_to_csv(tmp_path: Path) -> None:
    planned(tmp_path, {"text": ["a", "b", "c", "d"], "lora": ["7.0", "", "legal.0", "8.0"]})
    rows = read_rows(tmp_path / "run")
    assert [own_values(row["overrides"]).adapter for row in rows[:2]] == ["7", ""]
    assert [row["error_code"] for row in rows] == [None, None, "bad_input", "bad_input"]


def test_an_adapter_stands_beside_a_rows_own_sampling_values_and_its_budget(tmp_path: Path) -> None:
    columns = {"text": ["ab", "ab"], "lora": ["legal", None], "t": [0.5, 0.5]}
    sampling = {"per_row": {"temperature": "t"}}
    planned(tmp_path, columns, sampling=sampling, run={"max_tokens_per_row": 5})
    both = [own_values(row["overrides"])[:2] for row in read_rows(tmp_path / "run")]
    assert both == [({"temperature": 0.5, "max_tokens": 2}, "legal"), ({"temperature": 0.5, "max_tokens": 2}, "")]


def lines(*models: Any) -> list[dict[str, Any]]:
    said = [{} if model == "missing" else {"model": model} for model in models]
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    head = {"method": "POST", "url": "/v1/chat/completions"}
    return [{"custom_id": str(row), **head, "body": {**body, **own}} for row, own in enumerate(said)]


def batch(tmp_path: Path, *models: Any, **sections: Any) -> list[dict[str, Any]]:
    path = write_jsonl(tmp_path / "in.jsonl", lines(*models))
    make_plan(tmp_path / "run", job(path, prompt={}, **sections), chat=True)
    return read_rows(tmp_path / "run")


def test_an_openai_line_names_it_as_its_model(tmp_path: Path) -> None:
    rows = batch(tmp_path, "legal", "none", "missing", "gpt-5", 3, engine={"adapters": ADAPTERS})
    own = [own_values(row["overrides"])[:2] for row in rows[:3]]
    assert own == [({"max_tokens": 4}, "legal"), ({"max_tokens": 4}, ""), ({"max_tokens": 4}, "")]
    assert [row["error_message"] for row in rows] == [
        *(None, None, None),
        "body.model: 'gpt-5' is none of engine.adapters; there are: legal, poems, 7",
        "body.model: 3 is none of engine.adapters; there are: legal, poems, 7",
    ]


def test_without_adapters_the_model_of_a_line_still_counts_for_nothing(tmp_path: Path) -> None:
    assert [row["error_code"] for row in batch(tmp_path, "gpt-5", 3)] == [None, None]


def test_a_job_says_which_column_names_them(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"input\.adapter: the input has no column 'lara'; did you mean 'lora'\?"):
        planned(tmp_path, many(3), "lara")
    with pytest.raises(JobFileError, match=r"engine\.adapters: no row names one; say which column does, in input"):
        planned(tmp_path, many(3), None)


def test_the_column_goes_to_the_results_only_where_it_is_asked_for(tmp_path: Path) -> None:
    planned(tmp_path, many(5), input={"adapter": "lora", "columns": ["text"]})
    assert {name for row in read_rows(tmp_path / "run") for name in row["passthrough"]} == {"text"}

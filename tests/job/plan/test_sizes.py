from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.plan.sizes import RowSizes, value_bytes
from tests.job.embedding_runs import embedding_job
from tests.job.plan.planning import job, make_plan, read_shards, write_parquet

COLUMNS = {
    "text": pa.array(["", None, "x" * 70, "ü"]),
    "whole": pa.array([1, None, 3, 4]),
    "yes": pa.array([True, None, False, True]),
    "list": pa.array([["a"], None, ["bb"] * 9, []]),
    "pair": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
    "map": pa.array([[("k", "v")], None, [("k", "v" * 50), ("l", None)], []], pa.map_(pa.string(), pa.string())),
    "kind": pa.array(["a", None, "b" * 90, "a"]).dictionary_encode(),
    "deep": pa.array([{"a": [{"b": "x"}]}, None, {"a": [{"b": "y" * 40}] * 3}, {"a": None}]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_value_has_the_same_size_in_every_batch(name: str) -> None:
    column = COLUMNS[name]
    alone = [int(value_bytes(column.slice(row, 1))[0]) for row in range(len(column))]
    assert value_bytes(column).tolist() == alone


@pytest.mark.parametrize("name", ["text", "list", "map", "kind", "deep"])
def test_a_long_value_counts_by_its_length(name: str) -> None:
    sizes = value_bytes(COLUMNS[name])
    assert sizes.argmax() == 2 and sizes[2] >= 18


@pytest.mark.parametrize(
    ("sampling", "at_least"),
    [
        ({}, 5000 + 300 * 4),
        ({"n": 40}, 40 * 5000 + 300 * 4),
        ({"n": 2, "best_of": 9}, 2 * 5000),
        ({"logprobs": 20}, 5000 + 300 * 21 * 50),
        ({"n": 3, "prompt_logprobs": 4}, 3 * 5000 + 3 * 100 * 5 * 50),
        ({"n": 9, "return_token_ids": True}, 9 * 5000 + 9 * 100 * 10 + 300 * 14),
    ],
)
def test_a_row_counts_as_often_as_its_results_hold_it(sampling: dict[str, Any], at_least: int) -> None:
    sizes = RowSizes.of(SamplingSpec(**sampling))
    payload = pa.array([{"doc": "d" * 5000}])
    [size] = sizes.of_rows(payload, np.array([100]), np.array([300]), np.array([1]))
    assert at_least <= size <= 1.4 * at_least + 1000


def test_a_row_of_several_texts_counts_the_vectors_of_all() -> None:
    one, many, none = RowSizes.of(SamplingSpec(), dimensions=1000).of_rows(
        pa.array([{"doc": ""}] * 3), np.array([5, 5, 5]), np.array([0, 0, 0]), np.array([1, 50, 0])
    )
    assert one - none >= 4_000 and many - none == 50 * (one - none)


@pytest.mark.parametrize("sampling", [{"n": 50}, {"logprobs": 5, "max_tokens": 50}])
def test_shards_are_cut_by_what_their_results_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    monkeypatch.setattr("bulkrun.job.plan.cut.MAX_SHARD_BYTES", 200_000)
    path = write_parquet(tmp_path / "in.parquet", {"text": [f"{row:0200}" for row in range(60)]})
    make_plan(tmp_path / "run", job(path, sampling=sampling))
    assert max(len(rows) for _, rows in read_shards(tmp_path / "run")) <= 20


def test_so_are_those_of_rows_with_many_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.job.plan.cut.MAX_SHARD_BYTES", 200_000)
    path = write_parquet(tmp_path / "in.parquet", {"text": [["a", f"{row}"] * 50 for row in range(60)]})
    spec = embedding_job(
        path,
        tmp_path / "run",
        input={"path": str(path)},
        embedding={"dimensions": 100},
        prompt={"column": "text", "text_lists": True},
    )
    make_plan(tmp_path / "run", spec)
    assert max(len(rows) for _, rows in read_shards(tmp_path / "run")) <= 2

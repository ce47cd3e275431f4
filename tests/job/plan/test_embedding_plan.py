"""The plan of texts to embed: by length alone, equal ones together, and shards that count the bytes of vectors."""

from __future__ import annotations

import random
from itertools import groupby
from pathlib import Path

import pytest

from bulkrun.job.plan import cut
from tests.job.embedding_runs import embedding_job
from tests.job.plan.planning import make_plan, read_shards, write_jsonl


def test_rows_come_by_length_whatever_they_begin_with(tmp_path: Path) -> None:
    rng = random.Random(5)
    texts = [rng.choice("ab") * 40 + "x" * rng.randrange(60) for _ in range(300)]
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": row, "text": text} for row, text in enumerate(texts)])
    report = make_plan(tmp_path / "run", embedding_job(path, tmp_path / "out", output={"rows_per_file": 100}))
    in_order = [
        row for _, rows in read_shards(tmp_path / "run") for row in sorted(rows, key=lambda row: int(row["order"]))
    ]
    lengths = [len(row["token_ids"]) for row in in_order]
    assert lengths == sorted(lengths, reverse=True)
    runs = [prompt for prompt, _ in groupby(tuple(row["token_ids"]) for row in in_order)]
    assert len(runs) == len(set(texts)), "equal texts are together"
    counters = report.counters
    assert (counters.expected_output_tokens, counters.shared_prefix_tokens) == (0, 0)
    assert counters.duplicate_prompts == 300 - len(runs)


@pytest.mark.parametrize(("dimensions", "shards"), [(8, 1), (1024, 8)])
def test_a_shard_holds_fewer_of_longer_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dimensions: int, shards: int
) -> None:
    monkeypatch.setattr(cut, "MAX_SHARD_BYTES", 2**18)
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": row, "text": f"t{row}"} for row in range(200)])
    spec = embedding_job(path, tmp_path / "out", embedding={"dimensions": dimensions}, output={"rows_per_file": 200})
    assert make_plan(tmp_path / "run", spec).counters.shards == shards

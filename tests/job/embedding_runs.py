"""Runs of vectors for tests: planned by the real planner from a small input file, embedded by the fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bulkrun.data.results.query import run_query
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.outputs.output_text import Decode
from bulkrun.job.work.runner import RunOutcome
from tests.job import small_runs
from tests.job.fake_engine import VECTOR_NUMBERS, FakeEmbedder, expected_vector
from tests.job.plan.planning import BOS, make_plan, write_jsonl

BEFORE = "doc: "
LANGS = ("en", "de", "fr")


def texts(count: int) -> list[str | None]:
    """Of many lengths; every fifth is one text, every ninth is null."""
    return [
        None if row % 9 == 4 else "same" if row % 5 == 2 else "x" * (row * 7 % 40) + f"{row}" for row in range(count)
    ]


def write_texts(folder: Path, count: int) -> Path:
    rows = [{"id": f"r{row}", "text": text, "lang": LANGS[row % 3]} for row, text in enumerate(texts(count))]
    return write_jsonl(folder / "in.jsonl", rows)


def embedding_job(path: Path, out: Path, **sections: Any) -> JobSpec:
    """A job as `prepare` leaves it: with all that the model's files say."""
    made = {"pooling": "mean", "normalize": True, "dimensions": VECTOR_NUMBERS, "prompt": BEFORE}
    return job_of(
        {
            "name": "vectors",
            "model": "none",
            "task": "embed",
            "input": {"path": str(path), "id": "id"},
            "prompt": {"column": "text"},
            "embedding": {**made, **sections.pop("embedding", {})},
            "output": {"path": str(out), "rows_per_file": 7, **sections.pop("output", {})},
            "run": {"checkpoint_every": 0.02, "max_error_rate": 1.0, **sections.pop("run", {})},
            **sections,
        }
    )


def no_text(*_: Any, **__: Any) -> list[str]:
    raise AssertionError("a job of vectors decodes nothing")


def submit(spec: JobSpec, engine: FakeEmbedder | None = None, decode: Decode = no_text, **options: Any) -> RunOutcome:
    """Enter, plan and work as `bulkrun submit` does."""
    out = Path(spec.output.state or spec.output.path)
    run, record = small_runs.enter(out, spec)
    make_plan(out, spec)
    return small_runs.make_runner(run, record, spec, engine or FakeEmbedder(), decode=decode, **options).run()


def vector(text: str, before: str = BEFORE) -> bytes:
    """What the fake model makes of a text."""
    return expected_vector([BOS, *map(ord, before + text)])


def wanted(count: int) -> list[tuple[str, bytes | None, str | None]]:
    """The id, the vector and the error of every row of an unbroken run."""
    return [
        (f"r{row}", None if text is None else vector(text), "bad_input" if text is None else None)
        for row, text in enumerate(texts(count))
    ]


def found(out: Path) -> list[tuple[str, bytes | None, str | None]]:
    """The same of the results, each row as often as it is there."""
    table = run_query(out, "SELECT id, embedding, error_code FROM results ORDER BY row")
    assert table.schema.field("embedding").type == pa.list_(pa.field("l", pa.float32()))
    columns = (table[name].to_pylist() for name in table.column_names)
    return [
        (name, None if made is None else np.float32(made).tobytes(), code)
        for name, made, code in zip(*columns, strict=True)
    ]

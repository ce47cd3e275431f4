"""Runs of labels: each row exactly once with its own, whatever stops, retries or reads them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.query import run_query
from bulkrun.data.results.schema import labels_of, score_fields
from bulkrun.errors import UsageError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.update.compact import compact
from bulkrun.job.views.export import export_run
from bulkrun.job.views.export_target import ExportOptions
from bulkrun.job.views.status import first_look, read_status
from bulkrun.job.views.verify import verify_run
from bulkrun.job.work.vectors import scored
from tests.job.embedding_runs import embedding_job, submit, texts, vector, write_texts
from tests.job.fake_engine import VECTOR_NUMBERS, FakeEmbedder
from tests.job.work.test_runner import StopAfter

LABELS = [f"l{number}" for number in range(VECTOR_NUMBERS)]
COLUMNS = ["row", "sample", "label", "score", "scores", "prompt_tokens", "error_code", "error_message"]


def job(path: Path, out: Path, **sections: Any) -> JobSpec:
    """As `prepare` leaves it. What the fake engine makes of a text are its scores."""
    spec = embedding_job(path, out, **sections)
    made = {"activation": "none", "labels": LABELS}
    unset = dict.fromkeys(("pooling", "normalize", "dimensions", "prompt"))
    return spec.model_copy(update={"task": "classify"}).with_keys(classification=made, embedding=unset)


def wanted(count: int) -> list[tuple[str, str | None, float | None, bytes | None, str | None]]:
    rows: list[tuple[str, str | None, float | None, bytes | None, str | None]] = []
    for row, text in enumerate(texts(count)):
        if text is None:
            rows.append((f"r{row}", None, None, None, "bad_input"))
            continue
        made = vector(text, before="")
        scores = np.frombuffer(made, "<f4")
        rows.append((f"r{row}", LABELS[scores.argmax()], float(scores.max()), made, None))
    return rows


def found(out: Path) -> list[tuple[Any, ...]]:
    table = run_query(out, "SELECT id, label, score, scores, error_code FROM results ORDER BY row")
    rows = (row.values() for row in table.to_pylist())
    return [(*head, None if made is None else np.float32(made).tobytes(), code) for *head, made, code in rows]


def test_every_row_has_its_own_label_and_scores(tmp_path: Path) -> None:
    out = tmp_path / "out"
    submit(job(write_texts(tmp_path, 60), out, output={"rows_per_file": 60}))
    assert found(out) == wanted(60)
    [part] = RunDir(out).parts().values()
    schema = pq.read_schema(part)
    assert schema.names == ["id", "text", "lang", *COLUMNS]
    assert [schema.field(name).type for name in ("label", "score", "scores")] == [
        pa.string(), pa.float32(), pa.list_(pa.float32()),
    ]  # fmt: skip
    assert labels_of(schema.field("scores")) == LABELS, "a part says itself which score is of what"


@pytest.mark.parametrize("questions", [1, 7])
def test_an_interrupted_run_continues_until_it_equals_an_unbroken_one(tmp_path: Path, questions: int) -> None:
    spec = job(write_texts(tmp_path, 60), tmp_path / "out")
    states = []
    while not states or states[-1] == "interrupted":
        states.append(submit(spec, FakeEmbedder(2), should_stop=StopAfter(questions + len(states))).state)
    assert states[-1] == "completed_with_errors" and len(states) > 1
    assert found(tmp_path / "out") == wanted(60)
    assert verify_run(RunDir(tmp_path / "out")).ok


def test_status_and_compaction_know_such_a_run(tmp_path: Path) -> None:
    submit(job(write_texts(tmp_path, 60), tmp_path / "out"))
    run = RunDir(tmp_path / "out")
    status = read_status(run)
    assert (status.task, status.completion_tokens, status.cut) == ("classify", 0, 0)
    assert first_look("out", read_record(run)).endswith('"SELECT * FROM results LIMIT 5"')
    assert compact(run, grace_s=0).parts_after == 1
    assert found(run.root) == wanted(60) and verify_run(run).ok


def test_exports_have_scores_but_for_openais(tmp_path: Path) -> None:
    submit(job(write_texts(tmp_path, 5), tmp_path / "out"))
    run, shown = RunDir(tmp_path / "out"), io.BytesIO()
    export_run(run, ExportOptions("jsonl"), shown)
    assert b'"label":"' in shown.getvalue().replace(b": ", b":")
    with pytest.raises(UsageError, match="OpenAI's batches have no labels"):
        export_run(run, ExportOptions("openai"), io.BytesIO())


def test_a_model_with_one_output_has_a_score_and_no_label() -> None:
    made = scored(np.float32([-2.5]).tobytes(), ["LABEL_0"])
    assert (made["label"], made["score"]) == (None, -2.5)
    tied = scored(np.float32([0.25, 0.5, 0.5]).tobytes(), ["a", "b", "c"])
    assert (tied["label"], tied["score"]) == ("b", 0.5), "of equal ones the first"


def test_labels_of_any_text_come_back_from_a_schema() -> None:
    labels = ['"quoted"', "süß", "", "a,b"]
    assert labels_of(pa.schema(score_fields(labels)).field("scores")) == labels

"""Runs of vectors: each row exactly once with its own, whatever stops, breaks, moves or reads them."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import CreateEmbeddingResponse

from bulkrun.job.store.journal import read_journal
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.update.compact import compact
from bulkrun.job.views.export import export_run
from bulkrun.job.views.export_target import ExportOptions
from bulkrun.job.views.report import read_report
from bulkrun.job.views.row_errors import read_row_errors
from bulkrun.job.views.status import read_status
from bulkrun.job.views.verify import verify_run
from bulkrun.job.work.delivery import deliver
from bulkrun.request import Request
from tests.job.embedding_runs import BEFORE, embedding_job, found, submit, texts, vector, wanted, write_texts
from tests.job.fake_engine import VECTOR_NUMBERS, FakeEmbedder
from tests.job.plan.planning import write_jsonl
from tests.job.work.test_runner import StopAfter
from tests.s3_server import Bucket

COLUMNS = ["row", "sample", "embedding", "prompt_tokens", "error_code", "error_message"]


def run_of(folder: Path, count: int = 60, **sections: Any) -> RunDir:
    submit(embedding_job(write_texts(folder, count), folder / "out", **sections))
    return RunDir(folder / "out")


def test_there_is_no_talk_of_outputs_before_the_first_step_either(tmp_path: Path) -> None:
    spec = embedding_job(write_texts(tmp_path, 3), tmp_path / "out")
    assert not submit(spec).progress.generates
    assert not submit(spec).progress.generates, "a finished run has no step"


def test_every_row_has_its_own_vector_and_equal_texts_run_once_in_a_shard(tmp_path: Path) -> None:
    engine, out = FakeEmbedder(5), tmp_path / "out"
    outcome = submit(embedding_job(write_texts(tmp_path, 60), out, output={"rows_per_file": 60}), engine)
    assert found(out) == wanted(60)
    assert len(engine.seen) == len({made for _, made, _ in wanted(60) if made is not None})
    assert outcome.totals is not None and outcome.totals.completion_tokens == outcome.totals.cut == 0
    assert outcome.totals.errors == {"bad_input": 7} and outcome.totals.saved_generations == 60 - 7 - len(engine.seen)
    [part] = RunDir(out).parts().values()
    assert pq.read_schema(part).names == ["id", "text", "lang", *COLUMNS]
    lengths = [len(request.prompt_token_ids) for request in engine.seen]
    assert lengths == sorted(lengths, reverse=True), "the longest first, alike ones together"


@pytest.mark.parametrize("questions", [1, 3, 7, 20])
def test_an_interrupted_run_continues_until_it_equals_an_unbroken_one(tmp_path: Path, questions: int) -> None:
    spec = embedding_job(write_texts(tmp_path, 60), tmp_path / "out")
    states = []
    while not states or states[-1] == "interrupted":
        engine = FakeEmbedder(2)
        states.append(submit(spec, engine, should_stop=StopAfter(questions + len(states))).state)
    assert states[-1] == "completed_with_errors" and len(states) > 1
    assert found(tmp_path / "out") == wanted(60)
    engine = FakeEmbedder()
    assert submit(spec, engine).state == "completed_with_errors" and not engine.seen


def test_what_a_kill_left_in_journals_is_not_embedded_again(tmp_path: Path) -> None:
    """The last shard is never whole: its vectors come out of the journal of a worker that is gone."""
    spec = embedding_job(write_texts(tmp_path, 40), tmp_path / "out", output={"rows_per_file": 40})
    submit(spec, FakeEmbedder(2), should_stop=StopAfter(6))
    [journal] = RunDir(tmp_path / "out").journals_of(0)
    journaled = {row for record in read_journal(journal).records for row in record.rows if record.error_code is None}
    assert journaled
    engine = FakeEmbedder()
    submit(spec, engine)
    again = {int(request.request_id.split(":")[0]) for request in engine.seen}
    assert not again & journaled and found(tmp_path / "out") == wanted(40)


def test_rows_that_kill_the_engine_are_found_and_have_no_vector(tmp_path: Path) -> None:
    bad = {name: texts(60)[int(name[1:])] for name in ("r16", "r20")}

    def engine(adapter: str = "") -> FakeEmbedder:
        return FakeEmbedder(8, poison=lambda request: text_of(request) in bad.values())

    submit(embedding_job(write_texts(tmp_path, 60), tmp_path / "out"), engine(), rebuild_engine=engine)
    plain = [(name, None, "engine_error") if name in bad else (name, made, code) for name, made, code in wanted(60)]
    assert found(tmp_path / "out") == plain


def text_of(request: Request) -> str:
    return "".join(map(chr, request.prompt_token_ids[1:])).removeprefix(BEFORE)


def test_status_verify_and_errors_know_such_a_run(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    report, status = verify_run(run), read_status(run)
    assert report.ok and report.rows == 60, report.problems
    assert (status.state, status.rows_done, status.error_rows) == ("completed_with_errors", 60, 7)
    assert status.task == "embed" and (status.completion_tokens, status.cut) == (0, 0) and status.prompt_tokens > 0
    assert read_row_errors(run).counts == {"bad_input": 7}


def test_parts_in_folders_become_few_and_keep_every_vector(tmp_path: Path) -> None:
    run = run_of(tmp_path, output={"partition_by": ["lang"]})
    assert found(run.root) == wanted(60)
    before = read_status(run).prompt_tokens
    done = compact(run, grace_s=0)
    assert done.worked and done.parts_after == 3
    assert found(run.root) == wanted(60) and verify_run(run).ok
    assert read_status(run).prompt_tokens == before


def test_vectors_go_to_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    spec = embedding_job(
        write_texts(tmp_path, 20),
        tmp_path,
        output={"path": bucket.url("out"), "state": str(tmp_path / "state"), "rows_per_file": 20},
    )
    submit(spec)
    deliver(RunDir(tmp_path / "state"), read_record(RunDir(tmp_path / "state")))
    [part] = [key for key in bucket.list("out/") if key.endswith(".parquet")]
    made = pq.read_table(pa.BufferReader(bucket.get(part)))["embedding"].to_pylist()
    assert list(map(bits, made)) == [vector for _, vector, _ in wanted(20)]


def test_duckdb_compares_vectors(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    nearest = duckdb.sql(
        f"SELECT b.id FROM '{run.root}/*.parquet' a, '{run.root}/*.parquet' b WHERE a.id = 'r1' ORDER BY "
        f"array_cosine_similarity(a.embedding::FLOAT[{VECTOR_NUMBERS}], b.embedding::FLOAT[{VECTOR_NUMBERS}]) DESC "
        "NULLS LAST LIMIT 1"
    ).fetchall()
    assert nearest == [("r1",)]


def test_exports_hold_every_vector(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    vectors = [made for _, made, _ in wanted(60)]
    export_run(run, ExportOptions("parquet", tmp_path / "all.parquet"), io.BytesIO())
    assert list(map(bits, pq.read_table(tmp_path / "all.parquet")["embedding"].to_pylist())) == vectors
    lines = [json.loads(line) for line in exported(run, "jsonl").splitlines()]
    assert [bits(line["embedding"]) for line in lines] == vectors
    cells = csv.DictReader(io.StringIO(exported(run, "csv")))
    assert [bits(json.loads(cell["embedding"] or "null")) for cell in cells] == vectors


def test_an_openai_export_has_their_bodies(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    lines = [json.loads(line) for line in exported(run, "openai").splitlines()]
    made = {name: vector for name, vector, _ in wanted(60)}
    for line in (line for line in lines if line["error"] is None):
        body = CreateEmbeddingResponse.model_validate(line["response"]["body"], strict=True)
        [data] = body.data
        assert (body.object, data.object, data.index) == ("list", "embedding", 0)
        assert bits(data.embedding) == made.pop(line["custom_id"])
        assert body.usage.prompt_tokens == body.usage.total_tokens > 1
    failed = [line["custom_id"] for line in lines if line["error"]]
    assert sorted(made) == sorted(failed) and len(failed) == 7
    assert all(line["error"]["code"] == "bad_input" for line in lines if line["error"])


def exported(run: RunDir, kind: Any) -> str:
    stream = io.BytesIO()
    export_run(run, ExportOptions(kind), stream)
    return stream.getvalue().decode()


def bits(numbers: list[float] | None) -> bytes | None:
    return None if numbers is None else np.float32(numbers).tobytes()


def test_journals_hold_vectors_as_short_text(tmp_path: Path) -> None:
    spec = embedding_job(write_texts(tmp_path, 9), tmp_path / "out", output={"rows_per_file": 9})
    submit(spec, FakeEmbedder(1), should_stop=StopAfter(6))
    [journal] = RunDir(tmp_path / "out").journals_of(0)
    told = [record.extra["embedding"] for record in read_journal(journal).records if record.error_code is None]
    assert told and all(len(text) == -(-4 * VECTOR_NUMBERS // 3) * 4 for text in told)
    assert base64.b64decode(told[0]) in [made for _, made, _ in wanted(9)]
    assert vector("0") in [made for _, made, _ in wanted(9)]


def test_columns_of_the_input_that_are_named_like_those_of_texts_are_not_counted(tmp_path: Path) -> None:
    """As of the results of another run, which are embedded; of one that had its numbers as text."""
    said = {"finish_reason": "length", "completion_tokens": "7", "label": "good"}
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": f"r{row}", "text": f"text {row}", **said} for row in range(20)])
    submit(embedding_job(path, tmp_path / "out"))
    run = RunDir(tmp_path / "out")
    report = read_report(run)
    assert (report.ends, [one.column for one in report.lengths]) == ({}, ["prompt_tokens"])
    assert compact(run, grace_s=0).worked and verify_run(run).ok
    totals = read_totals(run)
    assert totals is not None and (totals.cut, totals.completion_tokens) == (0, 0)

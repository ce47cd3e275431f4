"""What commands say of a job of vectors: nothing of outputs, which there are none, and of a vector its beginning."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from openai.types import CreateEmbeddingResponse
from rich.console import Console

from bulkrun.cli import main
from bulkrun.cli.foresight import print_row
from bulkrun.cli.live import _numbers, progress_line
from bulkrun.launch.preparation.prepare import PreparedJob
from bulkrun.launch.runs import preview as preview_module
from bulkrun.launch.runs.preview import PreviewedRow
from tests.cli.test_live import SNAPSHOT
from tests.job.embedding_runs import no_text
from tests.job.fake_engine import VECTOR_NUMBERS, FakeEmbedder
from tests.launch.one_process import one_process

JOB = """\
name: vectors
model: bundled:tiny
task: embed
input: {path: docs.jsonl, id: id}
embedding: {pooling: mean, dimensions: 8}
output: {path: out}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"r{row}", "text": f"text {row % 15}"} for row in range(20)]
    Path("docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("job.yaml").write_text(JOB)
    return tmp_path


def embedder(prepared: PreparedJob) -> tuple[Any, Any]:
    return FakeEmbedder(), no_text


def bulkrun(*arguments: str, ends_with: int = 0) -> Result:
    with one_process(embedder):
        result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result


def test_a_run_is_told_without_outputs(folder: Path) -> None:
    said = bulkrun("submit", "job.yaml").stderr
    assert "tokens in)" in said and " out)" not in said and "max_tokens" not in said
    assert "5 vectors shared with another row" in said
    query = next(line for line in said.splitlines() if line.startswith("next")).split(maxsplit=1)[1]
    assert query == 'bulkrun query out "SELECT * REPLACE (embedding[:4] AS embedding) FROM results LIMIT 5"'
    rows = json.loads(bulkrun("query", "out", query.split('"')[1], "--json").stdout)["rows"]
    assert [len(row["embedding"]) for row in rows] == [4] * 5
    shown = bulkrun("status", "out").stdout
    assert " in (committed)" in shown and query in shown
    assert json.loads(bulkrun("status", "out", "--json").stdout)["task"] == "embed"
    assert bulkrun("verify", "out").exit_code == 0


def test_a_batch_of_openais_embeddings_goes_in_and_comes_out(folder: Path) -> None:
    bodies = [{"model": "m", "input": f"text {row}", "encoding_format": "base64"} for row in range(5)]
    lines = [
        {"custom_id": f"c{row}", "method": "POST", "url": "/v1/embeddings", "body": body}
        for row, body in enumerate(bodies)
    ]
    lines.append({**lines[0], "custom_id": "chat", "url": "/v1/chat/completions"})
    Path("batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = ("--set", "input={path: batch.jsonl}")
    assert "OpenAI batch lines" in bulkrun("plan", "job.yaml", *batch).stdout
    bulkrun("submit", "job.yaml", *batch, ends_with=3)
    bulkrun("export", "out", "--format", "openai", "-o", "answers.jsonl")
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"c{row}" for row in range(5)]
    for answer in answers:
        body = CreateEmbeddingResponse.model_validate(answer["response"]["body"], strict=True)
        assert len(body.data[0].embedding) == VECTOR_NUMBERS and body.model == "bundled:tiny"
    [error] = map(json.loads, Path("answers.errors.jsonl").read_text().splitlines())
    assert error["custom_id"] == "chat" and "task: generate" in error["error"]["message"]


def test_a_plan_is_told_without_outputs_and_prefixes(folder: Path) -> None:
    shown = bulkrun("plan", "job.yaml").stdout
    assert "identical prompts" in shown and "output tokens" not in shown and "shared prefixes" not in shown
    assert "as stored\n" in shown and "keys and values" not in shown
    assert "8 numbers, pooling mean, normalized" in bulkrun("validate", "job.yaml").stdout


def test_progress_is_told_without_outputs_and_cache() -> None:
    assert progress_line(replace(SNAPSHOT, generates=False)) == (
        "500/2,000 rows (25%), 1,234 tok/s in, 64 running, 128 waiting, 3 errors, 1 h 2 min left"
    )


def test_the_live_view_has_no_numbers_of_outputs_and_cache() -> None:
    shown = io.StringIO()
    Console(file=shown, width=200).print(_numbers(replace(SNAPSHOT, generates=False), "running the job"))
    assert "in 1,234 tok/s" in shown.getvalue() and "running 64" in shown.getvalue()
    assert "out " not in shown.getvalue() and "KV cache" not in shown.getvalue()


def test_preview_shows_the_beginning_of_a_vector_and_as_json_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_module, "engine_factory", lambda prepared: lambda adapter: FakeEmbedder())
    shown = bulkrun("preview", "job.yaml", "-n", "1").stdout
    assert f", ...] ({VECTOR_NUMBERS} numbers)" in shown and "response" not in shown and "text 0" in shown
    [row] = json.loads(bulkrun("preview", "job.yaml", "-n", "1", "--json").stdout)["rows"]
    assert len(row["embedding"]) == VECTOR_NUMBERS and row["ended_by"] == "stop"


def test_a_short_vector_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_row(PreviewedRow("a", "text", None, "stop", embedding=[1.0, -0.25]))
    assert "[1.0000, -0.2500] (2 numbers)" in capsys.readouterr().out

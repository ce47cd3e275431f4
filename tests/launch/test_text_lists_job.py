"""A whole job whose rows have several texts: each vector is that of its text alone, which `test_embedding_job` compares
with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import ResumeError
from tests.launch.whole_jobs import cli, job_of_parts, lines_of, rows_of
from tests.models.tiny_encoders import save_tiny_encoder, write_modules, write_words

WORDS = ["close", "the", "file", "##s", "read", "a", "line", "of", "it", "and", "all"]
INPUTS: dict[str, Any] = {
    "several": ["close the file", "read a line of it", "close the file"],
    "one": "read a line of it",
    "one-in-a-list": ["all files"],
    "empty": ["read", ""],
    "long": ["it", "read all files and " * 40],
    "many": [f"{one} {other}" for one in WORDS[4:] for other in WORDS[4:]],
    "ids": [[1, 2], [3]],
}
CODES = {"empty": "empty_prompt", "ids": "bad_input"}
GOOD = [name for name in INPUTS if name not in CODES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_encoder(tmp_path_factory.mktemp("embedder") / "model", "bert")
    write_modules(folder)
    return write_words(folder, WORDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lines(INPUTS)
    return tmp_path


def write_lines(inputs: dict[str, Any]) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": given}}
        for name, given in inputs.items()
    ]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def job_over(model: Path, **sections: Any) -> dict[str, Any]:
    return job_of_parts("embed", model, **{"prompt": {"text_lists": True}, **sections})


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The vector of each text, from a job of one text a row."""
    folder = tmp_path_factory.mktemp("alone")
    texts = sorted({text for name in GOOD for text in texts_of(name)})
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sections = {"input": {"path": str(path)}, "prompt": {"column": "text"}, "output": {"path": str(folder / "out")}}
    return {text: row["embedding"] for text, row in rows_of(job_over(model, **sections), key="text").items()}


def texts_of(name: str) -> list[str]:
    return [INPUTS[name]] if isinstance(INPUTS[name], str) else INPUTS[name]


def check(row: dict[str, Any], name: str, alone: dict[str, list[float]]) -> None:
    expected = [alone[text] for text in texts_of(name)]
    assert len(row["embeddings"]) == len(expected)
    for vector, wanted in zip(row["embeddings"], expected, strict=True):
        assert vector == pytest.approx(wanted, abs=1e-5), name


def test_every_vector_is_that_of_its_text_alone(model: Path, folder: Path, alone: dict[str, list[float]]) -> None:
    rows = rows_of(job_over(model))
    assert {name: row["error_code"] for name, row in rows.items() if row["error_code"]} == CODES
    for name in GOOD:
        check(rows[name], name, alone)
    assert all(rows[name]["embeddings"] is None for name in CODES)
    assert rows["many"]["prompt_tokens"] > 80 and "embedding" not in rows["many"]


def test_a_column_of_lists_does_as_well(model: Path, folder: Path, alone: dict[str, list[float]]) -> None:
    lists = [{"doc": name, "chunks": texts_of(name)} for name in GOOD]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lists))
    cli("init", "in.jsonl", "--task", "embed", "--model", str(model), "--column", "chunks", "--out", "job.yaml")
    assert "vectors" in cli("preview", "job.yaml", "-n", "2").output
    [shown] = json.loads(cli("preview", "job.yaml", "-n", "1", "--json").output)["rows"]
    assert [line.count("[CLS]") for line in shown["prompt"].splitlines()] == [1, 1, 1], "each text on a line of its own"
    cli("submit", "job.yaml", "--set", "engine.dtype=float32")
    asked = "SELECT doc, embeddings FROM results"
    rows = json.loads(cli("query", "out/job", asked, "--json").stdout)["rows"]
    assert [row["doc"] for row in rows] == GOOD
    for row in rows:
        check(row, row["doc"], alone)


def test_rows_of_one_text_stand_among_lists(model: Path, folder: Path, alone: dict[str, list[float]]) -> None:
    """The column is one of text then, where lists are JSON."""
    Path("in.jsonl").write_text("".join(json.dumps({"doc": name, "chunks": INPUTS[name]}) + "\n" for name in GOOD))
    rows = rows_of(job_over(model, prompt={"column": "chunks", "text_lists": True}), key="doc")
    for name in GOOD:
        check(rows[name], name, alone)


def test_a_batch_goes_back_as_openai_writes_it(model: Path, folder: Path, alone: dict[str, list[float]]) -> None:
    rows_of(job_over(model))
    cli("export", "out", "--format", "openai", "-o", "a.jsonl")
    lines = lines_of("a.jsonl")
    assert [line["custom_id"] for line in lines] == GOOD
    for line in lines:
        data = line["response"]["body"]["data"]
        assert [each["index"] for each in data] == list(range(len(data)))
        check({"embeddings": [each["embedding"] for each in data]}, line["custom_id"], alone)
    assert "all is well" in cli("verify", "out").output


def test_a_night_runs_what_changed_and_other_columns_are_refused(
    model: Path, folder: Path, alone: dict[str, list[float]]
) -> None:
    night = job_over(model, input={"path": "in.jsonl", "id": "custom_id"})
    night["run"]["incremental"] = True
    before = rows_of(night)
    write_lines({**INPUTS, "several": ["close the file", "read a line of itclose the file"]})
    after = rows_of(night)
    assert {name for name in before if before[name]["row_key"] != after[name]["row_key"]} == {"several"}
    assert after["several"]["embeddings"][0] == pytest.approx(alone["close the file"], abs=1e-5)
    assert len(after["several"]["embeddings"]) == 2
    with pytest.raises(ResumeError, match=r"text_lists: .*\nOld and new rows cannot stand side by side"):
        rows_of({**night, "prompt": {}})


def test_texts_that_are_divided_otherwise_are_another_row(model: Path, folder: Path) -> None:
    write_lines({"a": ["it it", "it"], "b": ["it", "it it"], "c": ["it it", "it"]})
    rows = rows_of(job_over(model))
    assert rows["a"]["embeddings"] == rows["c"]["embeddings"] == rows["b"]["embeddings"][::-1]
    assert rows["a"]["embeddings"][0] != rows["a"]["embeddings"][1]

"""A whole job over lines of /v1/score and /v1/rerank with a model of vectors: scores are the cosines of the vectors
that transformers' own model makes of each text alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from bulkrun.errors import JobFileError
from tests.launch.whole_jobs import cli, job_of_parts, lines_of, rows_of
from tests.models.tiny_encoders import hidden_states, save_tiny_encoder, write_json, write_modules, write_words

WORDS = ["close", "the", "file", "##s", "read", "a", "line", "of", "it", "and", "all", "query", ":"]
LENGTH = 16
DOCUMENTS = ["read a line of it", "all files", "close the file", "all files"]
BODIES: dict[str, tuple[str, Any]] = {
    "pair": ("/v1/score", {"text_1": "close the file", "text_2": "read a line of it"}),
    "one-to-many": ("/v1/score", {"queries": "close the file", "documents": DOCUMENTS, "use_activation": False}),
    "by-text": ("/score", {"data_1": ["read", "close"], "data_2": ["it", "the file"]}),
    "empty": ("/v1/rerank", {"query": "read", "documents": ["it", " "]}),
    "ranks": ("/v1/rerank", {"query": "close the file", "documents": DOCUMENTS, "top_n": 2, "softmax": True}),
    "long": ("/v2/rerank", {"query": "read", "documents": ["it", "the line " * 30], "return_documents": False}),
    "vector": ("/v1/embeddings", {"input": "read"}),
}
CODES = {"empty": "empty_prompt", "vector": "bad_input"}
GOOD = [name for name in BODIES if name not in CODES]
POOLED = {"mean": lambda states: states.mean(dim=0), "cls": lambda states: states[0], "last": lambda states: states[-1]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that does not normalize its vectors: cosines do not depend on their lengths."""
    folder = save_tiny_encoder(tmp_path_factory.mktemp("embedder") / "model", "bert")
    write_modules(folder, normalize=False)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH})
    return write_words(folder, WORDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, (url, body) in BODIES.items()]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def pairs_of(name: str) -> list[tuple[str, str]]:
    """Taken apart here once more, by vLLM's documentation."""
    body = BODIES[name][1]
    first, second = ([body[key]] if isinstance(body[key], str) else body[key] for key in list(body)[:2])
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def wanted(model: Path, pairs: list[tuple[str, str]], pooling: str = "mean", before: str = "") -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [before + text for pair in pairs for text in pair]
    ids = [tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text in texts]
    vectors = torch.stack([POOLED[pooling](states) for states in hidden_states(model, ids)])
    return [float(score) for score in torch.nn.CosineSimilarity(dim=1)(vectors[0::2], vectors[1::2])]


def job_over(model: Path, **sections: Any) -> dict[str, Any]:
    return job_of_parts("embed", model, **{"prompt": {"score_lines": True}, **sections})


@pytest.mark.parametrize("embedding", [{}, {"pooling": "cls", "normalize": True}, {"pooling": "last"}])
def test_every_score_is_the_cosine_of_the_texts_own_vectors(
    model: Path, folder: Path, embedding: dict[str, Any]
) -> None:
    rows = rows_of(job_over(model, embedding=embedding))
    assert {name: row["error_code"] for name, row in rows.items() if row["error_code"]} == CODES
    for name in GOOD:
        scores = wanted(model, pairs_of(name), embedding.get("pooling", "mean"))
        assert rows[name]["scores"] == pytest.approx(scores, abs=1e-5), name
        assert rows[name]["score"] == max(rows[name]["scores"])
        assert not rows[name].keys() & {"embedding", "embeddings", "label"}
    assert rows["one-to-many"]["scores"][2] == pytest.approx(1, abs=1e-6), "a text and itself"
    assert all(rows[name]["scores"] is rows[name]["score"] is None for name in CODES)
    assert "(such lines are for a job with task: embed)" in rows["vector"]["error_message"]


def test_the_jobs_text_stands_before_both(model: Path, folder: Path) -> None:
    rows = rows_of(job_over(model, embedding={"prompt": "query: "}))
    assert rows["pair"]["scores"] == pytest.approx(wanted(model, pairs_of("pair"), before="query: "), abs=1e-5)


def test_without_cutting_the_text_that_is_too_long_is_named(model: Path, folder: Path) -> None:
    error = rows_of(job_over(model, run={"max_error_rate": 1}))["long"]
    assert error["error_code"] == "too_long" and error["error_message"].startswith("pair 1, text 1: the prompt has ")


def test_from_a_batch_file_and_back_by_commands(model: Path, folder: Path) -> None:
    cli("init", "in.jsonl", "--task", "embed", "--model", str(model), "--out", "job.yaml")
    written = Path("job.yaml").read_text()
    Path("job.yaml").write_text(written.replace("# prompt: {score_lines: true}", "prompt: {score_lines: true}"))
    assert "lines of /v1/score and /v1/rerank: custom_id" in cli("validate", "job.yaml").output
    shown = cli("preview", "job.yaml", "-n", "2").output
    assert re.search(r"scores +pair 2 1\.0000(, pair \d 0\.\d{4}){3}", shown), "the best first"
    keys = ("--set", "run.max_error_rate=1", "--set", "output.path=out", "--set", "engine.dtype=float32")
    assert '"SELECT * FROM results LIMIT 5"' in cli("submit", "job.yaml", *keys, ends_with=3).output
    assert "7 rows: 5 output and 2 error lines" in cli("export", "out", "--format", "openai", "-o", "a.jsonl").stderr
    answers = {line["custom_id"]: line["response"]["body"] for line in lines_of("a.jsonl")}
    assert list(answers) == GOOD
    for name, body in answers.items():
        scores = wanted(model, pairs_of(name))
        if "score" in BODIES[name][0]:
            assert [each["score"] for each in body["data"]] == pytest.approx(scores, abs=1e-5)
            assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0
        for result in body.get("results", ()):
            assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)
    [best, _] = answers["ranks"]["results"]
    assert best["document"]["text"] == "close the file"
    assert "all is well" in cli("verify", "out").output


def test_a_night_runs_what_is_new(model: Path, folder: Path) -> None:
    job = job_over(model, input={"path": "in.jsonl", "id": "custom_id"})
    job["run"] = {**job["run"], "incremental": True}
    before = rows_of(job)
    Path("in.jsonl").write_text(Path("in.jsonl").read_text().replace('"read", "close"', '"all", "close"'))
    after = rows_of(job)
    assert {name for name in before if before[name]["row_key"] != after[name]["row_key"]} == {"by-text"}
    assert after["by-text"]["scores"][0] == pytest.approx(wanted(model, [("all", "it")])[0], abs=1e-5)


def test_columns_are_not_lines(model: Path, folder: Path) -> None:
    Path("in.jsonl").write_text('{"custom_id": "a", "text": "read"}\n')
    with pytest.raises(JobFileError, match=r"it has no url, body; .* embed each column, and compare the vectors"):
        rows_of(job_over(model))

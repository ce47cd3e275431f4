"""A whole job over lines of vLLM's /v1/score and /v1/rerank: its scores are transformers' own of each pair alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from bulkrun.errors import JobFileError
from tests.launch.whole_jobs import cli, job_of_parts, lines_of, rows_of
from tests.models.tiny_pairs import pair_logits, save_pair_classifier

ROOT = Path(__file__).parent.parent.parent
LENGTH = 24
ONE_SCORE = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
DOCUMENTS = ["read a line of it", "all files", "the line and the file", "all files"]
BODIES: dict[str, tuple[str, Any]] = {
    "pair": ("/v1/score", {"text_1": "close the file", "text_2": "read a line of it"}),
    "one-to-many": ("/v1/score", {"queries": "close the file", "documents": DOCUMENTS}),
    "by-text": ("/score", {"data_1": ["read", "close"], "data_2": ["it", "[SEP] the file"]}),
    "empty": ("/v1/rerank", {"query": "read", "documents": ["it", " "]}),
    "ranks": ("/v1/rerank", {"query": "close the file", "documents": DOCUMENTS, "top_n": 2}),
    "uneven": ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
    "separator": ("/v1/rerank", {"query": "a [SEP] b", "documents": "read"}),
    "long": ("/v2/rerank", {"query": "read", "documents": ["it", "the line " * 30], "return_documents": False}),
    "long-query": ("/rerank", {"query": "the line " * 30, "documents": ["it", "all"]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
}
BROKEN = "{no JSON\n"
CODES = {"empty": "empty_prompt", "uneven": "bad_input", "long-query": "too_long", "chat": "bad_input"}
GOOD = [name for name in BODIES if name not in CODES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reranker")
    return save_pair_classifier(path, "bert_in_panels", max_position_embeddings=LENGTH, **ONE_SCORE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, (url, body) in BODIES.items()]
    texts = [json.dumps(line) + "\n" for line in lines]
    Path("in.jsonl").write_text("".join([*texts[:3], BROKEN, *texts[3:]]))
    return tmp_path


def pairs_of(name: str) -> list[tuple[str, str]]:
    """Taken apart here once more, by vLLM's documentation."""
    body = BODIES[name][1]
    first, second = ([body[key]] if isinstance(body[key], str) else body[key] for key in list(body)[:2])
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def wanted(model: Path, pairs: list[tuple[str, str]]) -> list[float]:
    return pair_logits(model, pairs, truncation="only_second", max_length=LENGTH).sigmoid()[:, 0].tolist()


def job_over(model: Path, **sections: Any) -> dict[str, Any]:
    return job_of_parts("classify", model, **{"prompt": {"score_lines": True}, **sections})


def test_every_score_is_the_models_own_of_its_pair_and_a_bad_line_costs_no_other(model: Path, folder: Path) -> None:
    rows = rows_of(job_over(model))
    assert rows.keys() == {*BODIES, None}
    assert {name: row["error_code"] for name, row in rows.items() if row["error_code"]} == {**CODES, None: "bad_input"}
    for name in GOOD:
        assert rows[name]["scores"] == pytest.approx(wanted(model, pairs_of(name)), abs=1e-5), name
        assert rows[name]["score"] == max(rows[name]["scores"]) and rows[name]["label"] is None
    assert rows["one-to-many"]["scores"] == rows["ranks"]["scores"]
    assert rows["one-to-many"]["scores"][0] == pytest.approx(rows["pair"]["score"], abs=1e-6)
    assert re.match(r"pair 0: the first text takes \d+ tokens", rows["long-query"]["error_message"])


def test_without_cutting_the_pair_that_is_too_long_is_named(model: Path, folder: Path) -> None:
    error = rows_of(job_over(model, run={"max_error_rate": 1}))["long"]
    assert error["error_code"] == "too_long" and error["error_message"].startswith("pair 1: the prompt has ")


def test_from_a_batch_file_and_back_by_commands(model: Path, folder: Path) -> None:
    cli("init", "in.jsonl", "--task", "classify", "--model", str(model), "--out", "job.yaml")
    assert "lines of /v1/score and /v1/rerank: custom_id" in cli("validate", "job.yaml").output
    shown = cli("preview", "job.yaml", "-n", "2").output
    assert re.search(r"all files \[SEP\]\s+\[CLS\] close the file \[SEP\] the line", shown), "each pair has a line"
    assert re.search(r"scores +(pair \d 0\.\d{4}, ){3}pair \d 0\.\d{4}", shown)
    planned = json.loads(cli("plan", "job.yaml", "--probe", "1", "--json").stdout)
    assert planned["rows"] == len(BODIES) + 1 and planned["duplicate_prompts"] == 1
    cli("submit", "job.yaml", "--set", "run.max_error_rate=1", "--set", "output.path=out", ends_with=3)
    asked = "SELECT custom_id, scores FROM results WHERE error_code IS NULL ORDER BY row"
    rows = {row["custom_id"]: row["scores"] for row in json.loads(cli("query", "out", asked, "--json").stdout)["rows"]}
    assert "11 rows: 6 output and 5 error lines" in cli("export", "out", "--format", "openai", "-o", "a.jsonl").stderr
    answers = {line["custom_id"]: line["response"]["body"] for line in lines_of("a.jsonl")}
    assert list(answers) == list(rows) == GOOD
    for name, body in answers.items():
        if "score" in BODIES[name][0]:
            assert [each["score"] for each in body["data"]] == pytest.approx(rows[name], abs=1e-7)
        for result in body.get("results", ()):
            assert result["relevance_score"] == pytest.approx(rows[name][result["index"]], abs=1e-7)
    best = sorted(range(4), key=lambda at: (-rows["ranks"][at], at))[:2]
    assert [result["index"] for result in answers["ranks"]["results"]] == best
    assert [result["document"]["text"] for result in answers["ranks"]["results"]] == [DOCUMENTS[at] for at in best]
    assert all(result.keys() == {"index", "relevance_score"} for result in answers["long"]["results"])
    assert [line["custom_id"] for line in lines_of("a.errors.jsonl")] == [None, *CODES]
    assert "all is well" in cli("verify", "out").output


def test_the_shipped_job_runs_on_the_shipped_lines(model: Path, folder: Path) -> None:
    shutil.copytree(ROOT / "examples", "examples")
    shipped = (ROOT / "jobs/score_lines.yaml").read_text()
    cli("submit", str(ROOT / "jobs/score_lines.yaml"), "--set", f"model={model}")
    query = re.search(r'bulkrun query out/score_lines "(.*)"', shipped)
    assert query is not None
    found = json.loads(cli("query", "out/score_lines", query[1], "--json").stdout)["rows"]
    lines = {line["custom_id"]: line["body"] for line in lines_of("examples/score_lines.jsonl")}
    assert [(row["custom_id"], row["pairs"]) for row in found] == list(zip(lines, (1, 3, 2, 4), strict=True))
    cli("export", "out/score_lines", "--format", "openai", "-o", "a.jsonl")
    ranks = lines_of("a.jsonl")[-1]["response"]["body"]["results"]
    pair = [(lines["rerank"]["query"], document) for document in lines["rerank"]["documents"]]
    best = sorted(wanted(model, pair), reverse=True)[:2]
    assert [result["relevance_score"] for result in ranks] == pytest.approx(best, abs=1e-5)


def test_parquet_brings_bodies_as_structs(model: Path, folder: Path) -> None:
    duckdb.sql(
        "COPY (SELECT 'a' AS custom_id, '/v1/rerank' AS url, {query: 'read', documents: ['it', 'all'], top_n: NULL} AS "
        "body) TO 'in.parquet'"
    )
    [row] = rows_of(job_over(model, input={"path": "in.parquet"})).values()
    assert row["scores"] == pytest.approx(wanted(model, [("read", "it"), ("read", "all")]), abs=1e-5)
    [line] = map(json.loads, cli("export", "out", "--format", "openai").stdout.splitlines()[:1])
    assert sorted(result["index"] for result in line["response"]["body"]["results"]) == [0, 1]


def test_results_that_do_not_hold_the_lines_cannot_be_answers(model: Path, folder: Path) -> None:
    rows_of(job_over(model, input={"path": "in.jsonl", "columns": ["url"]}))
    said = cli("export", "out", "--format", "openai", ends_with=2).output
    assert "the results have no column body (input.columns left it out)" in said


def test_a_retry_cuts_what_was_too_long_and_a_night_runs_what_is_new(model: Path, folder: Path) -> None:
    job = job_over(model, input={"path": "in.jsonl", "id": "custom_id"}, run={"max_error_rate": 1})
    Path("in.jsonl").write_text(Path("in.jsonl").read_text().replace(BROKEN, ""))
    assert rows_of(job)["long"]["error_code"] == "too_long"
    cli("retry", "out", "--failed", "--set", "run.on_too_long=truncate_right", ends_with=3)
    asked = "SELECT scores FROM results WHERE custom_id = 'long'"
    [row] = json.loads(cli("query", "out", asked, "--json").stdout)["rows"]
    assert row["scores"] == pytest.approx(wanted(model, pairs_of("long")), abs=1e-5)

    night = {**job, "output": {"path": "nights"}, "run": {**job["run"], "incremental": True}}
    before = rows_of(night)
    Path("in.jsonl").write_text(Path("in.jsonl").read_text().replace('"read", "close"', '"all", "close"'))
    after = rows_of(night)
    keys = {name for name in before if before[name]["row_key"] != after[name]["row_key"]}
    assert keys == {"by-text"}
    assert after["by-text"]["scores"][0] == pytest.approx(wanted(model, [("all", "it")])[0], abs=1e-5)


def test_a_model_of_several_labels_is_refused_before_anything_runs(tmp_path: Path, folder: Path) -> None:
    three = save_pair_classifier(tmp_path / "three", "bert_in_panels", max_position_embeddings=LENGTH)
    with pytest.raises(JobFileError, match=r"prompt\.score_lines: the model .* has 3 labels \(a, b, c\)"):
        rows_of(job_over(three))

"""A whole job over pairs of texts: its scores are transformers' own of the same two texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import bulkrun
from bulkrun.cli import main
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_pairs import pair_logits, save_pair_classifier

LENGTH = 24
ROWS: list[dict[str, Any]] = [
    {"query": "close the file", "title": "files", "body": "read a line of it"},
    {"query": "read", "title": "[SEP] the", "body": "all " * 40},
    {"query": "a [SEP] line", "title": "it", "body": "close"},
    {"query": "close the file", "title": " ", "body": ""},
    {"query": "close the file", "title": "files", "body": None},
    {"query": "", "title": "files", "body": "read"},
    {"query": "read all " * 20, "title": "files", "body": "read"},
    {"query": "close the file", "title": "files", "body": "read a line of it"},
]
ERRORS = [None, None, None, "empty_prompt", "bad_input", "empty_prompt", "too_long", None]
PAIR = {"column": "query", "text_pair": "{{ title }} {{ body }}"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_pair_classifier(tmp_path / "model", "bert_in_panels", max_position_embeddings=LENGTH)


def wanted(model: Path, row: dict[str, Any], side: str = "right") -> list[float]:
    cut = {"truncation": "only_second", "max_length": LENGTH}
    pair = (row["query"], f"{row['title']} {row['body']}")
    return [float(score) for score in pair_logits(model, [pair], side=side, **cut)[0].softmax(-1)]


def job_over(model: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "name": "ranks",
        "task": "classify",
        "model": str(model),
        "input": {"path": str(folder / "in.jsonl")},
        "prompt": PAIR,
        "engine": {"dtype": "float32", "max_num_batched_tokens": 48},
        "output": {"path": str(folder / "out")},
        "run": {"max_error_rate": 1, "on_too_long": "truncate_right"},
        **sections,
    }


def rows_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    with one_process(own_engine):
        done = bulkrun.run_job(job)
    rows = [row for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: int(row["row"]))


@pytest.mark.parametrize("side", ["right", "left"])
def test_every_score_is_the_models_own_of_both_texts(side: str, model: Path, tmp_path: Path) -> None:
    rows = rows_of(job_over(model, tmp_path, run={"max_error_rate": 1, "on_too_long": f"truncate_{side}"}))
    assert [row["error_code"] for row in rows] == ERRORS
    for given, row in zip(ROWS, rows, strict=True):
        if row["error_code"] is None:
            scores = wanted(model, given, side)
            assert row["scores"] == pytest.approx(scores, abs=1e-5)
            assert row["label"] == "abc"[scores.index(max(scores))]
    assert rows[1]["prompt_tokens"] == LENGTH
    said = [row["error_message"] for row in rows]
    assert said[3] == "prompt.text_pair: the second text is empty"
    assert said[4].startswith("prompt.text_pair: prints 'body', which is null in this row")
    assert re.search(
        r"the first text takes 43 tokens .*, and there is room for 24: .* only the second text is cut", said[6]
    )


def test_without_cutting_what_is_too_long_is_an_error(model: Path, tmp_path: Path) -> None:
    rows = rows_of(job_over(model, tmp_path, run={"max_error_rate": 1}))
    assert [row["error_code"] for row in rows] == [None, "too_long", *ERRORS[2:]]


def test_validate_plan_and_preview_know_both_texts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(job_over(model, tmp_path)))
    with one_process(own_engine):
        checked, planned, shown = (
            CliRunner().invoke(main, [command[0], str(tmp_path / "job.yaml"), *command[1:]], catch_exceptions=False)
            for command in (["validate"], ["plan", "--json"], ["preview", "-n", "1"])
        )
    assert re.search(r"prompt +column 'query': text, and prompt\.text_pair", checked.output)
    assert json.loads(planned.stdout)["rows"] == len(ROWS)
    assert "[CLS] close the file [SEP] file" in shown.output and "a line of it [SEP]" in shown.output


def test_a_column_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        json.dumps(job_over(model, tmp_path, prompt={**PAIR, "text_pair": "{{ boddy }}"}))
    )
    checked = CliRunner().invoke(main, ["validate", str(tmp_path / "job.yaml")], catch_exceptions=False)
    assert checked.exit_code == 2 and "prompt.text_pair: the input has no column 'boddy'" in checked.output


def test_a_night_runs_what_has_another_second_text(model: Path, tmp_path: Path) -> None:
    run = {"incremental": True, "max_error_rate": 1}
    rows = [{"id": number, "query": "read", "title": word, "body": "it"} for number, word in enumerate(("a", "all"))]
    job = job_over(model, tmp_path, input={"path": str(tmp_path / "in.jsonl"), "id": "id"}, run=run)
    for word in ("all", "line"):
        rows[1]["title"] = word
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = {row["id"]: row for row in rows_of(job)}
        assert made[1]["scores"] == pytest.approx(wanted(model, rows[1]), abs=1e-5)
        assert made[0]["row_key"] != made[1]["row_key"]


@pytest.mark.parametrize("on_too_long", ["error", "truncate_right"])
def test_from_python_pairs_are_tuples(on_too_long: Any, model: Path) -> None:
    classifier = bulkrun.Classifier(model, dtype="float32", device="cpu", on_too_long=on_too_long, pairs=True)
    pairs = [(row["query"], f"{row['title']} {row['body'] or ''}") for row in ROWS]
    outputs = classifier.classify([*pairs, "alone", ("a", "b", "c")])  # type: ignore[list-item]
    for row, output in zip(ROWS, outputs, strict=False):
        if output.error is None:
            scores = wanted(model, {**row, "body": row["body"] or ""})
            assert output.scores == pytest.approx(dict(zip("abc", scores, strict=True)), abs=1e-5)
            assert (output.prompt, output.text_pair) == pairs[output.index]
    codes = [output.error and output.error.code for output in outputs]
    cut = None if on_too_long == "truncate_right" else "too_long"
    assert codes == [None, cut, None, "empty_prompt", None, "empty_prompt", "too_long", None, "bad_input", "bad_input"]
    assert outputs[6].error is not None
    assert ("only the second text is cut" in outputs[6].error.message) == (on_too_long == "truncate_right")
    assert outputs[3].error is not None and outputs[3].error.message.startswith("text_pair: ")
    assert [output.index for output in classifier.classify(iter(pairs))] == list(range(len(pairs)))


def test_a_classifier_of_single_texts_says_who_takes_pairs(model: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    [pair, half] = bulkrun.Classifier(model, device="cpu", pairs=True).classify([deep, ("a", deep)])  # type: ignore[list-item]
    assert pair.error == half.error is not None and pair.error.message.startswith("what is nested too deeply is not a")
    [output, nested] = bulkrun.Classifier(model, dtype="float32", device="cpu").classify([("a", "b"), (deep, "b")])  # type: ignore[list-item]
    assert nested.error is not None and "pairs=True" in nested.error.message
    assert output.error is not None and "pairs=True" in output.error.message

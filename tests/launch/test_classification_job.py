"""A whole job over a sequence classification model: its scores are transformers' own of the same texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

import bulkrun
from bulkrun.cli import main
from bulkrun.errors import BulkrunError, JobFileError, ModelError
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.launch.model_list import describe_model
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_encoders import class_logits, save_tiny_classifier, write_json, write_words
from tests.models.tiny_models import edit_weights

WORDS = ["close", "the", "file", "##s", "read", "a", "line", "of", "it", "and", "all"]
LENGTH = 16
TEXTS = ["close the file", "read a line of it", "Files", "", "unheard", "close the file", "read all files and " * 9]


def save(folder: Path, **overrides: Any) -> Path:
    """A BERT with words of its own, 16 tokens at most."""
    save_tiny_classifier(folder, "bert_in_panels", **overrides)
    write_json(folder / "tokenizer_config.json", {"model_max_length": LENGTH})
    return write_words(folder, WORDS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


def wanted(model: Path, text: str) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"]
    [scores] = class_logits(model, [ids]).softmax(-1).tolist()
    return [float(score) for score in scores]


def job_over(model: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return {
        "name": "labels",
        "task": "classify",
        "model": str(model),
        "input": {"path": str(folder / "in.jsonl")},
        "engine": {"dtype": "float32", "max_num_batched_tokens": 24},
        "output": {"path": str(folder / "out")},
        "run": {"max_error_rate": 1, "on_too_long": "truncate_right"},
        **sections,
    }


def rows_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    with one_process(own_engine):
        done = bulkrun.run_job(job)
    rows = [row for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: int(row["row"]))


def test_every_score_is_the_models_own_whatever_shares_its_step(model: Path, tmp_path: Path) -> None:
    rows = rows_of(job_over(model, tmp_path))
    assert [row["error_code"] for row in rows] == ["empty_prompt" if not text else None for text in TEXTS]
    for text, row in zip(TEXTS, rows, strict=True):
        if text:
            scores = wanted(model, text)
            assert row["scores"] == pytest.approx(scores, abs=1e-5)
            assert row["label"] == "abc"[scores.index(max(scores))] and row["score"] == max(row["scores"])
    assert rows[-1]["prompt_tokens"] == LENGTH


def test_its_progress_is_of_a_job_without_outputs_to_its_end(model: Path, tmp_path: Path) -> None:
    seen: list[ProgressSnapshot] = []
    with one_process(own_engine):
        bulkrun.run_job(job_over(model, tmp_path), on_progress=seen.append)
    assert seen[-1].rows_done == len(TEXTS) and not any(one.generates for one in seen)


def test_labels_may_have_other_names_and_are_recorded(model: Path, tmp_path: Path) -> None:
    names = {"labels": ["poor", "fair", "good"]}
    rows = rows_of(job_over(model, tmp_path, classification=names))
    assert {row["label"] for row in rows} <= {None, *names["labels"]} and rows[0]["label"] is not None
    recorded = json.loads((tmp_path / "out/.bulkrun/run.json").read_text())["job"]["classification"]
    assert recorded == names | {"activation": "softmax"}


@pytest.mark.parametrize(
    ("labels", "said"),
    [(["no", "yes"], r"classification\.labels: 2 names, and the model has 3 labels \(a, b, c\)"),
     (["no", "yes", "no"], r"classification\.labels: no more than once")],
)  # fmt: skip
def test_labels_that_do_not_fit_are_refused(labels: list[str], said: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=said):
        rows_of(job_over(model, tmp_path, classification={"labels": labels}))


def test_a_models_label_that_is_no_text_is_named_with_what_to_do(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", config | {"id2label": {"0": "a", "1": "\ud83d", "2": "c"}})
    with pytest.raises(
        JobFileError, match=r"^classification\.labels: '\\ud83d' is not Unicode text .*; name the labels"
    ):
        rows_of(job_over(model, tmp_path))
    assert len(rows_of(job_over(model, tmp_path, classification={"labels": ["a", "b", "c"]}))) == len(TEXTS)


def test_a_classifier_whose_numbers_are_none_is_not_called_an_unknown_one(model: Path, tmp_path: Path) -> None:
    edit_weights(model, classifier__bias=torch.full((3,), float("nan")))
    with pytest.raises(ModelError, match=r"what it makes of a short text is not finite: its weights are damaged"):
        rows_of(job_over(model, tmp_path))


def test_a_model_that_writes_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BulkrunError, match=r"Qwen3ForCausalLM, and none ends in ForSequenceC.*: .*task: embed"):
        rows_of(job_over(Path("bundled:tiny"), tmp_path))


def test_validate_and_preview_say_what_comes(model: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(job_over(model, tmp_path)))
    with one_process(own_engine):
        checked = CliRunner().invoke(main, ["validate", str(tmp_path / "job.yaml")], catch_exceptions=False)
        shown = CliRunner().invoke(main, ["preview", str(tmp_path / "job.yaml"), "-n", "1"], catch_exceptions=False)
    assert re.search(r"labels +a, b, c; activation softmax", checked.output)
    assert re.search(r"label +[abc]\b", shown.output) and re.search(r"scores +[abc] 0\.\d{4}, [abc] 0\.", shown.output)


def test_a_text_is_not_taken_for_the_names_of_its_letters(model: Path) -> None:
    with pytest.raises(JobFileError, match=r'classification\.labels: "xyz" is not a list'):
        bulkrun.Classifier(model, labels="xyz")


def test_from_python_each_text_has_its_label(model: Path) -> None:
    classifier = bulkrun.Classifier(model, dtype="float32", device="cpu", on_too_long="truncate_right")
    assert classifier.labels == ("a", "b", "c") and classifier.max_model_len == LENGTH
    outputs = classifier.classify([*TEXTS, None])  # type: ignore[list-item]
    for text, output in zip(TEXTS, outputs, strict=False):
        if not text:
            assert output.error is not None and output.error.code == "empty_prompt" and output.scores is None
            continue
        scores = dict(zip("abc", wanted(model, text), strict=True))
        assert output.scores == pytest.approx(scores, abs=1e-5)
        assert (output.label, output.score) == (max(scores, key=scores.__getitem__), max(output.scores.values()))
    assert outputs[-1].error is not None and outputs[-1].error.code == "bad_input"
    assert [output.index for output in classifier.classify(iter(TEXTS))] == list(range(len(TEXTS)))


def test_a_regression_has_a_score_alone(tmp_path: Path) -> None:
    one = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    model = save(tmp_path / "model", **one)
    [output] = bulkrun.Classifier(model, dtype="float32", device="cpu").classify("close the file")
    ids = AutoTokenizer.from_pretrained(model)("close the file")["input_ids"]
    assert output.label is None and output.score == pytest.approx(class_logits(model, [ids]).item(), abs=1e-5)


def test_the_list_of_models_knows_what_such_a_model_is_for(model: Path) -> None:
    described = describe_model(str(model))
    assert (described["level"], described["max_model_len"]) == ("classify", LENGTH)
    assert described["labels"] == "a, b, c; activation softmax" and "vectors" not in described

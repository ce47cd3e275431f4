"""`bulkrun bench texts`: what it counts, says and refuses. Nothing here is about how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bulkrun.cli import main
from tests.models.tiny_encoders import save_tiny_classifier, save_tiny_encoder, write_modules

FEW = ("--input-len", "3-9", "--num-requests", "5")
MEAN = ("--set", "embedding.pooling=mean")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = save_tiny_encoder(tmp_path_factory.mktemp("bert"), "bert_in_panels")
    write_modules(path)
    return str(path)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_classifier(tmp_path_factory.mktemp("classifier"), "bert_in_panels"))


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "texts", *arguments], catch_exceptions=False)


def facts_of(*arguments: str) -> dict[str, Any]:
    done = bench(*arguments, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.stderr
    [line] = done.stdout.splitlines()
    facts = json.loads(line)
    assert isinstance(facts, dict)
    return facts


def test_vectors_are_counted_in_texts_and_tokens(encoder: str) -> None:
    facts = facts_of("--model", encoder, *FEW, "--dtype", "float32")
    assert (facts["engine"], facts["task"], facts["dtype"], facts["requests"]) == ("bulkrun", "embed", "float32", 5)
    assert (facts["pooling"], facts["input_len"], 15 <= facts["input_tokens"] <= 45) == ("mean", "3-9", True)
    assert facts["load_s"] > 0 and facts["wall_s"] > 0
    assert facts["input_tok_s"] / facts["texts_s"] == pytest.approx(facts["input_tokens"] / 5, rel=0.01)


def test_a_model_with_a_head_for_labels_makes_labels_unless_vectors_are_asked_for(classifier: str) -> None:
    facts = facts_of("--model", classifier, *FEW)
    assert (facts["task"], facts["labels"], facts["activation"]) == ("classify", 3, "softmax")
    assert facts_of("--model", classifier, *FEW, "--task", "embed", *MEAN)["task"] == "embed"


def test_a_dataset_of_texts_is_encoded_by_the_models_tokenizer(tmp_path: Path) -> None:
    dataset = tmp_path / "texts.jsonl"
    dataset.write_text(
        '{"prompt": "Once upon a time there was a cat"}\n{"prompt_token_ids": [7, 8], "max_tokens": 9}\n'
    )
    facts = facts_of("--model", "bundled:tiny", *MEAN, "--dataset", str(dataset))
    assert (facts["dataset"], facts["requests"], facts["dimensions"]) == ("texts.jsonl", 2, 256)
    assert 4 < facts["input_tokens"] < 30
    before = ("--set", "embedding.prompt=passage")
    longer = facts_of("--model", "bundled:tiny", *MEAN, *before, "--dataset", str(dataset))
    assert longer["input_tokens"] > facts["input_tokens"], "as a job puts it before each text"


@pytest.mark.parametrize("made", ["encoder", "classifier"])
def test_who_measures_text_of_such_a_model_is_told_of_this_benchmark(made: str, request: pytest.FixtureRequest) -> None:
    arguments = ["bench", "throughput", "--model", request.getfixturevalue(made)]
    refused = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert refused.exit_code == 2 and "writes no text; bulkrun bench texts measures" in refused.stderr


def test_without_json_it_is_one_fact_a_line(encoder: str) -> None:
    shown = bench("--model", encoder, *FEW).stdout
    assert any(line.split()[0] == "texts_s" for line in shown.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "bundled:tiny", *FEW], "embedding.pooling"),
        (["--model", "bundled:tiny", "--task", "classify"], "none ends in ForSequenceClassification"),
        (["--model", "bundled:tiny", *MEAN, "--input-len", "2000"], "a text has 2000 tokens, and the model takes 1024"),
        (["--model", "bundled:tiny", "--set", "run.limit=3"], "takes keys of engine, embedding, classification only"),
        (
            ["--model", "bundled:tiny", "--set", "classification.labels=[a]"],
            "is for labels, and this job makes vectors",
        ),
        (["--model", "bundled:tiny", *MEAN, "--set", "embedding.prompt=x"], "give texts with --dataset"),
        (
            ["--model", "bundled:tiny", *MEAN, "--max-num-seqs", "4", "--max-num-batched-tokens", "2"],
            "error: engine.max_num_batched_tokens: 2 is below max_num_seqs, 4",
        ),
        (["--model", "bundled:tiny", *MEAN, "--max-model-len", "1"], "not in the range x>=2"),
        (["--model", "bundled:tiny", "--input-len", "x"], "--input-len 'x': not a length"),
        (["--model", "bundled:tiny", "--dataset", "d", "--input-len", "3"], "leave out --input-len"),
        (["--model", "no/where/at/all"], "no such directory"),
        ([], "--model"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_fix(arguments: list[str], said: str) -> None:
    refused = bench(*arguments)
    assert refused.exit_code in (1, 2) and said in refused.stderr and refused.stdout == ""


def test_a_row_that_is_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    dataset = tmp_path / "texts.jsonl"
    dataset.write_text('{"prompt": ""}\n')
    refused = bench("--model", "nowhere", "--dataset", str(dataset))
    assert refused.exit_code == 2
    assert f'{dataset}:1: a row is {{"prompt_token_ids": [1, 2] or "prompt": "text"}}' in refused.stderr

"""A whole job over a model in sentence-transformers' form: its vectors are transformers' own of the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import bulkrun
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_encoders import hidden_states, save_tiny_encoder, write_json, write_modules, write_words

WORDS = ["close", "the", "file", "##s", "read", "a", "line", "query", ":", "of", "it", "and", "all"]
LENGTH = 16
TEXTS = ["close the file", "read a line of it", "Files", "", "unheard", "close the file", "read all files and " * 9]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A BERT with words of its own, 16 tokens at most, and a prompt before each text."""
    folder = save_tiny_encoder(tmp_path / "model", "bert")
    write_modules(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH})
    asked = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", asked)
    return write_words(folder, WORDS)


def wanted(model: Path, text: str) -> list[float]:
    """The mean of the states of the text's tokens, cut at its end, with a length of 1."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(f"query: {text}", truncation=True, max_length=LENGTH)["input_ids"]
    [states] = hidden_states(model, [ids])
    mean = states.mean(dim=0)
    return [float(number) for number in mean / mean.norm()]


def rows_of(model: Path, folder: Path, **run: Any) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    job = {
        "name": "vectors",
        "task": "embed",
        "model": str(model),
        "input": {"path": str(folder / "in.jsonl")},
        "engine": {"dtype": "float32", "max_num_batched_tokens": 24},
        "output": {"path": str(folder / "out")},
        "run": {"max_error_rate": 1, **run},
    }
    with one_process(own_engine):
        done = bulkrun.run_job(job)
    rows = [row for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: int(row["row"]))


def test_every_vector_is_the_models_own_whatever_shares_its_step(model: Path, tmp_path: Path) -> None:
    rows = rows_of(model, tmp_path, on_too_long="truncate_right")
    assert [row["error_code"] for row in rows] == ["empty_prompt" if not text else None for text in TEXTS]
    for text, row in zip(TEXTS, rows, strict=True):
        if text:
            assert row["embedding"] == pytest.approx(wanted(model, text), abs=1e-5)
    assert rows[-1]["prompt_tokens"] == LENGTH


def test_a_text_that_is_too_long_is_its_own_error(model: Path, tmp_path: Path) -> None:
    rows = rows_of(model, tmp_path)
    assert [row["error_code"] for row in rows if row["embedding"] is None] == ["empty_prompt", "too_long"]
    assert f"the model takes {LENGTH};" in rows[-1]["error_message"]

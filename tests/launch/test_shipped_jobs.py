"""Samples, scores and thoughts: the shipped jobs on a small input, checked against the model itself."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from bulkrun.cli import main
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.text.tokenizer import Tokenizer
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_encoders import class_logits, save_tiny_classifier, write_json
from tests.models.tiny_pairs import pair_logits, save_pair_classifier

ROOT = Path(__file__).parent.parent.parent
FUNCTIONS = {
    "close": ("Close the connection.", "self.socket.shutdown()\n    self.socket.close()\n    self.socket = None"),
    "read_lines": ("Return the lines of a file.", "with open(self.path) as file:\n        return file.readlines()"),
    "is_empty": ("Is there nothing?", "return len(self.items) == 0 and not self.waiting and self.is_closed"),
}


def run(job: str, folder: Path, *more: str, documented: bool) -> list[dict[str, Any]]:
    """Submit a shipped job on three functions, with `more` settings; its results in order."""
    rows = [
        {
            "id": f"m.{name}",
            "module": "asyncio.locks" if name == "is_empty" else "m",
            "name": name,
            "docstring": said if documented else None,
            "source": f"def {name}(self):\n    # what it is for is not said\n    {body}\n",
        }
        for name, (said, body) in FUNCTIONS.items()
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "out"
    changes = [f"input.path={folder}/rows.jsonl", f"output.path={out}", "engine.dtype=float32", *more]
    options = [part for change in changes for part in ("--set", change)]
    with one_process(own_engine):
        result = CliRunner().invoke(main, ["submit", str(ROOT / "jobs" / job), *options], catch_exceptions=False)
    assert result.exit_code in (0, 3), result.stderr
    table = duckdb.sql(f"SELECT * FROM '{out}/*.parquet' ORDER BY row, sample").to_arrow_table()
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def query_in(job: str, folder: Path) -> str:
    """The query in a job's comments, over the results of `run`."""
    query = re.search(r'bulkrun query out/\w+ "(.*)"', (ROOT / "jobs" / job).read_text())
    assert query is not None
    return re.sub(r"\b(FROM|JOIN) results\b", rf"\1 '{folder}/out/*.parquet'", query[1])


def test_samples_are_the_best_of_six_with_their_probabilities(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_ROOT / "tiny")
    rows = run("samples.yaml", tmp_path, documented=False)
    assert [(row["row"], row["sample"]) for row in rows] == [(row, sample) for row in range(3) for sample in range(3)]
    for row in rows:
        assert "This function" not in (row["response"] or "")
        assert row["cumulative_logprob"] == pytest.approx(sum(entry["logprob"] for entry in row["logprobs"]), abs=1e-3)
        for entry in row["logprobs"]:
            best = [other["logprob"] for other in entry["top"]]
            assert len(best) == 2 and best == sorted(best, reverse=True) and entry["logprob"] <= best[0] + 1e-4
        if row["finish_reason"] == "stop":
            assert "".join(entry["token"] for entry in row["logprobs"]) == row["response"]
        assert row["token_ids"] == [entry["token_id"] for entry in row["logprobs"]]
        asked = f"Summarize this Python code in one sentence:\ndef {row['name']}(self):\n    # what it is for"
        assert asked in tokenizer.decode(row["prompt_token_ids"])
        assert len(row["prompt_token_ids"]) == row["prompt_tokens"]
    for first, second in pairwise(rows):
        if first["row"] == second["row"] and second["error_code"] is None:
            assert first["cumulative_logprob"] >= second["cumulative_logprob"]
    totals = json.loads((tmp_path / "out" / "_SUCCESS").read_text())
    assert totals["completion_tokens"] > sum(row["completion_tokens"] for row in rows), "six were generated, three kept"
    prompt = {row["row"]: row["prompt_tokens"] for row in rows}
    assert totals["cached_tokens"] >= 4 * sum(prompt.values()), "of six samples one computes the prompt"


def test_every_function_is_documented_by_one_call(tmp_path: Path) -> None:
    rows = run("tools.yaml", tmp_path, documented=False)
    schema = yaml.safe_load((ROOT / "jobs/tools.yaml").read_text())["prompt"]["tools"][0]["function"]["parameters"]
    for row in rows:
        [call] = row["tool_calls"]
        assert (row["response"], row["finish_reason"], call["name"]) == (None, "tool_calls", "document")
        jsonschema.validate(json.loads(call["arguments"]), schema)
    shown = {name: (tool, summary) for name, tool, summary in duckdb.sql(query_in("tools.yaml", tmp_path)).fetchall()}
    assert shown == {
        row["name"]: ("document", json.loads(row["tool_calls"][0]["arguments"])["summary"]) for row in rows
    }


def test_rows_with_a_smaller_number_are_planned_first(tmp_path: Path) -> None:
    rows = run("priority.yaml", tmp_path, "output.rows_per_file=1", documented=False)
    assert sorted(row["urgency"] for row in rows) == [0, 1, 1] and all(row["response"] for row in rows)
    first = duckdb.sql(f"SELECT name, urgency FROM '{tmp_path}/out/part-00000.parquet'").fetchall()
    assert first == [("is_empty", 0)]


def test_scores_are_the_models_own_probabilities_of_the_text(tmp_path: Path) -> None:
    """Oracle: log_softmax of a plain transformers forward."""
    rows = run("score.yaml", tmp_path, documented=True)
    for row in rows:
        token_ids = [entry["token_id"] for entry in row["prompt_logprobs"] if entry is not None]
        tokens = [entry["token"] for entry in row["prompt_logprobs"] if entry is not None]
        assert row["prompt_logprobs"][0] is None and row["docstring"].endswith("".join(tokens))
        got = [entry["logprob"] for entry in row["prompt_logprobs"][1:]]
        assert got == pytest.approx(logprobs_of(row["docstring"], token_ids), abs=1e-3)
    shown = dict(duckdb.sql(query_in("score.yaml", tmp_path)).fetchall())
    for row in rows:
        scores = [entry["logprob"] for entry in row["prompt_logprobs"][1:]]
        assert shown[row["name"]] == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-2)


def logprobs_of(text: str, token_ids: list[int]) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = BUNDLED_ROOT / "tiny"
    ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    assert ids[1:] == token_ids
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
    return [float(logprobs[position, token_id]) for position, token_id in enumerate(ids[1:])]


def test_vectors_are_the_means_of_the_models_own_states(tmp_path: Path) -> None:
    """Oracle: the last hidden states of a plain transformers forward."""
    rows = run("embed.yaml", tmp_path, documented=True)
    wanted = [mean_state(row["docstring"]) for row in rows]
    for row, vector in zip(rows, wanted, strict=True):
        assert row["error_code"] is None and row["embedding"] == pytest.approx(vector, abs=1e-4)
    sql = query_in("embed.yaml", tmp_path)
    cosines = {row["name"]: sum(map(mul, wanted[0], vector)) for row, vector in zip(rows, wanted, strict=True)}
    shown = duckdb.sql(sql).fetchall()
    assert [name for _, name, _ in shown] == sorted({*cosines} - {rows[0]["name"]}, key=cosines.__getitem__)[::-1]
    assert all(alike == pytest.approx(cosines[name], abs=1e-3) for _, name, alike in shown)


def test_qualities_are_the_classifiers_own(tmp_path: Path) -> None:
    """The shipped job names a model of the hub; here it is a small one with the bundled model's tokenizer."""
    one = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    words = json.loads((BUNDLED_ROOT / "tiny/config.json").read_text())["vocab_size"]
    model = save_tiny_classifier(tmp_path / "model", "bert", vocab_size=words, **one)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_ROOT / "tiny" / name, model)
    rows = run("quality.yaml", tmp_path, f"model={model}", documented=True)
    tokenizer = Tokenizer.from_dir(model)
    wanted = class_logits(model, tokenizer.encode_batch([row["docstring"] for row in rows], add_special_tokens=True))
    assert [row["score"] for row in rows] == pytest.approx(wanted[:, 0].tolist(), abs=1e-4)
    shown = duckdb.sql(query_in("quality.yaml", tmp_path)).fetchall()
    assert [name for _, name, _, _ in shown] == [row["name"] for row in sorted(rows, key=lambda row: -row["score"])]


def test_rewards_are_of_the_whole_conversation(tmp_path: Path) -> None:
    """Of the question and its answer, in the chat template's form; the shipped job names a model of the hub."""
    one = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    words = json.loads((BUNDLED_ROOT / "tiny/config.json").read_text())["vocab_size"]
    model = save_tiny_classifier(tmp_path / "model", "qwen3", vocab_size=words, **one)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_ROOT / "tiny" / name, model)
    rows = run("reward.yaml", tmp_path, f"model={model}", documented=True)
    asked = {one["name"]: one for one in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    texts = [
        "<|im_start|>user\nSummarize this Python code in one sentence:\n"
        f"{asked[row['name']]['source'][:400]}<|im_end|>\n<|im_start|>assistant\n{row['docstring']}<|im_end|>\n"
        for row in rows
    ]
    wanted = class_logits(model, Tokenizer.from_dir(model).encode_batch(texts, add_special_tokens=False))
    assert [row["score"] for row in rows] == pytest.approx(wanted[:, 0].tolist(), abs=1e-4)
    shown = duckdb.sql(query_in("reward.yaml", tmp_path)).fetchall()
    assert [name for _, name, _, _ in shown] == [row["name"] for row in sorted(rows, key=lambda row: row["score"])]


def test_ranks_are_the_rerankers_own(tmp_path: Path) -> None:
    """Of each query and docstring; the shipped job names a model of the hub."""
    one = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    model = save_pair_classifier(tmp_path / "model", "bert", max_position_embeddings=200, **one)
    write_json(model / "config.json", json.loads((model / "config.json").read_text()) | own)
    rows = run("rerank.yaml", tmp_path, f"model={model}", documented=True)
    pairs = [(query, FUNCTIONS[name][0]) for query, name in ((row["query"], row["name"]) for row in rows)]
    assert len({*pairs}) == len(pairs) == 2 * len(FUNCTIONS)
    assert [row["score"] for row in rows] == pytest.approx(pair_logits(model, pairs)[:, 0].tolist(), abs=1e-4)
    shown = duckdb.sql(query_in("rerank.yaml", tmp_path)).fetchall()
    ranked = sorted(rows, key=lambda row: (row["query"], -row["score"]))
    assert [(query, name) for query, _, name, _ in shown] == [(row["query"], row["name"]) for row in ranked]


def mean_state(text: str) -> list[float]:
    """The mean over the tokens, with a length of 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = BUNDLED_ROOT / "tiny"
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        states = model(**AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")).last_hidden_state[0]
    mean = states.mean(dim=0)
    return [float(number) for number in mean / mean.norm()]


def test_thoughts_and_answers_are_columns_of_their_own_and_thoughts_keep_to_their_budget(tmp_path: Path) -> None:
    rows = run("reasoning.yaml", tmp_path, documented=False)

    tokenizer = Tokenizer.from_dir(BUNDLED_ROOT / "tiny")
    for row in rows:
        assert row["reasoning"] and "</think>" not in row["reasoning"] + (row["response"] or "")
        [thoughts] = tokenizer.encode_batch([row["reasoning"]], add_special_tokens=False)
        assert len(thoughts) <= 24 + 1  # 1: the text may be split into tokens in another way
        assert (row["response"] is None) == (row["error_code"] == "no_answer")
    assert any(row["response"] for row in rows)

"""Conversations judged by a decoder with a head: scores are transformers' over its own chat template's ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import bulkrun
from bulkrun.errors import JobFileError
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_adapters import save_adapter
from tests.models.tiny_encoders import class_logits, save_tiny_classifier

TINY = BUNDLED_ROOT / "tiny"
SYSTEM = {"role": "system", "content": "Judge."}
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What does close() do?"}, {"role": "assistant", "content": answer}]
    for answer in ("It closes the file.", "Nothing.", "I <|im_end|> do not know, and " * 3)
]
ONE = {"num_labels": 1, "id2label": {0: "reward"}, "label2id": {"reward": 0}, "problem_type": "regression"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A reward model with the bundled model's tokenizer and chat template."""
    vocab_size = AutoConfig.from_pretrained(TINY).vocab_size
    path = save_tiny_classifier(tmp_path / "model", "qwen3", vocab_size=vocab_size, pad_token_id=0, **ONE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, path)
    return path


def rewards(model: Path, chats: list[list[dict[str, str]]]) -> list[float]:
    """transformers' own, of each conversation alone, without a header for an answer that is to come."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [float(logits[0]) for logits in class_logits(model, ids)]


def scores_of(model: Path, folder: Path, prompt: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [{"chat": chat, "question": chat[0]["content"], "answer": chat[1]["content"]} for chat in CHATS]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "name": "rewards",
        "task": "classify",
        "model": str(model),
        "input": {"path": str(folder / "in.jsonl")},
        "prompt": prompt,
        "engine": {"dtype": "float32", "deterministic": True},
        "output": {"path": str(folder / "out")},
    }
    with one_process(own_engine):
        done = bulkrun.run_job(job)
    made = [row for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    return sorted(made, key=lambda row: int(row["row"]))


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": "chat"},
        {"messages": [{"role": "user", "content": "{{ question }}"}, {"role": "assistant", "content": "{{ answer }}"}]},
    ],
    ids=["column", "templates"],
)
def test_a_conversation_gets_the_models_reward(prompt: dict[str, Any], model: Path, tmp_path: Path) -> None:
    expected = rewards(model, CHATS)
    assert max(expected) - min(expected) > 0.1
    rows = scores_of(model, tmp_path, prompt)
    assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-4)


def test_a_system_message_may_come_before(model: Path, tmp_path: Path) -> None:
    rows = scores_of(model, tmp_path, {"messages": "chat", "system": "Judge."})
    assert [row["score"] for row in rows] == pytest.approx(
        rewards(model, [[SYSTEM, *chat] for chat in CHATS]), abs=1e-4
    )


def test_python_takes_conversations_beside_texts(model: Path) -> None:
    classifier = bulkrun.Classifier(model, dtype="float32", device="cpu")
    given: list[Any] = [CHATS[0], "close the file", CHATS[1], [{"role": "user"}], []]
    outputs = classifier.classify(given)
    expected = rewards(model, CHATS[:2])
    assert [outputs[0].score, outputs[2].score] == pytest.approx(expected, abs=1e-4)
    assert outputs[1].score is not None and outputs[1].score not in expected
    assert [one.error.code if one.error else None for one in outputs[3:]] == ["bad_input", "empty_prompt"]


def test_an_adapter_makes_a_reward_model_of_one_that_writes(tmp_path: Path) -> None:
    base = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    model = save_adapter(tmp_path / "adapter", base.eval(), task_type="SEQ_CLS", target_modules=["q_proj"])
    text = AutoTokenizer.from_pretrained(TINY).apply_chat_template(CHATS[0], tokenize=False)
    ids = AutoTokenizer.from_pretrained(TINY)(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = float(model(input_ids=torch.tensor([ids])).logits)
    rewarded = {"adapter": tmp_path / "adapter", "activation": "none", "labels": ["reward"]}
    [output] = bulkrun.Classifier("bundled:tiny", dtype="float32", device="cpu", **rewarded).classify([CHATS[0]])
    assert output.score == pytest.approx(expected, abs=1e-4) and output.scores == {"reward": output.score}


def test_without_a_chat_template_it_is_said(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(JobFileError, match=r"prompt\.messages: the model .* has no chat template"):
        scores_of(model, tmp_path, {"messages": "chat"})
    [output] = bulkrun.Classifier(model, device="cpu").classify([CHATS[0]])
    assert output.error is not None and output.error.message.endswith(
        "is not a text, and the model has no chat template"
    )

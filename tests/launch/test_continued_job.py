"""Whole jobs that go on with the last message. The oracle is transformers: its prompt, and what it generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from tests.launch.whole_jobs import cli, lines_of, rows_of

CODE = "Summarize this Python code in one sentence:\ndef {name}(self):\n    self.file.{name}()"
BEGINNINGS = {"a": "Return", "b": "The file is", "c": "Close the ", "d": "Return"}


def chat(name: str) -> list[dict[str, str]]:
    asked = {"role": "user", "content": CODE.format(name="open" if name == "d" else "close")}
    return [asked, {"role": "assistant", "content": BEGINNINGS[name]}]


def job(rows: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "continued",
        "model": "bundled:tiny",
        "input": {"path": "in.jsonl", "id": "custom_id"},
        "sampling": {"max_tokens": 12, "temperature": 0},
        "engine": {"dtype": "float32"},
        "run": {"max_error_rate": 1},
        "output": {"path": "out"},
        **sections,
    }


def line(name: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": chat(name), **body},
    }


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def theirs(names: str) -> dict[str, str]:
    """What transformers adds to each of the messages."""
    folder = BUNDLED_ROOT / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = {}
    for name in names:
        asked = tokenizer.apply_chat_template(chat(name), continue_final_message=True, return_tensors="pt")
        [ids] = model.generate(**asked, do_sample=False, max_new_tokens=12)
        both = tokenizer.decode(ids, skip_special_tokens=True)
        made[name] = both[len(tokenizer.decode(asked["input_ids"][0], skip_special_tokens=True)) :]
    return made


def test_the_response_is_what_transformers_adds_to_the_message() -> None:
    rows = [{"custom_id": name, "m": chat(name)} for name in BEGINNINGS]
    bad = {"custom_id": "bad", "m": chat("a")[:1]}
    of_job = job([*rows, bad], prompt={"messages": "m", "continue_final_message": True})
    Path("job.json").write_text(json.dumps(of_job))
    [shown, *_] = json.loads(cli("preview", "job.json", "-n", "1", "--json").stdout)["rows"]
    assert shown["prompt"].endswith("assistant\nReturn")
    made = rows_of(of_job)
    assert {name: made[name]["response"] for name in BEGINNINGS} == theirs("abcd")
    assert (made["bad"]["error_code"], made["bad"]["response"]) == ("bad_input", None)


def test_a_batch_line_that_says_so_is_answered_with_what_is_new() -> None:
    lines = [
        line("a", continue_final_message=True, add_generation_prompt=False),
        line("b", continue_final_message=True),
        line("c", continue_final_message=True, response_format={"type": "json_object"}),
        line("d"),
    ]
    made = rows_of(job(lines))
    want = theirs("ab")
    assert {name: made[name]["response"] for name in want} == want
    assert isinstance(json.loads(made["c"]["response"]), dict), "the new text alone is JSON"
    cli("export", "out", "--format", "openai", "-o", "answers.jsonl")
    answers = {answer["custom_id"]: answer["response"]["body"] for answer in lines_of("answers.jsonl")}
    assert answers["a"]["choices"][0]["message"]["content"] == want["a"]
    assert answers["d"]["choices"][0]["message"]["content"] == made["d"]["response"]


def test_a_night_runs_the_rows_whose_beginning_is_another() -> None:
    names = ["a", "b"]
    prompt = {"messages": "m", "continue_final_message": True}
    incremental = {"incremental": True, "max_error_rate": 1}
    first = rows_of(job([{"custom_id": n, "m": chat(n)} for n in names], prompt=prompt, run=incremental))
    changed = [chat("a"), [*chat("b")[:1], {"role": "assistant", "content": "Open"}]]
    second = rows_of(
        job([{"custom_id": n, "m": m} for n, m in zip(names, changed, strict=True)], prompt=prompt, run=incremental)
    )
    assert second["a"]["row_key"] == first["a"]["row_key"] and second["b"]["row_key"] != first["b"]["row_key"]
    assert second["a"]["response"] == first["a"]["response"]


def test_a_message_goes_on_with_the_thoughts_or_the_answer_that_it_is_in() -> None:
    beginnings = {"thoughts": "<think>\nLet me see", "ended": "<think>\nHm.\n</think>\n\nIt is", "answer": "It is"}
    rows = [
        {"custom_id": name, "m": [*chat("a")[:1], {"role": "assistant", "content": said}]}
        for name, said in beginnings.items()
    ]
    sampling = {"temperature": 0, "thinking": {"max_tokens": 4}, "structured_outputs": {"choice": [" so", " not"]}}
    made = rows_of(job(rows, prompt={"messages": "m", "continue_final_message": True}, sampling=sampling))
    for name, row in made.items():
        assert (row["error_code"], row["response"] in (" so", " not")) == (None, True), row
        assert (row["reasoning"] is not None) == (name == "thoughts"), row

"""What makes another run: a task and its vectors do, a new version of bulkrun does not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from bulkrun.job.jobfile.load import job_of
from bulkrun.job.store.fingerprint import CHAT_TEMPLATE, KeySalt, differences
from bulkrun.job.store.run_record import RunRecord, new_record

JOB = {
    "name": "a",
    "model": "m",
    "input": {"path": "x.parquet", "id": "id"},
    "output": {"path": "o"},
    "run": {"incremental": True},
}


def record(**sections: Any) -> RunRecord:
    job = job_of({**JOB, **sections}).model_dump(mode="json")
    facts = {"files": [[1, 2, "f"]]}
    return new_record(job, input_facts=facts, model_facts={"fingerprint": "w"}, versions={})


def test_a_job_that_generates_is_the_run_it_was_before_there_were_vectors() -> None:
    """Both hashes are of a bulkrun that knew neither `task` nor `embedding`: runs made with it go on."""
    made = record(sampling={"top_k": 3})
    assert made.plan_hash == "940ab2ffd2ab21bb65ef47f330b325cf"
    assert made.key_salt == KeySalt("58f36c2913e7c7b912de3292cece3391")
    assert "embedding" not in made.identity


def test_a_record_that_knows_no_task_is_of_a_job_that_generates() -> None:
    made = record()
    del made.job["task"], made.job["embedding"]
    assert made.task == "generate" and job_of(made.job).generates


def test_a_job_of_single_texts_is_the_run_it_was_before_there_were_pairs() -> None:
    """Both hashes are of a bulkrun that did not know `prompt.text_pair`."""
    made = {"activation": "softmax", "labels": ["a", "b"]}
    single = record(task="classify", classification=made, prompt={"column": "a"})
    assert single.plan_hash == "a142306b91c15bf3b88d0b4dc43ff40e"
    assert single.key_salt == KeySalt("ba338d1e3975981f01a66d0b22648791")
    assert "text_pair" not in single.identity["prompt"]


def test_a_second_text_makes_another_run_and_other_rows() -> None:
    single = record(task="classify", prompt={"column": "a"})
    pairs, others = (record(task="classify", prompt={"column": "a", "text_pair": f"{{{{ {b} }}}}"}) for b in "bc")
    assert list(differences(single.identity, pairs.identity)) == ["prompt.text_pair"]
    assert single.key_salt != pairs.key_salt, "a model may read the same tokens otherwise"
    assert list(differences(pairs.identity, others.identity)) == ["prompt.text_pair"]
    assert pairs.key_salt == others.key_salt, "what a second text says is in its tokens"


def test_a_job_without_tools_is_the_run_it_was_before_there_were_any() -> None:
    """Both hashes are of a bulkrun that did not know `prompt.tools` and the calls of messages."""
    plain = record(prompt={"messages": [{"role": "user", "content": "{{ a }}"}]}, sampling={"max_tokens": 3})
    assert plain.plan_hash == "aa57daf81b6127bc7593e422ecc55662"
    assert plain.key_salt == KeySalt("845ac3da7dd02bcea8a043277088e379")


def test_continuing_the_last_message_makes_another_run_and_leaves_rows_what_their_tokens_are() -> None:
    """The hash is of a bulkrun that did not know `prompt.continue_final_message`."""
    messages = [{"role": "user", "content": "{{ a }}"}, {"role": "assistant", "content": "It is"}]
    anew, continued = (
        record(prompt={"messages": messages, "continue_final_message": continues}) for continues in (False, True)
    )
    assert anew.plan_hash == "3f3c82a5b38db8ae5d7a3533ed6b2025"
    assert list(differences(anew.identity, continued.identity)) == ["prompt.continue_final_message"]
    assert anew.plan_hash != continued.plan_hash and anew.key_salt == continued.key_salt


@pytest.mark.parametrize(
    "changed",
    [
        {"logprobs_over": "allowed"},
        {"logit_bias": {"5": 1.0}},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [5]},
        {"include_stop_str_in_output": True},
    ],
)
def test_what_changes_an_outputs_numbers_makes_another_run(changed: dict[str, Any]) -> None:
    sampling = {"logprobs": 2, "structured_outputs": {"choice": ["a", "b"]}}
    one, other = record(sampling=sampling), record(sampling={**sampling, **changed})
    assert all(key.startswith(f"sampling.{next(iter(changed))}") for key in differences(one.identity, other.identity))
    assert one.plan_hash != other.plan_hash and one.key_salt != other.key_salt


def test_tools_and_what_of_them_has_to_be_called_make_another_run() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"b": 1, "a": 2}}} for name in "fg"]
    named = {"type": "function", "function": {"name": "f"}}

    def offering(prompt: dict[str, Any], calls: dict[str, Any] | None = None) -> RunRecord:
        return record(prompt={"column": "a", **prompt}, sampling={"tool_calls": calls or {"format": "hermes"}})

    one = offering({"tools": tools})
    changes: list[tuple[RunRecord, str]] = [
        (offering({"tools": tools[::-1]}), "prompt.tools"),
        (offering({"tools": [json.loads(json.dumps(tool, sort_keys=True)) for tool in tools]}), "prompt.tools"),
        (offering({"tools": "a"}), "prompt.tools"),
        (offering({"tools": tools, "tool_choice": "required"}), "prompt.tool_choice"),
        (offering({"tools": tools, "tool_choice": named}), "prompt.tool_choice"),
        (offering({"tools": tools}, {"format": "mistral"}), "sampling.tool_calls.format"),
        (offering({"tools": tools}, {"format": "hermes", "parallel": False}), "sampling.tool_calls.parallel"),
    ]
    for other, key in changes:
        assert all(changed.startswith(key) for changed in differences(one.identity, other.identity)), key
        assert one.plan_hash != other.plan_hash
    assert one.plan_hash == offering({"tools": copy.deepcopy(tools)}).plan_hash


@pytest.mark.parametrize(
    ("key", "value"), [("pooling", "cls"), ("normalize", False), ("dimensions", 8), ("prompt", "query: ")]
)
def test_what_vectors_depend_on_makes_another_run_and_other_rows(key: str, value: Any) -> None:
    made = {"pooling": "mean", "normalize": True, "dimensions": 16, "prompt": ""}
    one, other = record(task="embed", embedding=made), record(task="embed", embedding={**made, key: value})
    assert list(differences(one.identity, other.identity)) == [f"embedding.{key}"]
    assert one.key_salt != other.key_salt and one.task == "embed"


def test_the_task_makes_another_run() -> None:
    assert "embedding.task" in differences(record().identity, record(task="embed").identity)
    assert record().key_salt != record(task="embed").key_salt


@pytest.mark.parametrize(("key", "value"), [("activation", "sigmoid"), ("labels", ["no", "yes"])])
def test_what_labels_depend_on_makes_another_run_and_other_rows(key: str, value: Any) -> None:
    made = {"activation": "softmax", "labels": ["a", "b"]}
    one = record(task="classify", classification=made)
    other = record(task="classify", classification={**made, key: value})
    assert list(differences(one.identity, other.identity)) == [f"classification.{key}"]
    assert one.key_salt != other.key_salt and one.task == "classify"
    assert "embedding" not in one.identity and "classification.task" in differences(record().identity, one.identity)


def test_a_record_that_knows_nothing_of_a_templates_file_is_of_any() -> None:
    """One of an earlier bulkrun goes on; after that it is known."""
    prompt = {"column": "a", "chat_template": "chat.jinja"}
    job = job_of({**JOB, "prompt": prompt}).model_dump(mode="json")
    earlier, one, other = (
        new_record(job, input_facts={}, model_facts={}, prompt_facts=facts, versions={})
        for facts in ({}, {CHAT_TEMPLATE: "x"}, {CHAT_TEMPLATE: "y"})
    )
    assert not differences(earlier.identity, one.identity) and not differences(one.identity, earlier.identity)
    assert differences(one.identity, other.identity) == {f"prompt.{CHAT_TEMPLATE}": ("x", "y")}
    assert earlier.key_salt == one.key_salt == other.key_salt, "what it makes of a row is in its tokens"

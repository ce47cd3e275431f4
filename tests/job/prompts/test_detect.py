"""Jobs that do not say how a row becomes a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.inputs.files import find_files
from bulkrun.data.inputs.jsonl import sample_shapes
from bulkrun.data.inputs.reader import open_input
from bulkrun.data.types.json_types import Shape
from bulkrun.errors import JobFileError
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.detect import describe_prompt, detected_job, json_text_columns
from bulkrun.job.prompts.encoder import Prompt
from tests.job.plan.planning import CharacterCodec, job, write_jsonl

BATCH = ["custom_id", "method", "url", "body"]


def unseen(columns: Iterable[str]) -> dict[str, Shape]:
    return {name: Shape() for name in columns}


def found(columns: list[str], prompt: dict[str, Any] | None = None, **sections: Any) -> tuple[Any, Any, str | None]:
    spec = detected_job(job("x.jsonl", prompt=prompt or {}, **sections), columns)
    return spec.prompt.messages, spec.prompt.column, spec.input.id


@pytest.mark.parametrize("more", [[], ["id", "lang"]])
def test_the_order_is_openai_batch_then_messages_then_prompt_then_text(more: list[str]) -> None:
    assert found(["text", "prompt", "messages", *BATCH, *more]) == (None, None, "custom_id")
    assert found(["text", "prompt", "messages", *more]) == ("messages", None, None)
    assert found(["text", "prompt", *more]) == (None, "prompt", None)
    assert found([*more, "conversations", "text"]) == (None, "text", None)
    assert found([*more, "conversations"]) == ("conversations", None, None)


def test_a_batch_line_needs_all_of_custom_id_url_and_body_but_not_method() -> None:
    assert found(["custom_id", "url", "body"])[2] == "custom_id"
    for missing in ("custom_id", "url", "body"):
        columns = [name for name in BATCH if name != missing]
        assert found([*columns, "text"]) == (None, "text", None)


@pytest.mark.parametrize("prompt", [{"template": "{{ text }}"}, {"column": "text"}, {"messages": "text"}])
def test_an_explicit_mapping_always_wins(prompt: dict[str, Any]) -> None:
    columns = [*BATCH, "messages", "prompt", "text"]
    spec = job("x.jsonl", prompt=prompt)
    assert detected_job(spec, columns) is spec
    assert json_text_columns(spec, unseen(columns)) == []
    assert "detected" not in describe_prompt(spec, columns)


def test_an_id_of_the_job_stays_the_id_of_a_batch() -> None:
    assert found([*BATCH, "name"], input={"id": "name"})[2] == "name"


def test_columns_that_do_not_tell_are_listed_with_the_keys_to_set() -> None:
    with pytest.raises(JobFileError) as raised:
        found(["doc", "body"])
    assert "It has: doc, body" in str(raised.value)
    assert all(f"prompt.{key}" in str(raised.value) for key in ("template", "messages", "column"))


def test_a_system_prompt_goes_with_plain_columns_and_is_refused_beside_batch_lines() -> None:
    assert found(["text"], {"system": "Be brief."}) == (None, "text", None)
    with pytest.raises(JobFileError, match=r"prompt\.system: .*OpenAI batch"):
        found(BATCH, {"system": "Be brief."})


def test_chat_template_none_goes_with_texts_only() -> None:
    assert found(["text"], {"chat_template": "none"}) == (None, "text", None)
    with pytest.raises(JobFileError, match=r"prompt\.chat_template: none"):
        found(["messages"], {"chat_template": "none"})


def test_what_was_detected_is_said() -> None:
    shown = [describe_prompt(job("x", prompt={}), columns) for columns in (BATCH, ["messages"], ["prompt"], ["text"])]
    assert shown == [
        "OpenAI batch lines: custom_id, url, body (detected)",
        "column 'messages': messages (detected)",
        "column 'prompt': text (detected)",
        "column 'text': text (detected)",
    ]
    assert describe_prompt(job("x", prompt={"template": "a"}), []) == "prompt.template"
    assert describe_prompt(job("x", prompt={"messages": [{"role": "user", "content": "a"}]}), []) == "prompt.messages"


def test_only_the_columns_of_batch_lines_are_read_as_json_text() -> None:
    spec = job("x", prompt={})
    for columns in itertools.permutations([*BATCH, "extra"]):
        assert json_text_columns(spec, unseen(columns)) == [name for name in columns if name != "extra"]
    assert json_text_columns(spec, unseen(["custom_id", "body", "text"])) == []


def test_so_are_columns_with_schemas_and_stop_strings_of_rows() -> None:
    own = {"structured_outputs": "shape", "stop": "ends", "temperature": "heat", "logit_bias": "body"}
    spec = job("x", prompt={"column": "text"}, sampling={"per_row": own})
    assert json_text_columns(spec, unseen(["ends", "text", "heat", "shape", "body"])) == ["ends", "shape", "body"]


@pytest.mark.parametrize("prompt", [{"messages": "chat"}, {}])
def test_so_are_messages_that_have_text_in_some_rows_and_parts_in_others(
    tmp_path: Path, prompt: dict[str, Any]
) -> None:
    """However few: the rarer shape would be an error of its rows."""
    parts, name = [{"type": "text", "text": "Hi"}], prompt.get("messages", "messages")
    contents: list[Any] = ["Hi"] * 28 + [parts] * 2
    rows = [{name: [{"role": "user", "content": content}], "other": content} for content in contents]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    spec = job(path, prompt=prompt)
    with open_input(str(path), kept_as_text=partial(json_text_columns, spec)) as dataset:
        builder = PromptBuilder(spec, dataset.schema.names, CharacterCodec(chat=True))
        [batch] = dataset.select([name]).batches()
    assert [made.token_ids for made in builder.build(batch) if isinstance(made, Prompt)] == [
        [ord(letter) for letter in "[user]Hi\n[assistant]"]
    ] * 30


def test_messages_of_one_shape_keep_their_type(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}, {"messages": 5}] * 3)
    spec = job(path, prompt={})
    assert json_text_columns(spec, sample_shapes(find_files(str(path)), 1000)[0]) == []

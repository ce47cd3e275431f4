"""Rows whose model goes on with the last message: how each kind of input says so, and which cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of, load_job
from bulkrun.job.plan.rows import fit_prompt
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.detect import describe_prompt
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.job.prompts.fit import PromptFitter
from bulkrun.request import RowError
from tests.job.plan.planning import BOS, CharacterCodec, job

USER = {"role": "user", "content": "Why?"}
BEGUN = {"role": "assistant", "content": "It is"}
MESSAGES = [{"role": "user", "content": "{{ a }}"}, {"role": "assistant", "content": "{{ b }}"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONTINUED = "[user]Why?\n[assistant]It is"
BEGUN_ANEW = "[user]Why?\n[assistant]It is\n[assistant]"


def build(prompt: dict[str, Any], *rows: dict[str, Any], **sections: Any) -> list[Prompt | RowError]:
    spec = job("unused.jsonl", prompt=prompt, **sections)
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist(list(rows)), {})
    return PromptBuilder(spec, batch.rows.schema.names, CharacterCodec(chat=True)).build(batch)


def text(prompt: Prompt | RowError) -> str:
    assert isinstance(prompt, Prompt), prompt
    return "".join(chr(token) for token in prompt.token_ids if token != BOS)


def line(url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    given = {"input" if url == "/v1/responses" else "messages": [USER, BEGUN], **body}
    return {"custom_id": "1", "url": url, "body": json.dumps(given)}


@pytest.mark.parametrize(
    ("prompt", "row", "want"),
    [
        ({"messages": MESSAGES}, {"a": "Why?", "b": "It is"}, CONTINUED),
        ({"messages": MESSAGES, "system": "Be brief."}, {"a": "Why?", "b": "It is"}, "[system]Be brief.\n" + CONTINUED),
        ({"messages": "m"}, {"m": [USER, BEGUN]}, CONTINUED),
        ({}, {"messages": json.dumps([USER, BEGUN])}, CONTINUED),
        ({}, {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "It is"}]}, CONTINUED),
        ({"chat_template_kwargs": {"x": 1}}, {"messages": json.dumps([USER, BEGUN])}, "[x=1]" + CONTINUED),
        ({}, line(), CONTINUED),
        ({}, line("/v1/responses"), CONTINUED),
    ],
)
def test_every_form_of_conversation_is_continued_where_the_job_says_so(
    prompt: dict[str, Any], row: dict[str, Any], want: str
) -> None:
    [made] = build({**prompt, "continue_final_message": True}, row)
    assert text(made) == want
    assert isinstance(made, Prompt) and made.sampling.overrides is None
    [anew] = build(prompt, row)
    assert text(anew).endswith("]It is\n[assistant]") or text(anew).endswith("[x=1][assistant]")


@pytest.mark.parametrize(
    ("body", "job_continues", "want"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, False, CONTINUED),
        ({"continue_final_message": True}, False, CONTINUED),
        ({"continue_final_message": False}, True, BEGUN_ANEW),
        ({"add_generation_prompt": True}, True, BEGUN_ANEW),
        ({"add_generation_prompt": None, "continue_final_message": None}, True, CONTINUED),
    ],
)
def test_a_line_says_it_for_itself(body: dict[str, Any], job_continues: bool, want: str) -> None:
    [made] = build({"continue_final_message": job_continues}, line(**body))
    assert text(made).removeprefix("[add_generation_prompt=False]") == want


def test_a_completion_beside_them_is_the_text_it_is() -> None:
    row = {"custom_id": "1", "url": "/v1/completions", "body": json.dumps({"prompt": "It is"})}
    assert text(build({"continue_final_message": True}, row)[0]) == "It is"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER], "the last message has the role 'user', and only an assistant's can be continued"),
        ([], "there is no message to continue"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "the last message calls tools"),
        ([USER, {"role": "assistant", "content": "So", "tool_calls": [CALL]}], "the last message calls tools"),
        ([USER, {"role": "assistant", "content": " \n"}], "the last message has no text to continue"),
        ([USER, {"role": "assistant", "content": []}], "the last message has no text to continue"),
        ([BEGUN, {"role": "tool", "content": "x"}], "the last message has the role 'tool'"),
    ],
)
def test_a_conversation_that_cannot_be_continued_is_bad_input(messages: list[Any], words: str) -> None:
    rows = [{"m": json.dumps(chat)} for chat in (messages, [USER, BEGUN])]
    bad, good = build({"messages": "m", "continue_final_message": True}, *rows)
    assert isinstance(bad, RowError) and bad.code == "bad_input"
    assert bad.message.startswith(f"continue_final_message: {words}")
    assert text(good) == CONTINUED
    [of_line] = build({}, line(messages=messages, continue_final_message=True))
    assert of_line == bad


def test_a_template_that_prints_nothing_leaves_that_row_nothing_to_continue() -> None:
    bad, good = build({"messages": MESSAGES, "continue_final_message": True}, {"a": "?", "b": ""}, {"a": "?", "b": "x"})
    assert isinstance(bad, RowError) and bad.code == "bad_input" and "no text to continue" in bad.message
    assert isinstance(good, Prompt)


@pytest.mark.parametrize(
    ("said", "begun"),
    [
        ("It is", "answer"),
        ("<think>\nLet me", "thoughts"),
        ("\n<think>\nLet me", "thoughts"),
        (" <think>\nLet me\n</think>\n\nIt is", "answer"),
        ("What <think> means:", "answer"),
        ([{"type": "text", "text": "<think>"}, {"type": "text", "text": "Let me"}], "thoughts"),
    ],
)
def test_a_row_of_a_model_that_thinks_says_where_its_message_is(said: Any, begun: str) -> None:
    row = {"m": json.dumps([USER, {"role": "assistant", "content": said}])}
    prompt = {"messages": "m", "continue_final_message": True}
    thinking = {"thinking": {"max_tokens": 9}}
    [made] = build(prompt, row, sampling=thinking)
    assert isinstance(made, Prompt) and made.sampling.overrides == json.dumps({"begun": begun}, separators=(",", ":"))
    params = job("x", sampling=thinking).sampling.to_params(json.loads(made.sampling.overrides)).thinking
    assert params is not None and (params.begun, params.max_tokens) == (begun, 9)
    [anew] = build({"messages": "m"}, row, sampling=thinking)
    assert isinstance(anew, Prompt) and anew.sampling.overrides is None
    left = job("x").sampling.to_params({"begun": begun})
    assert left.thinking is None, "a retry may go without sampling.thinking"


def test_where_it_is_stands_beside_a_rows_other_values() -> None:
    row = line(continue_final_message=True, temperature=0.5)
    [made] = build({}, row, sampling={"thinking": {}})
    assert isinstance(made, Prompt)
    assert json.loads(str(made.sampling.overrides)) == {"temperature": 0.5, "begun": "answer"}
    channels = {"tool_calls": {"format": "harmony"}, "thinking": {}}
    params = job("x", sampling=channels).sampling.to_params({"begun": "answer"}).thinking
    assert params is not None and (params.start, params.begun) == ("<|channel|>analysis<|message|>", "answer")


@pytest.mark.parametrize(
    ("on_too_long", "want"),
    [
        ("truncate_left", "[system]Judge.\n[user]23456789\n[assistant]It is"),
        ("truncate_right", "[system]Judge.\n[user]01234567\n[assistant]It is"),
    ],
)
def test_what_is_cut_of_a_prompt_is_not_where_the_model_goes_on(on_too_long: Any, want: str) -> None:
    prompt = {"messages": MESSAGES, "system": "Judge.", "continue_final_message": True}
    [long] = build(prompt, {"a": "0123456789" * 9, "b": "It is"})
    assert text(fit_prompt(PromptFitter(len(want) + 8, on_too_long), long)) == want


def test_a_conversation_of_one_message_is_cut_in_it() -> None:
    [long] = build({"messages": "m", "continue_final_message": True}, {"m": [{**BEGUN, "content": "0123456789" * 9}]})
    assert text(fit_prompt(PromptFitter(29, "truncate_left"), long)) == "[assistant]0123456789"


JOB = """name: j
model: bundled:tiny
input: {{path: x.jsonl}}
output: {{path: out}}
prompt:
  {prompt}
  continue_final_message: true
"""


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("column: a", "the prompt is one message, the user's; write prompt.messages"),
        ("template: '{{ a }}'", "the prompt is one message, the user's"),
        ("chat_template: none", "without a chat template (chat_template: none) there are no messages"),
        ("messages: []", "the last of prompt.messages is not the assistant's"),
        ("messages: [{role: user, content: '{{ a }}'}]", "the last of prompt.messages is not the assistant's"),
        ("messages: [{role: assistant, content: ' '}]", "the last of prompt.messages calls tools or has no text"),
    ],
)
def test_a_job_without_such_a_message_is_refused_at_its_place(prompt: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(prompt=prompt))
    with pytest.raises(JobFileError) as refused:
        load_job(path)
    assert f"{path}:7:3: prompt.continue_final_message: {words}" in str(refused.value)


def test_the_other_name_of_it_tells_where_it_is() -> None:
    with pytest.raises(JobFileError, match=r"add_generation_prompt.*prompt\.continue_final_message goes on with one"):
        job_of({"name": "j", "model": "m", "input": {"path": "x"}, "prompt": {"add_generation_prompt": False}})


def test_validate_says_that_the_last_message_is_continued() -> None:
    spec = job("x", prompt={"continue_final_message": True})
    assert describe_prompt(spec, ["messages"]) == "column 'messages': messages (detected), the last message continued"


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_only_texts_are_generated_behind_a_message(task: str) -> None:
    base = {"name": "j", "model": "m", "input": {"path": "x"}, "output": {"path": "y"}, "task": task}
    with pytest.raises(JobFileError, match=f"continue_final_message: nothing goes on .* with task: {task}"):
        job_of({**base, "prompt": {"messages": "a", "continue_final_message": True}})


def test_columns_that_tell_of_texts_have_nothing_to_continue() -> None:
    with pytest.raises(JobFileError, match=r"prompt\.continue_final_message: the input's column 'prompt' holds texts"):
        build({"continue_final_message": True}, {"prompt": "Why?"})


def test_a_model_without_a_chat_template_is_refused() -> None:
    spec = job("x", prompt={"continue_final_message": True})
    with pytest.raises(JobFileError, match=r"prompt\.continue_final_message: the model 'none' has no chat template"):
        PromptBuilder(spec, ["custom_id", "url", "body"], CharacterCodec())

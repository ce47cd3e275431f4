"""Batch lines through the prompt builder: what is asked, with which sampling, and each kind of refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.detect import json_text_columns
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.request import RowError, Thinking, ToolCalls
from tests.job.plan.planning import BOS, CharacterCodec, job

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
COLUMNS = ["custom_id", "method", "url", "body"]
END = "[assistant]"


def line(body: Any, url: Any = "/v1/chat/completions", method: Any = "POST") -> dict[str, Any]:
    return {"custom_id": "a", "method": method, "url": url, "body": body}


def chat(**body: Any) -> dict[str, Any]:
    return line(json.dumps({"model": "gpt-4o", "messages": HELLO, **body}))


def completion(**body: Any) -> dict[str, Any]:
    return line(json.dumps({"model": "gpt", "prompt": "Once", **body}), "/v1/completions")


def build(row: Mapping[str, Any], *, has_chat_template: bool = True, **sections: Any) -> Prompt | RowError:
    spec = job("unused.jsonl", prompt={}, **sections)
    builder = PromptBuilder(spec, list(row), CharacterCodec(chat=has_chat_template))
    schema = pa.schema([(name, pa.string()) for name in row]) if isinstance(row["body"], str | None) else None
    return builder.build(InputBatch(Position(0, 0), pa.RecordBatch.from_pylist([dict(row)], schema)))[0]


def prompt_of(row: Mapping[str, Any], **sections: Any) -> Prompt:
    prompt = build(row, **sections)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def text(prompt: Prompt) -> str:
    return "".join("<bos>" if token == BOS else chr(token) for token in prompt.token_ids)


def overrides(row: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    return dict(json.loads(prompt_of(row, **sections).sampling.overrides or "{}"))


def refusal(row: Mapping[str, Any], **sections: Any) -> str:
    error = build(row, **sections)
    assert isinstance(error, RowError), error
    assert error.code == "bad_input" and len(error.message) < 300
    return error.message


def test_a_chat_goes_through_the_chat_template_and_a_completion_is_raw_text() -> None:
    assert text(prompt_of(chat())) == "[user]Hello\n[assistant]"
    assert text(prompt_of(completion())) == "<bos>Once"
    assert text(prompt_of(completion(prompt=["Once"]))) == "<bos>Once"


def test_both_kinds_in_one_batch_keep_their_places() -> None:
    rows = [chat(), completion(), chat(messages=[]), completion(prompt="Twice")]
    builder = PromptBuilder(job("x", prompt={}), COLUMNS, CharacterCodec(chat=True))
    prompts = builder.build(InputBatch(Position(0, 0), pa.RecordBatch.from_pylist(rows)))
    shown = [text(prompt) if isinstance(prompt, Prompt) else prompt.code for prompt in prompts]
    assert shown == ["[user]Hello\n[assistant]", "<bos>Once", "empty_prompt", "<bos>Twice"]


def test_a_base_model_runs_completions_and_refuses_chats() -> None:
    assert text(prompt_of(completion(), has_chat_template=False)) == "<bos>Once"
    assert "chat template" in refusal(chat(), has_chat_template=False)


def test_developer_is_the_system_role() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert text(prompt_of(chat(messages=messages))) == "[system]Be brief.\n[user]Hello\n[assistant]"


def test_text_parts_reach_the_chat_template_as_parts() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "input_text", "text": "you"}]
    assert text(prompt_of(chat(messages=[{"role": "user", "content": parts}]))) == "[user]Hello|you\n[assistant]"


def test_method_and_a_closing_slash_may_be_left_to_chance() -> None:
    row = line(json.dumps({"messages": HELLO}), "/v1/chat/completions/", None)
    assert text(prompt_of(row)) == "[user]Hello\n[assistant]"
    del row["method"]
    assert text(prompt_of(row)) == "[user]Hello\n[assistant]"


def test_a_body_may_be_a_struct_as_parquet_has_it() -> None:
    body = {"messages": [{**HELLO[0], "name": None}], "max_tokens": 3, "temperature": None}
    assert overrides(line(body)) == {"max_tokens": 3}


def test_a_struct_has_no_key_that_only_other_rows_have() -> None:
    schemas = [{"type": "object", "properties": {name: {"type": "string"}}} for name in "ab"]
    forms = [{"type": "json_schema", "json_schema": {"name": "s", "schema": schema}} for schema in schemas]
    bodies = [
        {"messages": HELLO, "response_format": form, "chat_template_kwargs": {key: 1}}
        for form, key in zip(forms, "xy", strict=True)
    ]
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist([line(body) for body in bodies]))
    prompts = PromptBuilder(job("unused", prompt={}), COLUMNS, CharacterCodec(chat=True)).build(batch)
    for prompt, schema, key in zip(prompts, schemas, "xy", strict=True):
        assert isinstance(prompt, Prompt), prompt
        assert text(prompt) == f"[user]Hello\n[{key}=1][assistant]"
        assert json.loads(json.loads(prompt.sampling.overrides or "")["structured_outputs"]) == schema


def test_every_parameter_of_openai_and_vllm_that_is_honoured_reaches_the_sampling() -> None:
    plain = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 2**40,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "top_k": 5,
        "min_p": 0.05,
        "min_tokens": 1,
        "max_tokens": 7,
        "stop": ["x", "y"],
        "stop_token_ids": [4],
        "logit_bias": {"5": -100.0, "17": 2.5},
        "bad_words": ["x", " y z"],
        "allowed_token_ids": [17, 4],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
    }
    assert overrides(chat(**plain)) == plain
    assert overrides(completion(**plain)) == plain


def test_values_that_ask_for_nothing_are_no_overrides() -> None:
    nothing = {
        "stop": None,
        "stream": False,
        "tools": [],
        "logit_bias": {},
        "n": 1,
        "logprobs": False,
        "response_format": {"type": "text"},
        "temperature": None,
    }
    assert prompt_of(chat(**nothing)).sampling == prompt_of(chat()).sampling
    assert prompt_of(chat()).sampling.overrides is None


def test_vllms_defaults_written_out_ask_for_nothing() -> None:
    """What its OpenAI client writes when a program passes all of `extra_body`; off is off."""
    nothing = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "bad_words": [],
        "chat_template_kwargs": {},
        "logprobs": False,
        "stream": False,
        "echo": False,
    }
    for full, bare in (
        (chat(**nothing, add_special_tokens=False), chat()),
        (completion(**nothing, add_special_tokens=True), completion()),
    ):
        one, other = prompt_of(full), prompt_of(bare)
        assert (one.token_ids, one.sampling) == (other.token_ids, other.sampling)


@pytest.mark.parametrize("row", [chat, completion])
@pytest.mark.parametrize(("budget", "most"), [(9, 9), (0, 0), (-1, None), (None, 5)])
def test_a_line_says_how_many_tokens_its_thoughts_may_have(
    row: Callable[..., dict[str, Any]], budget: int | None, most: int | None
) -> None:
    sampling = {"thinking": {"end": "</t>", "max_tokens": 5}}
    own = overrides(row(thinking_token_budget=budget), sampling=sampling)
    thinking = job("x", sampling=sampling).sampling.to_params(own).thinking
    assert thinking == Thinking("<think>", "</t>", most)
    assert job("x").sampling.to_params(own).thinking is None, "a retry may leave thoughts out"


def test_what_a_chat_says_to_the_template_wins_over_the_job() -> None:
    assert text(prompt_of(chat(chat_template_kwargs={"enable_thinking": False}))).endswith(
        "[enable_thinking=False]" + END
    )
    spec = job("x", prompt={"chat_template_kwargs": {"enable_thinking": True, "tone": "dry"}})
    rows = [chat(chat_template_kwargs={"enable_thinking": False}), chat(), completion()]
    builder = PromptBuilder(spec, COLUMNS, CharacterCodec(chat=True))
    prompts = builder.build(InputBatch(Position(0, 0), pa.RecordBatch.from_pylist(rows)))
    shown = [text(prompt) for prompt in prompts if isinstance(prompt, Prompt)]
    assert [each.removeprefix("[user]Hello\n") for each in shown] == [
        "[enable_thinking=False][tone=dry]" + END,
        "[enable_thinking=True][tone=dry]" + END,
        "<bos>Once",
    ]


def test_reasoning_effort_reaches_the_template_as_in_vllm() -> None:
    low = text(prompt_of(chat(reasoning_effort="low")))
    assert low.endswith("[enable_thinking=True][reasoning_effort=low]" + END)
    none = chat(reasoning_effort="none")
    spec = {"chat_template_kwargs": {"enable_thinking": True}}
    builder = PromptBuilder(job("x", prompt=spec), COLUMNS, CharacterCodec(chat=True))
    own = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    prompts = builder.build(InputBatch(Position(0, 0), pa.RecordBatch.from_pylist([none, own])))
    shown = [text(prompt)[-60:] for prompt in prompts if isinstance(prompt, Prompt)]
    assert ["[enable_thinking=False]" in each for each in shown] == [True, False]


def test_documents_and_no_generation_prompt_reach_the_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    assert text(prompt_of(chat(documents=documents))) == f"[user]Hello\n[documents={documents}]" + END
    assert text(prompt_of(chat(documents=[]))) == "[user]Hello\n" + END
    own = chat(documents=documents, chat_template_kwargs={"documents": None})
    assert text(prompt_of(own)) == "[user]Hello\n[documents=None]" + END
    silent = prompt_of(chat(add_generation_prompt=False))
    assert text(silent) == "[user]Hello\n[add_generation_prompt=False]" + END
    assert silent.sampling.overrides is None


def test_what_is_for_openais_service_alone_is_ignored() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}
    assert overrides(chat(**ignored, parallel_tool_calls=False, prompt_cache_key="k", verbosity="low")) == {}


def test_max_completion_tokens_is_the_newer_name_and_wins() -> None:
    assert overrides(chat(max_completion_tokens=5)) == {"max_tokens": 5}
    assert overrides(chat(max_completion_tokens=5, max_tokens=9)) == {"max_tokens": 5}


def test_one_stop_string_and_whole_floats_are_taken() -> None:
    assert overrides(chat(stop="x", max_tokens=4.0)) == {"stop": ["x"], "max_tokens": 4}


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
        {"structured_outputs": {"json": {"type": "array"}}},
        {"structured_outputs": {"json": '{"type": "array"}', "regex": None}},
        {"guided_json": {"type": "array"}},
        {"guided_json": '{"type": "array"}'},
    ],
)
def test_a_schema_comes_by_four_ways(given: dict[str, Any]) -> None:
    assert json.loads(overrides(chat(**given))["structured_outputs"]) == {"type": "array"}
    assert prompt_of(chat(**given)).sampling == prompt_of(chat(guided_json={"type": "array"})).sampling


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"regex": "[a-z]+", "json": None}}, {"regex": "[a-z]+"}),
        ({"structured_outputs": {"choice": ["a"], "json_object": False, "disable_fallback": False}}, {"choice": ["a"]}),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}, "response_format": {"type": "text"}},
            {"grammar": 'start: "a"'},
        ),
    ],
)
def test_a_line_may_have_a_regex_choices_or_a_grammar_of_its_own(given: dict[str, Any], kept: dict[str, Any]) -> None:
    own = overrides(chat(**given))
    assert own == {"structured_outputs": kept}
    [(kind, value)] = kept.items()
    job_wide = SamplingSpec.model_validate({"structured_outputs": {kind: value}})
    assert SamplingSpec().to_params(own) == job_wide.to_params()


def test_json_object_is_the_schema_of_any_object() -> None:
    no_schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}
    for ways in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        no_schema,
    ):
        assert json.loads(overrides(chat(**ways))["structured_outputs"]) == {"type": "object"}


def test_logprobs_need_the_jobs_column() -> None:
    assert "sampling.logprobs: 3" in refusal(chat(logprobs=True, top_logprobs=3))
    assert "sampling.logprobs: 2" in refusal(completion(logprobs=2))
    with_column = {"sampling": {"logprobs": 0}}
    assert overrides(chat(logprobs=True, top_logprobs=3), **with_column) == {"logprobs": 3}
    assert overrides(chat(logprobs=True), **with_column) == {"logprobs": 0}
    assert overrides(completion(logprobs=2), **with_column) == {"logprobs": 2}
    assert overrides(completion(logprobs=0), **with_column) == {"logprobs": 0}
    assert overrides(chat(logprobs=False), **with_column) == {}
    for row in (chat, completion):
        assert "body.prompt_logprobs: " in (refused := refusal(row(prompt_logprobs=2), **with_column))
        assert "sampling.prompt_logprobs: 2" in refused
        assert overrides(row(prompt_logprobs=2), sampling={"prompt_logprobs": 0}) == {"prompt_logprobs": 2}
        assert "prompt_logprobs: -1 is not between 0" in refusal(
            row(prompt_logprobs=-1), sampling={"prompt_logprobs": 0}
        )


def test_token_ids_need_the_jobs_columns_and_make_no_other_row() -> None:
    for line in (chat, completion):
        assert "sampling.return_token_ids: true" in refusal(line(return_token_ids=True))
        assert overrides(line(return_token_ids=False)) == {}
        assert overrides(line(return_token_ids=True), sampling={"return_token_ids": True}) == {}
    assert "is not true or false" in refusal(chat(return_token_ids=1))


@pytest.mark.parametrize("prompt", [[7, 300, 7], [[7, 300, 7]]], ids=str)
@pytest.mark.parametrize("has_chat_template", [True, False])
def test_a_completion_may_be_about_token_ids_as_they_are(prompt: list[Any], has_chat_template: bool) -> None:
    for body in ({"prompt": prompt, "max_tokens": 3}, json.dumps({"prompt": prompt, "max_tokens": 3})):
        made = build(line(body, "/v1/completions"), has_chat_template=has_chat_template)
        assert isinstance(made, Prompt), made
        assert made.token_ids == [7, 300, 7] and json.loads(made.sampling.overrides or "") == {"max_tokens": 3}


def test_n_is_the_jobs_for_every_line() -> None:
    assert "sampling.n" in refusal(chat(n=4))
    assert overrides(chat(n=4), sampling={"n": 4, "temperature": 1.0}) == {}
    assert "makes 4 per line" in refusal(chat(n=1), sampling={"n": 4, "temperature": 1.0})


def test_columns_of_per_row_sampling_go_with_bodies_and_bodies_win() -> None:
    row = {**chat(top_p=0.5), "top_p": "0.9", "words": "6"}
    assert overrides(row, sampling={"per_row": {"top_p": "top_p", "max_tokens": "words"}}) == {
        "max_tokens": 6,
        "top_p": 0.5,
    }


@pytest.mark.parametrize("key", ["ignore_eos", "include_stop_str_in_output"])
def test_a_line_wins_over_a_column_also_where_it_says_what_the_job_says(key: str) -> None:
    kept = {"sampling": {"per_row": {key: "kept"}}}
    assert overrides({**chat(**{key: False}), "kept": "true"}, **kept) == {key: False}
    assert overrides({**chat(), "kept": "true"}, **kept) == {key: True}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (line("{}", "/v1/embeddings"), ["url", "/v1/embeddings", "/v1/chat/completions"]),
        (line("{}", None), ["url", "null"]),
        (line("{}", method="GET"), ["method", "GET", "POST"]),
        (line("{", method="POST"), ["body", "not JSON"]),
        (line("[1]"), ["body", "not an object"]),
        (line(None), ["body", "null"]),
        (line("{}"), ["body.messages: missing"]),
        (line("{}", "/v1/completions"), ["body.prompt: missing"]),
        (chat(stream=True), ["body.stream: True", "no streams"]),
        (chat(tools=[{"type": "function"}]), ["body.tools: item 0", "{type: function, function: {name"]),
        (chat(tools=[TOOL]), ["body.tools", "sampling.tool_calls: {}"]),
        (chat(tool_choice="required"), ["body.tool_choice: asks for a call, and the tools are: none"]),
        (chat(tool_choice={"type": "function"}), ["body.tool_choice", "auto, none, required"]),
        (chat(functions=[TOOL["function"]]), ["body.functions", "write those"]),
        (chat(function_call={"name": "f"}), ["body.function_call", "write those"]),
        (completion(tools=[TOOL]), ["body.tools", "/v1/chat/completions"]),
        (completion(tool_choice="required"), ["body.tool_choice", "/v1/chat/completions"]),
        (chat(reasoning_effort="hard"), ["body.reasoning_effort: 'hard'", "none, minimal, low"]),
        (chat(reasoning_effort=["low"]), ["body.reasoning_effort", "none, minimal, low"]),
        (completion(reasoning_effort="low"), ["body.reasoning_effort", "no chat template"]),
        (chat(documents=["a"]), ["body.documents: ['a'] is not a list of objects"]),
        (chat(documents={"text": "a"}), ["body.documents", "is not a list of objects"]),
        (completion(documents=[{"text": "a"}]), ["body.documents", "no chat template"]),
        (
            chat(continue_final_message=True, add_generation_prompt=True),
            ["body.continue_final_message: true together with add_generation_prompt: true"],
        ),
        (chat(continue_final_message="yes"), ["body.continue_final_message: 'yes' is not true or false"]),
        (chat(add_generation_prompt=0), ["body.add_generation_prompt: 0 is not true or false"]),
        (completion(continue_final_message=True), ["body.continue_final_message: True", "no chat template"]),
        (completion(add_generation_prompt=False), ["body.add_generation_prompt: False", "no chat template"]),
        (
            chat(continue_final_message=True, add_generation_prompt=False),
            ["continue_final_message: the last message has the role 'user', and only an assistant's"],
        ),
        (chat(thinking_token_budget=9), ["body.thinking_token_budget: 9", "sampling.thinking"]),
        (chat(thinking_token_budget=-2), ["body.thinking_token_budget: -2", "at least 0, or -1"]),
        (chat(thinking_token_budget="9"), ["body.thinking_token_budget: '9' is not a whole number"]),
        (chat(repetition_detection={"min_count": 4}), ["body.repetition_detection", "sampling.repetition_stop"]),
        (chat(n=3), ["body.n: 3", "sampling.n"]),
        (chat(n=True), ["body.n: True"]),
        (chat(logit_bias={"yes": -100}), ["body.logit_bias", "token ids"]),
        (chat(logit_bias={"5": True}), ["body.logit_bias: True is not a number"]),
        (chat(logit_bias=[5]), ["body.logit_bias", "token ids"]),
        (chat(top_logprobs=""), ["body.top_logprobs: '' is not a whole number"]),
        (chat(bad_words="no"), ["body.bad_words: 'no' is not a list of texts"]),
        (chat(bad_words=["no", ""]), ["body.bad_words", "none of them empty"]),
        (chat(bad_words=[5]), ["body.bad_words", "list of texts"]),
        (chat(allowed_token_ids=5), ["body.allowed_token_ids: 5 is not a list of token ids"]),
        (chat(allowed_token_ids=[1, "2"]), ["body.allowed_token_ids", "list of token ids"]),
        (chat(allowed_token_ids=[True]), ["body.allowed_token_ids", "list of token ids"]),
        (chat(allowed_token_ids=[]), ["allowed_token_ids: an empty list allows no token at all"]),
        (chat(allowed_token_ids=[5], logit_bias={"6": 1}), ["logit_bias: token 6 is made likelier", "add it there"]),
        (chat(modalities=["text", "audio"]), ["body.modalities", "only text"]),
        (chat(temprature=1), ["body.temprature", "'temperature'"]),
        (chat(prompt="x"), ["body.prompt"]),
        (chat(**{"\ud83d" * 99: 1}), ["body.\\ud83d", "not supported"]),
        (completion(messages=HELLO), ["body.messages"]),
        (completion(echo=True), ["body.echo"]),
        (completion(best_of=3), ["body.best_of", "sampling.best_of"]),
        (completion(suffix="end"), ["body.suffix"]),
        (completion(prompt=["a", "b"]), ["2 prompts in one line"]),
        (completion(prompt=[[1, 2], [3]]), ["body.prompt: 2 prompts in one line", "a line for each"]),
        (completion(prompt=[1, -2]), ["body.prompt: -2 is no token id"]),
        (completion(prompt=[1, 2**31]), ["body.prompt: 2147483648 is no token id"]),
        (completion(prompt=[1, True]), ["body.prompt: [1, True] is not text"]),
        (completion(prompt=[1, "a"]), ["body.prompt: [1, 'a'] is not text"]),
        (completion(prompt=[[]]), ["body.prompt: [[]] is not text"]),
        (completion(prompt=7), ["body.prompt: 7 is not text"]),
        (chat(messages="Hello"), ["body.messages", "not a list"]),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            ["body.messages, message 0", "'image_url'", "only text"],
        ),
        (chat(temperature="hot"), ["body.temperature", "'hot'"]),
        (chat(temperature=True), ["body.temperature"]),
        (chat(temperature=101), ["temperature", "between 0 and 100"]),
        (chat(top_p=0), ["top_p", "above 0"]),
        (chat(max_tokens=0), ["max_tokens", "at least 1"]),
        (chat(max_tokens=1.5), ["body.max_tokens", "whole number"]),
        (chat(seed="x"), ["body.seed"]),
        (chat(top_k=10**30), ["body.top_k", "out of range"]),
        (chat(stop=[""]), ["body.stop"]),
        (chat(stop=5), ["body.stop"]),
        (chat(stop="\ud83d"), ["body.stop"]),
        (chat(stop_token_ids=["a"]), ["body.stop_token_ids"]),
        (chat(logprobs=5), ["body.logprobs", "true or false"]),
        (chat(temperature=10**400), ["body.temperature", "is not a number"]),
        (chat(top_logprobs=5), ["body.top_logprobs", "logprobs: true"]),
        (chat(response_format={"type": "xml"}), ["body.response_format", "json_schema"]),
        (chat(response_format="json"), ["body.response_format"]),
        (chat(response_format={"type": "json_schema"}), ["response_format.json_schema.schema"]),
        (chat(structured_outputs={"regex": "a+", "choice": ["a"]}), ["body.structured_outputs", "exactly one of json"]),
        (
            chat(structured_outputs={"structural_tag": "{}"}),
            ["body.structured_outputs", "json, regex, choice, grammar"],
        ),
        (chat(structured_outputs=[]), ["body.structured_outputs", "exactly one"]),
        (chat(structured_outputs={"regex": 5}), ["body.structured_outputs.regex: 5 is not text"]),
        (chat(guided_regex="\ud83d"), ["body.guided_regex", "is not text"]),
        (chat(guided_choice=[]), ["body.guided_choice", "a list of texts"]),
        (chat(guided_choice=["a", 1]), ["body.guided_choice: 1 is not text"]),
        (chat(guided_choice=["a"], guided_regex="a"), ["body.guided_choice: given together with guided_regex"]),
        (chat(chat_template_kwargs={"tools": []}), ["body.chat_template_kwargs: tools", "prompt.tools"]),
        (chat(chat_template_kwargs=[1]), ["body.chat_template_kwargs: [1] is not a mapping"]),
        (completion(chat_template_kwargs={"a": 1}), ["body.chat_template_kwargs", "no chat template"]),
        (chat(skip_special_tokens=False), ["body.skip_special_tokens: False is not supported"]),
        (chat(ignore_eos=1), ["body.ignore_eos: 1 is not true or false"]),
        (chat(include_stop_str_in_output="yes"), ["body.include_stop_str_in_output: 'yes' is not true or false"]),
        (chat(ignore_eos=True, guided_regex="a"), ["ignore_eos: a structured output ends when it is complete"]),
        (chat(add_special_tokens=True), ["body.add_special_tokens: True"]),
        (completion(add_special_tokens=False), ["body.add_special_tokens: False"]),
        (completion(logprobs=True), ["body.logprobs: True"]),
        (chat(guided_json="{"), ["body.guided_json", "not JSON"]),
        (chat(guided_json={}, response_format={"type": "json_object"}), ["body.guided_json", "one of them"]),
    ],
)
def test_what_is_not_served_is_bad_input_that_names_it(row: dict[str, Any], words: list[str]) -> None:
    message = refusal(row)
    assert all(word in message for word in words), message


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("key", ["ignore_eos", "include_stop_str_in_output"])
def test_a_line_that_says_what_the_job_says_is_the_row_it_is_without(key: str) -> None:
    assert prompt_of(chat(**{key: False})).sampling.overrides is None
    assert prompt_of(chat(**{key: True}), sampling={key: True}).sampling.overrides is None
    assert overrides(chat(**{key: False}), sampling={key: True}) == {key: False}


CALLS = {"tool_calls": {"format": "hermes"}}
NAMED = {"type": "function", "function": {"name": "f"}}


def test_tools_reach_the_template_unless_the_line_wants_none() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    shown = prompt_of(chat(tools=[TOOL, other]), sampling=CALLS)
    assert (text(shown), shown.sampling.overrides) == (f"[user]Hello\n[tools={[TOOL, other]}]{END}", None)
    assert overrides(chat(tools=[TOOL], tool_choice="auto"), sampling=CALLS) == {}
    hidden = prompt_of(chat(tools=[TOOL], tool_choice="none"), sampling=CALLS)
    assert text(hidden) == f"[user]Hello\n{END}" and json.loads(hidden.sampling.overrides or "") == {
        "tool_calls": "none"
    }
    assert text(prompt_of(chat(tools=[TOOL], tool_choice="none"))) == f"[user]Hello\n{END}", "nothing is asked"


def test_what_has_to_be_called_is_the_lines_own_sampling() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    x = {"name": "f", "parameters": TOOL["function"]["parameters"]}  # type: ignore[index]
    g = {"name": "g", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    required = overrides(chat(tools=[TOOL, other], tool_choice="required"), sampling=CALLS)
    assert required == {"tool_calls": {"functions": [x, g], "one": False}}
    assert overrides(chat(tools=[other, TOOL], tool_choice=NAMED), sampling=CALLS) == {
        "tool_calls": {"functions": [x], "one": True}
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, ["body.tools", "no room for calls"]),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, ["body.tools", "no room for calls"]),
        (
            {"tools": [TOOL], "tool_choice": {**NAMED, "function": {"name": "z"}}},
            ["a call of 'z', and the tools are: f"],
        ),
        ({"tools": "f"}, ["body.tools: 'f' is not a list of tools"]),
        ({"tools": [{**TOOL, "type": "custom"}]}, ["body.tools: item 0"]),
        ({"tools": [{**TOOL, "function": {"name": " "}}]}, ["body.tools: item 0"]),
        (
            {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"required": 5}}}], "tool_choice": "required"},
            ["the parameters of 'f'", "not a JSON schema"],
        ),
    ],
)
def test_tools_that_cannot_be_called_are_bad_input(body: dict[str, Any], words: list[str]) -> None:
    message = refusal(chat(**body), sampling=CALLS)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("choice", "own"), [("auto", {}), ("required", {"one": False})])
def test_a_line_says_whether_several_calls_may_be_made(choice: str, own: dict[str, Any]) -> None:
    """The grammar of calls that have to be made has room for one then; of others the first counts."""
    for parallel in (True, False):
        line = chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=parallel)
        values = overrides(line, sampling=CALLS)
        values["tool_calls"].pop("functions", None)
        assert values == {"tool_calls": {**own, "parallel": parallel}}
        for of_job in (True, False):
            spec = job("x", sampling={"tool_calls": {"format": "hermes", "parallel": of_job}}).sampling
            params = spec.to_params(overrides(line, sampling=CALLS))
            assert params.tool_calls == ToolCalls("hermes", parallel)
            bound = params.structured_outputs
            assert (bound is None) if choice == "auto" else json.loads(bound.value)["one"] is not parallel
    message = refusal(chat(tools=[TOOL], parallel_tool_calls="no"), sampling=CALLS)
    assert "body.parallel_tool_calls: 'no' is not true or false" in message


def test_a_completion_is_text_whatever_stands_in_it() -> None:
    assert overrides(completion(), sampling=CALLS) == {"tool_calls": "none"}
    assert overrides(completion()) == {}


def test_a_line_that_binds_its_text_may_have_tools_that_it_does_not_want() -> None:
    values = overrides(chat(tools=[TOOL], tool_choice="none", guided_regex="a"), sampling=CALLS)
    assert values == {"structured_outputs": {"regex": "a"}, "tool_calls": "none"}


KEYS = ["messages", "temperature", "max_tokens", "stop", "seed", "n", "tools", "logprobs", "response_format", "top_k"]


@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "guided_json", "guided_choice", "structured_outputs", "chat_template_kwargs", "what"]),
        JSON_VALUES,
        max_size=4,
    )
)
@settings(max_examples=300)
def test_any_body_is_a_prompt_or_a_row_error_never_a_crash(body: dict[str, Any]) -> None:
    row = line(json.dumps({"messages": HELLO} | body))
    result = build(row)
    assert isinstance(result, Prompt | RowError)
    if isinstance(result, Prompt) and result.sampling.overrides is not None:
        result.sampling.overrides.encode()


def test_a_line_that_nothing_names_is_an_error_row() -> None:
    nameless = {**chat(), "custom_id": None}
    error = build(nameless)
    assert isinstance(error, RowError) and error.code == "bad_input" and error.message.startswith("custom_id: missing")
    prompt_of({**nameless, "key": "k1"}, input={"path": "unused.jsonl", "id": "key"})


def test_a_nameless_line_of_a_file_is_an_error_row_and_the_others_are_asked(tmp_path: Path) -> None:
    lines = [{**line({"messages": HELLO}), "custom_id": name} for name in ("a", None, 7)]
    lines.append({key: value for key, value in lines[0].items() if key != "custom_id"})
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    spec = job(tmp_path / "batch.jsonl", prompt={})
    with open_input(str(tmp_path / "batch.jsonl"), kept_as_text=partial(json_text_columns, spec)) as dataset:
        builder = PromptBuilder(spec, dataset.schema.names, CharacterCodec(chat=True))
        prompts = [prompt for batch in dataset.batches() for prompt in builder.build(batch)]
    assert [type(prompt) for prompt in prompts] == [Prompt, RowError, Prompt, RowError]


def test_bodies_whose_shape_changes_from_line_to_line_lose_nothing(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{"messages": HELLO, "max_tokens": n} for n in range(1, 30)]
    bodies[3] |= {"response_format": {"type": "json_object"}}
    bodies[7] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]}
    bodies[8] = {"messages": HELLO, "max_tokens": 2.0, "stop": "x"}
    bodies[9] = {"messages": HELLO, "stop": ["x"], "metadata": {f"k{n}": n for n in range(100)}}
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": b} for n, b in enumerate(bodies)
    ]
    path = tmp_path / "batch.jsonl"
    half = {**lines[20], "body": {"messages": [{"role": "user", "content": "\ud83d"}]}}
    path.write_text("".join(json.dumps(each) + "\n" for each in [*lines[:20], half]) + "{torn\n")
    spec = job(path, prompt={})
    with open_input(str(path), kept_as_text=lambda columns: json_text_columns(spec, columns)) as dataset:
        batches = list(dataset.batches())
        builder = PromptBuilder(spec, dataset.schema.names, CharacterCodec(chat=True))
    assert [json.loads(body) for body in batches[0].rows["body"].to_pylist()[:20]] == bodies[:20]
    prompts = builder.build(batches[0])
    assert [type(prompt) for prompt in prompts] == [Prompt] * 20 + [RowError] * 2
    assert "half a surrogate pair" in prompts[20].message  # type: ignore[union-attr]
    assert batches[0].rows["custom_id"].to_pylist()[19:] == ["r19", "r20", None]
    assert text(prompts[7]) == "[user]parts\n[assistant]"  # type: ignore[arg-type]
    assert not dataset.undeclared_columns

"""Lines of /v1/responses: each asks what a line of a chat asks that says the same, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from bulkrun.job.prompts.conversations import Ask
from bulkrun.job.prompts.openai_batch import batch_maker
from bulkrun.request import RowError
from tests.job.plan.planning import job
from tests.job.prompts.test_openai_batch import COLUMNS, JSON_VALUES, line

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "To f.", "parameters": SCHEMA, "strict": True}
TOOL, FLAT = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
OTHER, FLAT_OTHER = {"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "g"}
ONE = {"type": "function", "name": "f"}
CALLS = {"tool_calls": {"format": "hermes"}}
LOGPROBS = "message.output_text.logprobs"


def asked(url: str, body: Any, **sections: Any) -> Ask | RowError:
    ask, _ = batch_maker(job("x", prompt={}, **sections), COLUMNS, "custom_id")
    return ask(line(body if isinstance(body, dict) else json.dumps(body), url))


def response(body: dict[str, Any], **sections: Any) -> Ask:
    made = asked("/v1/responses", body, **sections)
    assert isinstance(made, Ask), made
    return made


def refusal(body: Any, **sections: Any) -> str:
    made = asked("/v1/responses", body, **sections)
    assert isinstance(made, RowError) and made.code == "bad_input", made
    return made.message


def call(name: str, arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def item(name: str, arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    called = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"type": "function_call", "id": "fc_1", "status": "completed", **called}


def said(*texts: str, **more: Any) -> dict[str, Any]:
    """A message of the assistant as OpenAI and `bulkrun export` write it."""
    parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": parts, **more}


def thought(*texts: str, **more: Any) -> dict[str, Any]:
    return {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text} for text in texts],
        **more,
    }


SHORT = [{"type": "summary_text", "text": "short"}]
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
TOOL_SAID = {"role": "tool", "content": "4", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        (HELLO, {"input": "Hello"}),
        (HELLO, {"input": HELLO}),
        (HELLO, {"input": [{"type": "message", "id": None, "status": "completed", **HELLO[0]}]}),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]}]},
        ),
        ([{"role": "system", "content": "Be brief."}, *HELLO], {"instructions": "Be brief.", "input": "Hello"}),
        (HELLO, {"instructions": "", "input": "Hello"}),
        (
            [{"role": "system", "content": "Be brief."}, *HELLO],
            {"input": [{"role": "developer", "content": "Be brief."}, *HELLO]},
        ),
        (
            [*HELLO, {"role": "assistant", "content": "Hi you"}, *HELLO],
            {"input": [*HELLO, said("Hi", " you", phase="final_answer"), *HELLO]},
        ),
        (
            [*HELLO, {"role": "assistant", "content": "I will not"}, *HELLO],
            {"input": [*HELLO, said(content=[{"type": "refusal", "refusal": "I will not"}]), *HELLO]},
        ),
        (
            [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call("f", '{"x": 4}')]}, TOOL_SAID],
            {"input": [*HELLO, item("f", '{"x": 4}'), RESULT]},
        ),
        (
            [*HELLO, {"role": "assistant", "content": "See", "tool_calls": [call("f"), call("g", call_id="c2")]}],
            {"input": [*HELLO, said("See"), item("f"), item("g", call_id="c2")]},
        ),
        (
            [*HELLO, {"role": "assistant", "content": "See", "tool_calls": [call("f")]}],
            {"input": [*HELLO, item("f"), said("See")]},
        ),
        (
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call("f")]}],
            {"input": [said("a"), {"role": "assistant", "content": "b", "tool_calls": [call("f")]}]},
        ),
        (
            [{**TOOL_SAID, "content": [{"type": "text", "text": "4"}], "name": "f"}],
            {"input": [{**RESULT, "output": [{"type": "input_text", "text": "4"}], "name": "f"}]},
        ),
        (
            [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "a\nb"}, *HELLO],
            {"input": [*HELLO, thought("a", "b", summary=SHORT), said("Hi"), *HELLO]},
        ),
        (
            [{"role": "assistant", "content": "Hi", "reasoning_content": "short", "tool_calls": [call("f")]}],
            {"input": [thought(summary=SHORT), said("Hi"), item("f")]},
        ),
        (
            [{"role": "assistant", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning_content": "b"}],
            {"input": [said("Hi"), thought("b"), said("Ho")]},
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [call("f"), call("g")], "reasoning_content": "a\nb"}],
            {"input": [thought("a"), item("f"), thought("b"), item("g")]},
        ),
        (HELLO, {"input": [thought(content=None, encrypted_content="gAAA"), thought("left"), *HELLO, thought("over")]}),
    ],
)
def test_a_conversation_is_that_of_a_chat(messages: list[Any], given: dict[str, Any]) -> None:
    assert response(given) == asked("/v1/chat/completions", {"messages": messages})


SAME = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "min_tokens": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "stop": ["x"],
    "stop_token_ids": [3],
    "logit_bias": {"5": 1},
    "bad_words": ["no"],
    "allowed_token_ids": [5, 6],
    "include_stop_str_in_output": True,
    "structured_outputs": {"regex": "a+"},
    "chat_template_kwargs": {"tone": "dry"},
}
ALLOWED = {"type": "allowed_tools", "tools": [ONE]}


@pytest.mark.parametrize(
    ("of_chat", "given", "sections"),
    [
        (SAME, SAME, {}),
        ({"ignore_eos": True}, {"ignore_eos": True}, {}),
        ({"max_completion_tokens": 5, "temperature": 1}, {"temperature": 1, "max_output_tokens": 5}, {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {},
        ),
        ({"response_format": {"type": "json_object"}}, {"text": {"format": {"type": "json_object"}}}, {}),
        ({}, {"text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"summary": "auto"}}, {}),
        ({}, {"text": {"format": None}, "reasoning": {"effort": None}, "include": None, "tools": None}, {}),
        ({"reasoning_effort": "none"}, {"reasoning": {"effort": "none", "summary": "auto"}}, {}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": False}},
            {},
        ),
        ({"logprobs": True}, {"include": [LOGPROBS]}, {"sampling": {"logprobs": 1}}),
        (
            {"logprobs": True, "top_logprobs": 3},
            {"include": ["reasoning.encrypted_content", LOGPROBS], "top_logprobs": 3},
            {"sampling": {"logprobs": 0}},
        ),
        ({}, {"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, {}),
        ({"tools": [TOOL, OTHER]}, {"tools": [FLAT, FLAT_OTHER]}, {"sampling": CALLS}),
        (
            {"tools": [OTHER]},
            {"tools": [{**FLAT_OTHER, "strict": None, "defer_loading": False, "allowed_callers": ["direct"]}]},
            {"sampling": CALLS},
        ),
        ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [FLAT], "tool_choice": "none"}, {"sampling": CALLS}),
        (
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False},
            {"sampling": CALLS},
        ),
        (
            {"tools": [OTHER, TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"tools": [FLAT_OTHER, FLAT], "tool_choice": ONE},
            {"sampling": CALLS},
        ),
        (
            {"tools": [TOOL]},
            {"tools": [FLAT_OTHER, FLAT], "tool_choice": {**ALLOWED, "mode": "auto"}},
            {"sampling": CALLS},
        ),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            {"tools": [FLAT_OTHER, FLAT], "tool_choice": {**ALLOWED, "mode": "required"}},
            {"sampling": CALLS},
        ),
    ],
)
def test_parameters_are_those_of_a_chat(of_chat: dict[str, Any], given: Any, sections: dict[str, Any]) -> None:
    made = response({"input": "Hello", **given}, **sections)
    same = asked("/v1/chat/completions", {"messages": HELLO, **of_chat}, **sections)
    assert isinstance(same, Ask) and made == same
    assert json.dumps(dict(made.sampling)) == json.dumps(dict(same.sampling)), "in one order: it tells rows apart"


def test_nulls_in_a_function_count_as_absent_in_json_too() -> None:
    ask, _ = batch_maker(job("x", prompt={}, sampling=CALLS), COLUMNS, "custom_id")
    body = {"input": "Hello", "tools": [{**FLAT_OTHER, "description": None}]}
    assert ask(line(json.dumps(body), "/v1/responses")) == response(
        {"input": "Hello", "tools": [FLAT_OTHER]}, sampling=CALLS
    )


def test_what_asks_for_nothing_or_is_for_openais_service_changes_nothing() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s"}
    ignored |= {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "max_tool_calls": 3, "session_id": "s"}
    nothing = {"stream": False, "background": False, "truncation": "disabled", "parallel_tool_calls": True}
    nulls = dict.fromkeys(("previous_response_id", "conversation", "prompt", "instructions", "temperature", "text"))
    vllms = {"skip_special_tokens": True, "include_stop_str_in_output": False, "ignore_eos": False, "vllm_xargs": {}}
    assert response({"input": "Hello", **ignored, **nothing, **nulls, **vllms}) == response({"input": "Hello"})
    assert response({"input": "Hello", "model": "tuned"}).model == "tuned", "adapters are named by it"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["body.input: missing"]),
        ({"messages": HELLO}, ["body.messages", "calls it input"]),
        ({"input": 5}, ["body.input: 5 is not a text or a list of items"]),
        ({"input": ["Hello"]}, ["body.input, item 0: 'Hello' is not {role: text, content: text}"]),
        ({"input": [{}]}, ["body.input, item 0", "has no type"]),
        ({"input": [*HELLO, {"role": "user"}]}, ["body.input, item 1", "{role: text, content: text}"]),
        ({"input": [{"role": "tool", "content": "4"}]}, ["item 0: the role 'tool'", "function_call_output"]),
        ({"input": [{"type": "message", "content": "4"}]}, ["item 0: the role null"]),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, ["item 0: an item_reference", "the item itself"]),
        ({"input": [{"id": "msg_1"}]}, ["item 0: an item_reference"]),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, ["item 0: an item of type 'web_search_call'"]),
        ({"input": [{"type": ["message"]}]}, ["item 0: an item of type ['message']"]),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}]}, ["'custom_tool_call'"]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            ["body.input, item 0", "'input_image'", "only text"],
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, ["'input_file'"]),
        ({"input": [{**RESULT, "output": [{"type": "input_image", "file_id": "x"}]}]}, ["item 0", "'input_image'"]),
        ({"input": [{**RESULT, "output": None}]}, ["item 0: output: null is not a text or a list of parts"]),
        ({"input": [item("f", "{")]}, ["item 0", "arguments: '{' is not a JSON object"]),
        ({"input": [{**item("f"), "name": None}]}, ["item 0", "{type: function_call, call_id, name"]),
        ({"input": [thought(content=[{"type": "reasoning_text"}])]}, ["item 0", "{type: reasoning_text, text: ...}"]),
        ({"input": [thought(content={"text": "a"})]}, ["item 0", "{type: reasoning_text, text: ...}"]),
        ({"input": "x", "instructions": [HELLO[0]]}, ["body.instructions", "is not text"]),
        ({"input": "x", "stream": True}, ["body.stream: True", "no streams"]),
        ({"input": "x", "background": True}, ["body.background: True is not supported"]),
        ({"input": "x", "truncation": "left"}, ["body.truncation: 'left' is not one of disabled, auto"]),
        ({"input": "x", "truncation": ["auto"]}, ["body.truncation: ['auto'] is not one of disabled, auto"]),
        ({"input": "x", "previous_response_id": "resp_1"}, ["body.previous_response_id", "nothing is kept"]),
        ({"input": "x", "conversation": "conv_1"}, ["body.conversation", "into input"]),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, ["body.prompt", "write instructions and input"]),
        ({"input": "x", "messages": HELLO}, ["body.messages", "calls it input"]),
        ({"input": "x", "max_tokens": 5}, ["body.max_tokens: 5", "max_output_tokens"]),
        ({"input": "x", "max_completion_tokens": 5}, ["body.max_completion_tokens: 5", "max_output_tokens"]),
        ({"input": "x", "response_format": {"type": "json_object"}}, ["body.response_format", "text: {format: ...}"]),
        ({"input": "x", "reasoning_effort": "low"}, ["body.reasoning_effort", "reasoning: {effort: ...}"]),
        ({"input": "x", "logprobs": True}, ["body.logprobs", "include: [message.output_text.logprobs]"]),
        ({"input": "x", "n": 2}, ["body.n: 2", "sampling.n"]),
        ({"input": "x", "temprature": 1}, ["body.temprature", "'temperature'"]),
        ({"input": "x", "max_output_tokens": 1.5}, ["body.max_output_tokens: 1.5 is not a whole number"]),
        ({"input": "x", "temperature": "hot"}, ["body.temperature: 'hot' is not a number"]),
        ({"input": "x", "text": "json"}, ["body.text: 'json' is not an object"]),
        ({"input": "x", "text": {"fromat": {}}}, ["body.text.fromat", "'format'"]),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, ["body.text.format", "json_schema are"]),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}},
            ["body.text.format.schema: missing; it stands beside type and name"],
        ),
        (
            {"input": "x", "text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            ["given together with", "text.format"],
        ),
        ({"input": "x", "reasoning": "low"}, ["body.reasoning: 'low' is not an object of effort"]),
        ({"input": "x", "reasoning": {"effort": "hard"}}, ["body.reasoning.effort: 'hard' is not one of none"]),
        ({"input": "x", "reasoning": {"efort": "low"}}, ["body.reasoning.efort", "'effort'"]),
        ({"input": "x", "include": LOGPROBS}, ["body.include", "not a list"]),
        ({"input": "x", "include": ["all"]}, ["body.include: 'all' is not supported"]),
        ({"input": "x", "include": [LOGPROBS], "top_logprobs": 2}, ["body.include", "sampling.logprobs: 2"]),
        ({"input": "x", "top_logprobs": 2}, ["body.top_logprobs: needs include"]),
        ({"input": "x", "tools": "f"}, ["body.tools: 'f' is not a list of tools"]),
        ({"input": "x", "tools": [FLAT, {"type": "web_search"}]}, ["body.tools: item 1", "'web_search'"]),
        ({"input": "x", "tools": [{"type": "mcp", "server_label": "a"}]}, ["body.tools: item 0", "'mcp'"]),
        ({"input": "x", "tools": [{"type": "custom", "name": "f"}]}, ["body.tools: item 0", "'custom'"]),
        (
            {"input": "x", "tools": [{"type": ["function"], "name": "f"}]},
            ["body.tools: item 0", "{type: function, name"],
        ),
        ({"input": "x", "tools": [TOOL]}, ["body.tools: item 0", "{type: function, name: text"]),
        ({"input": "x", "tools": [{**FLAT, "defer_loading": True}]}, ["item 0: defer_loading: True"]),
        ({"input": "x", "tools": [FLAT]}, ["body.tools", "sampling.tool_calls: {}"]),
        ({"input": "x", "tool_choice": "required"}, ["body.tool_choice: asks for a call, and the tools are: none"]),
        ({"input": "x", "tool_choice": {"type": "web_search_preview"}}, ["body.tool_choice", "'web_search_preview'"]),
        ({"input": "x", "tool_choice": 5}, ["body.tool_choice: 5 is not auto"]),
    ],
)
def test_what_is_not_served_is_bad_input_that_names_it(given: dict[str, Any], words: list[str]) -> None:
    message = refusal(given)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tool_choice": {"type": "function", "name": "z"}}, ["a call of 'z', and the tools are: f"]),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ["body.tool_choice", "name: text"]),
        ({"tool_choice": ALLOWED}, ["body.tool_choice.mode: null is not auto or required"]),
        ({"tool_choice": {**ALLOWED, "mode": "auto", "tools": []}}, ["body.tool_choice.tools: []"]),
        ({"tool_choice": {**ALLOWED, "mode": "auto", "tools": ["f"]}}, ["body.tool_choice.tools: 'f'"]),
        ({"tool_choice": {**ALLOWED, "mode": "auto", "tools": [FLAT_OTHER]}}, ["'g'", "the tools are: f"]),
        ({"tool_choice": {**ALLOWED, "mode": "auto", "tools": [{"type": "mcp"}]}}, ["body.tool_choice", "'mcp'"]),
        ({"tools": [FLAT, FLAT]}, ["body.tools: item 1: there is another function 'f'"]),
        ({"text": {"format": {"type": "json_object"}}}, ["body.tools", "no room for calls"]),
        ({"parallel_tool_calls": "no"}, ["body.parallel_tool_calls: 'no'"]),
    ],
)
def test_tools_that_cannot_be_called_are_bad_input(given: dict[str, Any], words: list[str]) -> None:
    message = refusal({"input": "x", "tools": [FLAT], **given}, sampling=CALLS)
    assert all(word in message for word in words), message


KEYS = ["input", "instructions", "text", "reasoning", "include", "tools", "tool_choice", "max_output_tokens", "what"]
ITEM_KEYS = ["type", "role", "content", "summary", "output", "name", "arguments", "call_id", "tool_calls"]
KINDS = st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])
ITEMS = st.dictionaries(st.sampled_from(ITEM_KEYS), JSON_VALUES | KINDS | st.sampled_from(["user", "assistant"]))


@given(st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=4), st.lists(ITEMS, max_size=3))
@settings(max_examples=300)
def test_any_body_is_asked_or_a_row_error_never_a_crash(body: dict[str, Any], items: list[Any]) -> None:
    for given_body in ({"input": items, **body}, {"input": "x", **body}, {"input": items}):
        made = asked("/v1/responses", json.loads(json.dumps(given_body)), sampling=CALLS)
        assert isinstance(made, Ask) or made.code == "bad_input"


def test_a_body_of_the_official_packages_types_is_asked() -> None:
    body: ResponseCreateParamsNonStreaming = {
        "model": "gpt-5",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Hello"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "you"}]},
            {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Four", "annotations": []}],
            },
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "max_output_tokens": 9,
        "temperature": 0,
        "top_p": 1.0,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "store": False,
        "stream": False,
        "background": False,
        "truncation": "disabled",
        "service_tier": "flex",
    }
    TypeAdapter(ResponseCreateParamsNonStreaming).validate_python(body)
    made = response(json.loads(json.dumps(body)), sampling=CALLS)
    assert [message["role"] for message in made.messages] == [
        "system", "user", "user", "assistant", "tool", "assistant", "user"
    ]  # fmt: skip
    assert set(made.sampling) == {"temperature", "top_p", "max_tokens", "tool_calls"}
    assert {"tools", "reasoning_effort", "enable_thinking"} == set(made.template_kwargs)

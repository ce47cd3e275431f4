"""Answers to /v1/responses lines, judged by the official package's types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)

from tests.job.views.test_openai_lines import LOGPROBS, TOKEN, lines, row

URL = "/v1/responses"
SAMPLING = {"thinking": {}, "logprobs": 1, "tool_calls": {"format": "hermes"}}
CALLS = [{"id": "abc123xyz", "name": "f", "arguments": '{"x": 1}'}, {"id": "abc", "name": "g", "arguments": "{}"}]
TOOL = {"type": "function", "name": "f", "description": "To f.", "parameters": {"type": "object"}, "strict": True}
ASKED = {
    "input": "Hello",
    "instructions": "Be brief.",
    "metadata": {"team": "docs"},
    "temperature": 0.5,
    "top_p": 0.9,
    "max_output_tokens": 20,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "truncation": "disabled",
    "user": "u",
}


def response_of(*rows: Any, sampling: dict[str, Any] = SAMPLING) -> Response:
    [(output, error)] = lines(*rows, sampling=sampling)
    assert error is None and output is not None
    assert (output["error"], output["response"]["status_code"]) == (None, 200)
    body = Response.model_validate(output["response"]["body"], strict=True)
    assert body.model_extra == {}, "no key that the type has not"
    assert (body.object, body.model, body.created_at, body.error) == ("response", "model", 1_700_000_000, None)
    return body


def test_a_text_is_a_message_of_the_official_response() -> None:
    body = response_of(row(url=URL + "/", body='{"input": "Hello"}'))
    assert body.id.startswith("resp_") and body.output_text == "Hi"
    assert (body.status, body.incomplete_details) == ("completed", None)
    [message] = body.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status, message.id) == ("assistant", "completed", f"msg_{body.id[5:]}_0")
    assert body.usage is not None and body.usage.model_dump(exclude_none=True) == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }
    assert (body.tools, body.tool_choice, body.parallel_tool_calls, body.instructions) == ([], "auto", True, None)
    assert body.text is not None and body.text.format is not None and body.text.format.type == "text"


def test_thoughts_text_and_calls_are_items_in_this_order() -> None:
    body = response_of(row(url=URL, reasoning="Hm", tool_calls=CALLS, finish_reason="tool_calls"))
    thought, message, *calls = body.output
    assert isinstance(thought, ResponseReasoningItem) and isinstance(message, ResponseOutputMessage)
    assert thought.content is not None and [part.text for part in thought.content] == ["Hm"]
    assert body.output_text == "Hi" and body.status == "completed"
    assert all(isinstance(call, ResponseFunctionToolCall) for call in calls)
    assert [
        (call.call_id, call.name, call.arguments, call.status) for call in calls if call.type == "function_call"
    ] == [(call["id"], call["name"], call["arguments"], "completed") for call in CALLS]
    assert len({item.id for item in body.output}) == 4
    only = response_of(row(url=URL, response=None, tool_calls=CALLS, finish_reason="tool_calls"))
    assert [item.type for item in only.output] == ["function_call"] * 2
    empty = response_of(row(url=URL, response=""))
    assert [item.type for item in empty.output] == ["message"] and empty.output_text == ""


def test_columns_of_the_input_are_not_taken_for_the_models() -> None:
    nothing = {"thinking": None, "logprobs": None, "tool_calls": None}
    body = response_of(row(url=URL, reasoning="its", tool_calls="its", logprobs="its"), sampling=nothing)
    assert [item.type for item in body.output] == ["message"]


def test_an_output_that_was_cut_is_incomplete() -> None:
    body = response_of(row(url=URL, finish_reason="length"))
    assert body.status == "incomplete" and body.incomplete_details is not None
    assert body.incomplete_details.reason == "max_output_tokens"
    [message] = body.output
    assert message.type == "message" and message.status == "incomplete"


def test_logprobs_stand_beside_the_text_with_the_bytes_that_are_known() -> None:
    half = {**TOKEN, "token": "\ufffd", "top": [TOKEN]}
    body = response_of(row(url=URL, logprobs=[*LOGPROBS, half, {**TOKEN, "token": "ü", "top": None}]))
    [message] = body.output
    assert message.type == "message" and isinstance(text := message.content[0], ResponseOutputText)
    assert text.logprobs is not None
    assert [entry.bytes for entry in text.logprobs] == [[72, 105], [72, 105], [], [195, 188]]
    assert [other.token for other in text.logprobs[0].top_logprobs] == ["Hi", "Ho"]


@pytest.mark.parametrize("as_text", [True, False])
def test_what_was_asked_is_said_again(as_text: bool) -> None:
    """A body is JSON text, or from Parquet a struct, with the nulls of other rows."""
    body = json.dumps(ASKED) if as_text else {**ASKED, "top_logprobs": None, "tools": [{**TOOL, "strict": None}]}
    made = response_of(row(url=URL, body=body)).model_dump(mode="json", exclude_none=True, by_alias=True)
    wanted = {key: value for key, value in ASKED.items() if key not in ("input", "tools")}
    assert {key: made[key] for key in wanted} == wanted
    assert [tool["name"] for tool in made["tools"]] == ["f"] and made["top_logprobs"] == 0
    assert made["tools"][0].get("strict") is (True if as_text else None)


@pytest.mark.parametrize("body", [None, "{", 5])
def test_without_a_body_it_is_what_a_line_asks_that_says_nothing(body: Any) -> None:
    """`input.columns` left it out, or a retry with a prompt of its own answered a line that could not be read."""
    assert response_of(row(url=URL, body=body)).tools == []
    assert response_of(row(url=URL)).instructions is None


def test_samples_come_one_after_another_and_failed_ones_in_the_error_line() -> None:
    body = response_of(row(0, 0, url=URL), row(0, 1, "Ho", url=URL, finish_reason="length"))
    assert [item.id for item in body.output] == [f"msg_{body.id[5:]}_{sample}" for sample in (0, 1)]
    assert [getattr(item, "status", None) for item in body.output] == ["completed", "incomplete"]
    assert body.status == "incomplete" and body.usage is not None and body.usage.total_tokens == 8
    [(output, error)] = lines(row(0, 0, url=URL), row(0, 1, "so fa", "runaway", url=URL))
    assert output is not None and error is not None
    assert error["error"]["message"] == "1 of 2 samples failed; sample 1: runaway: why"
    failed = error["response"]["body"]
    assert [item["content"][0]["text"] for item in failed["output"]] == ["so fa"] and "choices" not in failed
    [(_, bad)] = lines(row(url=URL, response=None, code="bad_input"))
    assert bad is not None and bad["response"]["status_code"] == 400 and bad["response"]["body"].keys() == {"error"}

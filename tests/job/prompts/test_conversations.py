"""Messages as they come in files: the shapes that are read, and why others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.prompts.conversations import (
    Ask,
    BadMessages,
    asks_nothing,
    conversation_maker,
    no_column_used,
    read_messages,
)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_text_parts_stay_parts_for_the_template_to_join() -> None:
    parts: list[dict[str, Any]] = [text("a"), {**text("b"), "image_url": None, "cache_control": {"type": "ephemeral"}}]
    messages = read_messages([{"role": "user", "content": parts}, {"role": "user", "content": "c"}])
    assert [message["content"] for message in messages] == [[text("a"), text("b")], "c"]


def test_what_an_assistant_refused_is_what_it_said() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I can't."}
    assert read_messages([refused]) == [{"role": "assistant", "content": "I can't."}]
    with pytest.raises(BadMessages, match="content: text"):
        read_messages([{**refused, "refusal": 5}])


def test_no_tool_calls_are_none_as_vllm_writes_them_into_its_answers() -> None:
    answer = {"role": "assistant", "content": "4", "tool_calls": [], "function_call": None}
    assert read_messages([answer]) == [{"role": "assistant", "content": "4"}]


def test_text_by_its_newer_names_and_a_refusal_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    refused = {"type": "refusal", "refusal": "No."}
    messages = read_messages([{"role": "user", "content": parts}, {"role": "assistant", "content": [refused]}])
    assert [message["content"] for message in messages] == [[text("a"), text("b")], [text("No.")]]


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("given", ['{"x": [1, null]}', {"x": [1, None]}])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": "Let me see."}])
def test_calls_have_their_arguments_as_templates_read_them(given: Any, content: dict[str, Any]) -> None:
    answer = {"role": "tool", "tool_call_id": "1", "content": "2"}
    calls, result = read_messages([{"role": "assistant", **content, "tool_calls": [called(given)]}, answer])
    assert calls == {
        "role": "assistant",
        "content": content.get("content"),
        "tool_calls": [called({"x": [1, None]})],
    }
    assert result == answer and asks_nothing([calls]) is ("content" not in content or not content["content"])


@pytest.mark.parametrize("none", ["", None, {}, "{}"])
def test_a_call_without_arguments_has_none(none: Any) -> None:
    [message] = read_messages([{"role": "assistant", "tool_calls": [called(none)]}])
    assert message["tool_calls"] == [called({})]


def test_nulls_in_the_structs_of_a_column_are_no_arguments() -> None:
    """They are other rows' arguments; in JSON a null is meant."""
    read, _ = conversation_maker(PromptSpec(messages="m"), ["m"])
    chat = [{"role": "assistant", "content": None, "tool_calls": [called({"city": "Paris", "days": None})]}]
    for given, arguments in ((chat, {"city": "Paris"}), (json.dumps(chat), {"city": "Paris", "days": None})):
        asked = read({"m": given})
        assert isinstance(asked, Ask) and asked.messages[0]["tool_calls"] == [called(arguments)]


@pytest.mark.parametrize(
    ("content", "asks"), [([], False), ([text(" "), text("")], False), ([text(""), text("a")], True)]
)
def test_parts_ask_when_one_of_them_does(content: list[dict[str, str]], asks: bool) -> None:
    assert asks_nothing(read_messages([{"role": "user", "content": content}])) is not asks


@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_comes_before_a_question_asks_only_where_it_stands_alone(role: str) -> None:
    before: dict[str, Any] = {"role": role, "content": "Be brief."}
    assert asks_nothing(read_messages([before, {"role": "user", "content": " "}]))
    assert not asks_nothing(read_messages([before]))


def test_names_are_kept_for_the_template_and_nulls_are_not() -> None:
    assert read_messages([{"role": "user", "content": "a", "name": "Ann", "refusal": None, "tool_calls": None}]) == [
        {"role": "user", "content": "a", "name": "Ann"}
    ]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "content": [text("a"), {"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "only text"),
        ({"role": "user", "content": [{"text": "a"}]}, "is not {type: text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "is not {type: text"),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, "is not {type: text"),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, "is not {type: text"),
        ({"role": "user", "content": ["a"]}, "is not {type: text"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls: {'id': '1'} is not {id"),
        ({"role": "assistant", "tool_calls": {"id": "1"}}, "tool_calls: {'id': '1'} is not a list"),
        ({"role": "assistant", "tool_calls": [called("{")]}, "tool_calls: f: arguments: '{' is not a JSON object"),
        ({"role": "assistant", "tool_calls": [called([1])]}, "tool_calls: f: arguments: [1] is not a JSON object"),
        ({"role": "user", "tool_calls": [called("{}")]}, "only an assistant calls tools, and the role is 'user'"),
        ({"role": "assistant", "content": 5, "tool_calls": [called("{}")]}, "is not {role: text, content: text}"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "write tool_calls"),
        ({"role": "user"}, "is not {role: text, content: text}"),
        ({"role": "user", "content": 5}, "is not {role: text, content: text}"),
        ({"content": "a"}, "is not {role: text, content: text}"),
        ("hello", "is not {role: text, content: text}"),
    ],
)
def test_a_message_that_cannot_be_read_names_its_place_and_why(message: Any, why: str) -> None:
    with pytest.raises(BadMessages) as raised:
        read_messages([{"role": "user", "content": "fine"}, message])
    assert "message 1" in str(raised.value) and why in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("value", [None, "text", {"role": "user", "content": "a"}, 5])
def test_what_is_no_list_is_no_conversation(value: Any) -> None:
    with pytest.raises(BadMessages, match="not a list of messages"):
        read_messages(value)


def test_templates_that_use_no_column_are_told_how_to() -> None:
    fixed = PromptSpec.model_validate({"messages": [{"role": "user", "content": "Rate {title} of { text }"}]})
    assert "prompt.messages: uses no column" in no_column_used(fixed, ["id", "text"])
    assert "write {{ text }} for {text}" in no_column_used(fixed, ["id", "text"])
    assert "write {{ id }} where a row's value goes" in no_column_used(PromptSpec(template="Hi"), ["id"])


def test_what_is_nested_too_deeply_to_be_shown_is_said_so() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    for message in ({"role": "assistant", "tool_calls": [deep]}, {"role": "user", "content": deep}, deep):
        with pytest.raises(BadMessages, match="what is nested too deeply is not"):
            read_messages([message])

"""Messages as they come in files: the shapes that are read, and why others are not."""

from __future__ import annotations

from typing import Any

import pytest

from bulkrun.job.jobfile.spec import PromptSpec
from bulkrun.job.prompts.conversations import BadMessages, no_column_used, read_messages


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_text_parts_are_joined_by_newlines_as_vllm_does() -> None:
    messages = read_messages([{"role": "user", "content": [text("a"), text("b")]}, {"role": "user", "content": "c"}])
    assert [message["content"] for message in messages] == ["a\nb", "c"]


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
        ({"role": "user", "content": ["a"]}, "is not {type: text"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool calls are not supported"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "tool calls are not supported"),
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

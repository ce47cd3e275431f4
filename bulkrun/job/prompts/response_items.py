"""The `input` of a /v1/responses body as the messages of a chat: a text, or a list of items.

An item is a message, a call of a function, what it answered, or what the model thought. What the assistant thought,
said and called before somebody else speaks is one message, as a chat has it. Knows items; knows no parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.prompts.body_keys import BadBody
from bulkrun.job.prompts.conversations import BadMessages, Conversation, Message, read_message, shown

_ROLES = ("user", "assistant", "system", "developer")
ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_OF_ITEMS = ("type", "id", "status", "phase")  # of a message's keys those that a chat has not
_MESSAGE_FORM = "{role: text, content: text}"


def read_input(value: Any) -> Conversation:
    """The messages, in the order of the items. Raises BadBody, naming the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadBody(f"body.input: {shown(value)} is not a text or a list of items")
    turns = _Turns()
    for index, item in enumerate(value):
        try:
            turns.add(f", item {index}", item)
        except BadMessages as problem:
            raise BadBody(f"body.input{problem}") from None
    return turns.messages


class _Turns:
    """The messages so far, and thoughts that no message has yet: they are of the assistant's next one."""

    def __init__(self) -> None:
        self.messages: Conversation = []
        self._thoughts: list[str] = []

    def add(self, where: str, item: Any) -> None:
        """Take one more item. Raises BadMessages."""
        kind, given = _kind_of(where, item)
        if kind == "reasoning":
            self._thoughts += _thoughts(where, given)
            return
        message = _message(where, kind, given)
        thoughts, self._thoughts = self._thoughts, []
        if message["role"] != "assistant":
            self.messages.append(message)
            return
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        last = self.messages[-1] if self.messages else None
        if last is not None and _is_one_turn(last, message):
            self.messages[-1] = _joined(last, message)
        else:
            self.messages.append(message)


def _kind_of(where: str, item: Any) -> tuple[str, dict[str, Any]]:
    """What an item is, and its values but for nulls."""
    given = {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else {}
    kind = given.get("type", "message" if "role" in given else "item_reference" if "id" in given else None)
    if kind == "item_reference":
        raise BadMessages(f"{where}: an item_reference; nothing is kept between lines here, write the item itself")
    if kind is None:
        raise BadMessages(f"{where}: {shown(item)} is not {_MESSAGE_FORM}, and has no type")
    if kind not in ITEM_KINDS:
        raise BadMessages(f"{where}: an item of type {shown(kind)} is not supported; {', '.join(ITEM_KINDS)} are")
    return kind, given


def _message(where: str, kind: str, item: Mapping[str, Any]) -> Message:
    if kind == "function_call":
        return _call(where, item)
    return _output(where, item) if kind == "function_call_output" else _said(where, item)


def _said(where: str, item: Mapping[str, Any]) -> Message:
    """A message. What an assistant said in parts is one text, as a chat would bring it."""
    if (role := item.get("role")) not in _ROLES:
        raise BadMessages(
            f"{where}: the role {shown(role)} is not one of {', '.join(_ROLES)}; what a tool answered is an item of "
            "type function_call_output"
        )
    message = read_message(where, {key: value for key, value in item.items() if key not in _OF_ITEMS})
    if role == "assistant" and isinstance(parts := message["content"], list):
        message["content"] = "".join(part["text"] for part in parts)
    return message


def _call(where: str, item: Mapping[str, Any]) -> Message:
    function = {key: item.get(key) for key in ("name", "arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if not isinstance(item.get("name"), str):
        raise BadMessages(f"{where}: {shown(item)} is not {{type: function_call, call_id, name, arguments: JSON text}}")
    return read_message(where, {"role": "assistant", "content": None, "tool_calls": [call]})


def _output(where: str, item: Mapping[str, Any]) -> Message:
    if not isinstance(output := item.get("output"), str | list):
        raise BadMessages(f"{where}: output: {shown(output)} is not a text or a list of parts")
    answered = {"tool_call_id": item.get("call_id"), "name": item.get("name")}
    return read_message(where, {"role": "tool", "content": output, **answered})


def _thoughts(where: str, item: Mapping[str, Any]) -> list[str]:
    """The thoughts themselves, else a summary of them; nothing of what only OpenAI can read (`encrypted_content`)."""
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else []
    found = [text for text in texts if isinstance(text, str)]
    if not isinstance(parts, list) or len(found) < len(parts):
        raise BadMessages(f"{where}: {shown(parts)} is not a list of {{type: reasoning_text, text: ...}}")
    return found


def _is_one_turn(last: Message, message: Message) -> bool:
    """Whether a chat would have the two in one message: calls stand beside what was said, but nothing is said twice."""
    return last["role"] == "assistant" and (last["content"] is None or message["content"] is None)


def _joined(last: Message, message: Message) -> Message:
    thoughts = [each["reasoning_content"] for each in (last, message) if each.get("reasoning_content") is not None]
    calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    content = message["content"] if last["content"] is None else last["content"]
    whole = {**last, "content": content, "tool_calls": calls}
    return {**whole, "reasoning_content": "\n".join(thoughts)} if thoughts else whole

"""In which form a chat template takes what a message says: as a text, as a list of text parts, or as either.

Templates do not tell, so each is tried once with words that are known. vLLM looks for a loop over `message.content` in
the source; trying sees through aliases, macros and filters as well, and knows each role by itself: Mistral Small 3.1's
goes through the parts of a user's message and shows of a system message's the first alone. What says nothing beside
its tool calls has no content to OpenAI, and is an empty text to templates that fail on that or print it (LFM2's).
Arguments of calls are mappings, as transformers has them, and JSON to templates that take only a text (DeepSeek's).
A developer's message is a system message, by its older name, to templates that leave it out or refuse it (Qwen's).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bulkrun.sandbox import TemplateFailed

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
_WORDS = ("first probe", "second probe")
_MARK = "mark of a part"  # shown by a template that prints a part whole instead of reading its text
_ARGUMENTS = {"probe": "first probe"}
_RESULT = {"role": "tool", "tool_call_id": "callprobe", "name": "probe", "content": "Done"}
_NOTHING = ("null", "None")  # as templates print it


class ContentForm(NamedTuple):
    """The forms in which a template shows all of a content."""

    takes_text: bool
    takes_parts: bool

    def fitted(self, message: Message) -> Message:
        """The message in a form that is taken, unchanged where its own is. Joined as vLLM does: by newlines."""
        content = message.get("content")
        if isinstance(content, list) and not self.takes_parts:
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, str) and not self.takes_text:
            content = [_part(content)]
        return message if content is message.get("content") else {**message, "content": content}


class ContentForms:
    """The forms of a template, by role. `render` is the template; it raises TemplateFailed for what it refuses."""

    def __init__(self, render: Render) -> None:
        user = _form(render, "user")
        only_parts = user == (False, True)
        # Of roles that cannot be tried: parts where nothing else is taken, else the text that every template knows.
        self._of_others = user if only_parts else ContentForm(takes_text=True, takes_parts=False)
        self._forms = {"user": user}
        self._takes_mappings = self._knows_developers = True
        self._beside_calls: str | None = None
        if any(user):
            said = user.fitted({"role": "user", "content": "Hello"})
            self._forms |= {role: _form(render, role, after=[said]) for role in ("system", "developer")}
            self._forms["assistant"] = _form(render, "assistant", before=[said], after=[said])
            self._knows_developers = any(self._forms["developer"]) or not any(self._forms["system"])
            self._takes_mappings = _takes_mappings(render, said)
            self._beside_calls = _beside_calls(render, said, _ARGUMENTS if self._takes_mappings else _text(_ARGUMENTS))

    def fitted(self, message: Message) -> Message:
        """The message in a form that the template takes from its role."""
        if self._beside_calls is not None and message.get("content") is None and message.get("tool_calls"):
            message = {**message, "content": self._beside_calls}
        if not self._takes_mappings and message.get("tool_calls"):
            message = {**message, "tool_calls": list(map(_with_text, message["tool_calls"]))}
        if not self._knows_developers and message.get("role") == "developer":
            message = {**message, "role": "system"}
        form = self._forms.get(message.get("role", ""), self._of_others)
        return (form if any(form) else self._of_others).fitted(message)


def _form(render: Render, role: str, before: Sequence[Message] = (), after: Sequence[Message] = ()) -> ContentForm:
    """The forms in which the words of a role come out."""

    def shows(content: str | list[dict[str, str]]) -> bool:
        try:
            text = render([*before, {"role": role, "content": content}, *after])
        except TemplateFailed:
            return False
        return all(words in text for words in _WORDS) and _MARK not in text

    return ContentForm(shows(", ".join(_WORDS)), shows([{**_part(words), "mark": _MARK} for words in _WORDS]))


def _takes_mappings(render: Render, said: Message) -> bool:
    """Whether a template takes arguments as a mapping; not if it fails on that or prints Python, and takes JSON."""

    def shown(arguments: Any) -> str | None:
        try:
            return render([said, _calling("", arguments), _RESULT])
        except TemplateFailed:
            return None

    mapping, text = shown(_ARGUMENTS), shown(_text(_ARGUMENTS))
    takes_text = text is not None and _text(_ARGUMENTS) in text
    return not takes_text or (mapping is not None and str(_ARGUMENTS) not in mapping)


def _beside_calls(render: Render, said: Message, arguments: Any) -> str | None:
    """The content of a message that calls tools and says nothing."""

    def shown(content: str | None) -> str:
        return render([said, _calling(content, arguments), _RESULT])

    try:
        empty = shown("")
    except TemplateFailed:
        return None
    try:
        nothing = shown(None)
    except TemplateFailed:
        return ""
    return "" if any(nothing.count(word) > empty.count(word) for word in _NOTHING) else None


def _calling(content: str | None, arguments: Any) -> Message:
    call = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _with_text(call: Message) -> Message:
    """A call with its arguments as a text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _text(function["arguments"])}}


def _text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}

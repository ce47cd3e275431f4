"""In which form a chat template takes what a message says: as a text, as a list of text parts, or as either.

Templates do not tell, so each is tried once with words that are known. vLLM looks for a loop over `message.content` in
the source; trying sees through aliases, macros and filters as well, and knows each role by itself: Mistral Small 3.1's
goes through the parts of a user's message and shows of a system message's the first alone. What says nothing beside
its tool calls has no content to OpenAI, and is an empty text to templates that fail on that or print it (LFM2's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bulkrun.sandbox import TemplateFailed

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
_WORDS = ("first probe", "second probe")
_MARK = "mark of a part"  # shown by a template that prints a part whole instead of reading its text
_CALL = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": {}}}
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
        self._beside_calls: str | None = None
        if any(user):
            said = user.fitted({"role": "user", "content": "Hello"})
            self._forms |= {role: _form(render, role, after=[said]) for role in ("system", "developer")}
            self._forms["assistant"] = _form(render, "assistant", before=[said], after=[said])
            self._beside_calls = _beside_calls(render, said)

    def fitted(self, message: Message) -> Message:
        """The message in a form that the template takes from its role."""
        if self._beside_calls is not None and message.get("content") is None and message.get("tool_calls"):
            message = {**message, "content": self._beside_calls}
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


def _beside_calls(render: Render, said: Message) -> str | None:
    """The content of a message that calls tools and says nothing."""

    def shown(content: str | None) -> str:
        return render([said, {"role": "assistant", "content": content, "tool_calls": [_CALL]}, _RESULT])

    try:
        empty = shown("")
    except TemplateFailed:
        return None
    try:
        nothing = shown(None)
    except TemplateFailed:
        return ""
    return "" if any(nothing.count(word) > empty.count(word) for word in _NOTHING) else None


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}

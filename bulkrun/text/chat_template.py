"""A model's chat template: messages to the text that the model was trained on.

Renders what `transformers`' `apply_chat_template(..., tokenize=False)` renders, in the guarded sandbox. Knows the
names that templates may use (`messages`, `add_generation_prompt`, special tokens, helpers); knows no token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from bulkrun.errors import ModelError
from bulkrun.sandbox import Sandbox, TemplateFailed

Message = Mapping[str, Any]
_PROBE = "probe"
# The names a message's reasoning comes under; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template.

    `special_tokens` (`bos_token`, `eos_token`...) are variables of the template. `now` is asked by templates that
    write today's date: give a fixed time where the same prompt must come out tomorrow. Raises ModelError when
    `source` is not valid Jinja; `name` says in the message which template it was.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        name: str = "the model's chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sandbox = Sandbox(strict=False, trim_blocks=True, lstrip_blocks=True)
        self._sandbox.add_extension(_GenerationTag)
        self._sandbox.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }
        self._special_tokens = dict(special_tokens)
        try:
            self._template = self._sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as problem:
            raise ModelError(f"{name}, line {problem.lineno}: {problem.message}") from None
        except TemplateFailed as problem:
            raise ModelError(f"{name}: {problem}") from None
        self._wants_parts = False
        self._wants_parts = not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))

    def render(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **options: Any) -> str:
        """The prompt text of one conversation; `options` are passed on (`enable_thinking=False`), whatever their names.

        A content that is text becomes a list of one part where the template would leave it out otherwise. Raises
        TemplateFailed with the template's own complaint or the cap it ran into.
        """
        given = [_in_parts(message) for message in messages] if self._wants_parts else messages
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **options,
            "messages": [_with_reasoning(message) for message in given],
            "add_generation_prompt": add_generation_prompt,
        }
        return self._sandbox.render_capped(self._template, variables)

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        """Whether a user's text is in the prompt.

        Templates of models that see, or that were made from such (Llama Guard 3 1B), may look for it in parts alone,
        and go through a text letter by letter without a word.
        """
        try:
            return _PROBE in self.render([{"role": "user", "content": content}])
        except TemplateFailed:
            return False


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it a plain set)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": _as_parts(content)} if isinstance(content, str) else message


def _with_reasoning(message: Message) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _raise_exception(message: str) -> None:
    raise TemplateFailed(message)

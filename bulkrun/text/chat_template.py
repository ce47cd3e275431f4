"""A model's chat template: messages to the text that the model was trained on.

Renders what `transformers`' `apply_chat_template(..., tokenize=False)` renders, in the guarded sandbox. Knows the
names that templates may use (`messages`, `add_generation_prompt`, special tokens, helpers); knows no token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from bulkrun.errors import ModelError
from bulkrun.sandbox import Sandbox, TemplateFailed
from bulkrun.text.content_form import ContentForms, Message
from bulkrun.text.final_message import up_to_mark, with_mark

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
        self._content_forms = ContentForms(partial(self._rendered, {"add_generation_prompt": True}))

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt text of one conversation; `options` are passed on (`enable_thinking=False`), whatever their names.

        A content, which is text or a list of text parts, becomes the other where the template would leave some of it
        out or print the list itself. With `continue_final_message` the prompt ends with the last message's text, and
        has no generation prompt. Raises TemplateFailed with the template's own complaint or the cap it ran into, and
        for a template that does not write that text.
        """
        given = [self._content_forms.fitted(message) for message in messages]
        if not continue_final_message:
            return self._rendered({**options, "add_generation_prompt": add_generation_prompt}, given)
        *before, last = given
        text = self._rendered({**options, "add_generation_prompt": False}, [*before, with_mark(last)])
        return up_to_mark(text, last)

    def _rendered(self, options: Mapping[str, Any], messages: Sequence[Message]) -> str:
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **options,
            "messages": [_with_reasoning(message) for message in messages],
        }
        return self._sandbox.render_capped(self._template, variables)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it a plain set)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _with_reasoning(message: Message) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _raise_exception(message: str) -> None:
    raise TemplateFailed(message)

"""What prompts need of a tokenizer and its chat template. Only protocols: the real ones would bring torch along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bulkrun.request import RowError


class ChatRenderer(Protocol):
    """A compiled chat template."""

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt text with the generation prompt; `options` are variables of the template.

        With `add_generation_prompt=False` it goes without, with `continue_final_message=True` it ends with the text of
        the last message. Raises bulkrun.sandbox.TemplateFailed.
        """


class TextCodec(Protocol):
    """What planning needs of a tokenizer; `bulkrun.text.tokenizer.Tokenizer` is the real one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""

    def chat_renderer(self, source: str | None = None, name: str = ...) -> ChatRenderer:
        """The model's chat template, or another given by its source."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text; releases the GIL."""

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[list[int], int, int] | RowError]:
        """The token ids of each pair of texts and where in them the second text begins and ends, or why not."""

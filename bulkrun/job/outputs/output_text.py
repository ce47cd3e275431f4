"""The text of outputs: what their tokens add to the text of the prompt, up to the stop that ended them or with it.

Some tokenizers (Llama 2, Mistral) drop the space that a text begins with. An output goes on a text, so it is decoded
behind the last tokens of its prompt and keeps its space, as in vLLM. Knows the tokenizer as a function, and no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bulkrun.request import Completion

_CONTEXT_TOKENS = 8  # special tokens, which have no text, are fewer at the end of a prompt

Tokens = Sequence[int]


class Decode(Protocol):
    """Texts of token ids, many at once; `bulkrun.text.tokenizer.Tokenizer.decode_batch` is the real one."""

    def __call__(self, sequences: list[Sequence[int]], skip_special_tokens: bool = ...) -> list[str]: ...


class Output(NamedTuple):
    """A completion, the prompt that it goes on, and whether the stop that ended it is part of its text."""

    prompt: Tokens
    completion: Completion
    includes_stop: bool = False

    @property
    def token_ids(self) -> Tokens:
        """The tokens that the text is made of: with the stop token that is part of it."""
        done = self.completion
        stop = done.stop_reason if self.includes_stop else None
        return (*done.token_ids, stop) if isinstance(stop, int) else done.token_ids


def output_texts(decode: Decode, outputs: Sequence[Output]) -> list[str]:
    """The text of each output; where a stop string ended it, the text ends before that, or with it."""
    texts = added_texts(decode, [output.prompt for output in outputs], [output.token_ids for output in outputs])
    stopped = [i for i, output in enumerate(outputs) if isinstance(output.completion.stop_reason, str)]
    without_last = [outputs[i].token_ids[:-1] for i in stopped]
    before = added_texts(decode, [outputs[i].prompt for i in stopped], without_last)
    for i, prefix in zip(stopped, before, strict=True):
        stop, includes_stop = str(outputs[i].completion.stop_reason), outputs[i].includes_stop
        texts[i] = cut_at_stop(texts[i], stop, prefix, includes_stop=includes_stop)
    return texts


def added_texts(decode: Decode, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> list[str]:
    """What the tokens of each output read after its prompt.

    The prompt of an empty output is not looked at: one that never ran may hold ids that are none.
    """
    pairs = [(tuple(prompt[-_CONTEXT_TOKENS:]), out) for prompt, out in zip(prompts, outputs, strict=True) if out]
    if not pairs:
        return [""] * len(outputs)
    decoded = decode([*(end for end, _ in pairs), *((*end, *output) for end, output in pairs)])
    before, texts = decoded[: len(pairs)], decoded[len(pairs) :]
    added = iter(text[shared_length(text, end) :] for text, end in zip(texts, before, strict=True))
    return [next(added) if output else "" for output in outputs]


def cut_at_stop(text: str, stop: str, before: str, *, includes_stop: bool = False) -> str:
    """`text` up to the stop string that its last token completed, or with it; `before` is the text without that token.

    An earlier occurrence did not end the output (min_tokens), so it is part of the answer.
    """
    at = text.find(stop, max(0, shared_length(text, before) - len(stop) + 1))
    return text if at < 0 else text[: at + len(stop) if includes_stop else at]


def shared_length(text: str, start: str) -> int:
    """How many characters of `start` the text begins with: not all, where `start` ends inside a character."""
    if text.startswith(start):
        return len(start)
    pairs = enumerate(zip(text, start, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(text))

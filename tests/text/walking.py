"""Walks through constraints as an engine would: fill the mask, take an allowed token, accept it.

On the way tokens that are said to be forced are compared with the masks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from bulkrun.request import TokenConstraint
from bulkrun.text.tokenizer import Tokenizer

Choose = Callable[[list[int]], int]


def allowed_tokens(constraint: TokenConstraint, vocab_size: int) -> list[int] | None:
    """The ids that the mask allows, None for all."""
    words = np.full(-(-vocab_size // 32), -1, np.int32)
    if not constraint.fill_mask(memoryview(words)):
        return None
    bits: list[int] = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return bits


def at_random(seed: int) -> Choose:
    """Any token, each time another one."""
    generator = random.Random(seed)
    return lambda ids: generator.choice(ids)


def walk(
    constraint: TokenConstraint, tokenizer: Tokenizer, eos: int, choose: Choose, max_tokens: int = 4096
) -> tuple[list[int], bool]:
    """The tokens until the end-of-sequence token (not among them), and whether it came."""
    output: list[int] = []
    forced: list[int] = []
    for _ in range(max_tokens):
        forced = forced or list(constraint.forced_tokens())
        ids = allowed_tokens(constraint, tokenizer.vocab_size)
        assert not forced or ids == [forced.pop(0)], "a forced token is the only one"
        token_id = choose(list(range(tokenizer.vocab_size)) if ids is None else ids)
        assert constraint.accept(token_id) is None, "an allowed token is accepted"
        if token_id == eos:
            return output, True
        output.append(token_id)
    return output, False


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode_batch([token_ids])[0]

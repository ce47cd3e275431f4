"""Which tokens an output may take next so that it fits a grammar: masks for the engine, one matcher per sequence.

A grammar is compiled once and copied for each sequence (a copy costs microseconds). When the output is whole, only an
end-of-sequence token is allowed. Knows token ids and grammars; knows no logits.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Collection, Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from bulkrun.errors import ModelError
from bulkrun.request import Progress, SamplingParams, StructuredOutput, TokenConstraint, TokenConstraintFactory
from bulkrun.text.grammar import parser_limits, short_message, spells, to_grammar, without_forcing
from bulkrun.text.thinking import ThinkingConstraint, ThinkingMarkers
from bulkrun.text.token_lists import ListedTokens, TokenLists, word_token_ids
from bulkrun.text.tokenizer import Tokenizer

_CACHED_GRAMMARS = 128
_SPECIAL = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}


class GrammarConstraint:
    """The grammar of one sequence. `start` is the same grammar at its start, for what a stop leaves of the output.

    `includes_stop`: the stop that ends the output is part of it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        start: LLMatcher,
        vocabulary: LLTokenizer,
        token_ids: Sequence[int] = (),
        *,
        includes_stop: bool = False,
    ) -> None:
        self._matcher, self._start, self._vocabulary = matcher, start, vocabulary
        self._ends = vocabulary.eos_tokens[:1]
        self._token_ids = list(token_ids)
        self._includes_stop = includes_stop

    def fill_mask(self, mask: memoryview[int]) -> bool:
        """Write the allowed tokens (int32 words). A grammar that failed allows only the end, and `accept` says why."""
        num_words = -(-self._vocabulary.vocab_size // 32)
        if len(mask) < num_words:  # a model may have fewer logits than there are tokens, or more, which pad
            mask[:] = memoryview(self._matcher.compute_bitmask()).cast("i")[: len(mask)]
            return True
        own, padding = mask[:num_words], mask[num_words:]
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(ctypes.c_int32.from_buffer(own)), own.nbytes)
        padding[:] = memoryview(bytes(padding.nbytes)).cast("i")
        return True

    def accept(self, token_id: int) -> str | None:
        """Go on with a token; why the grammar has no way on, or None."""
        self._token_ids.append(token_id)
        accepted = self._matcher.consume_token(token_id)
        # After a failure (of a mask, say) the end is still accepted, but it is not the end of a whole output.
        return None if accepted and not self._matcher.is_error() else short_message(self._matcher.get_error())

    def forced_tokens(self) -> Sequence[int]:
        """The tokens of a text that has to follow, as this tokenizer writes it, or the end of a whole output."""
        return self._ends if self.progress() == "closed" else self._matcher.compute_ff_tokens()

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        """Whether the output is whole up to the stop that its last token completed; whether anything can follow."""
        matcher = self._matcher if stop_reason is None else self._at(stop_reason)
        if matcher is None or not matcher.is_accepting():
            return "unfinished"
        return "closed" if matcher.is_stopped() else "whole"

    def copy(self) -> GrammarConstraint:
        """A copy at the same place in the grammar, for another sequence."""
        return self.of_sequence(includes_stop=self._includes_stop)

    def of_sequence(self, *, includes_stop: bool) -> GrammarConstraint:
        """A copy for a sequence whose output has the stop that ends it, or has not."""
        return GrammarConstraint(
            self._matcher.deep_copy(), self._start, self._vocabulary, self._token_ids, includes_stop=includes_stop
        )

    def _at(self, stop_reason: int | str) -> LLMatcher | None:
        """The grammar where the output's text ends; None for a stop string that began before the grammar did.

        In bytes, because a stop string may begin and end inside a token.
        """
        if self._includes_stop and isinstance(stop_reason, int):
            return self._matcher
        text = self._vocabulary.decode_bytes(self._token_ids[:-1])
        if isinstance(stop_reason, str):
            stop = stop_reason.encode("utf-8", "surrogatepass")
            # one that lay wholly in older text did not end the output (min_tokens)
            first = max(0, len(text) - len(stop) + 1)
            text = self._vocabulary.decode_bytes(self._token_ids)
            at = text.find(stop, first)
            if at < 0:
                return None
            text = text[: at + len(stop) if self._includes_stop else at]
        matcher = self._start.deep_copy()
        matcher.consume_tokens(self._vocabulary.tokenize_bytes(text))
        return matcher


class Grammars:
    """Compiled grammars for one tokenizer, the last used ones kept. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        known = range(tokenizer.vocab_size)  # an end that is no token ends nothing, here as in the engine
        self.eos_token_ids = sorted(set(eos_token_ids).intersection(known)) or _eos_of(tokenizer)
        self._for_llguidance: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)

    def constraint(self, structured: StructuredOutput, *, includes_stop: bool = False) -> GrammarConstraint:
        """The constraint of a new sequence, whose output may have the stop that ends it.

        Raises ValueError for a grammar that cannot be used.
        """
        compiled = self._compiled(structured)
        if isinstance(compiled, str):
            raise ValueError(compiled)
        return compiled.of_sequence(includes_stop=includes_stop)

    def _compile(self, structured: StructuredOutput) -> GrammarConstraint | str:
        """The grammar at its start, or what is wrong with it (kept too: bad grammars come in numbers)."""
        try:
            grammar = to_grammar(structured, self._tokenizer.special_id)
            if spells(structured, self._tokenizer.special_texts):
                grammar = without_forcing(grammar)
        except ValueError as problem:
            return str(problem)
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            return short_message(matcher.get_error())
        return GrammarConstraint(matcher, matcher, self._vocabulary())

    def _vocabulary(self) -> LLTokenizer:
        """Made when the first grammar is: it takes a second for a large vocabulary."""
        with self._lock:
            if self._for_llguidance is None:
                self._for_llguidance = _vocabulary(self._tokenizer, self.eos_token_ids)
            return self._for_llguidance


def _eos_of(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _vocabulary(tokenizer: Tokenizer, eos_token_ids: list[int]) -> LLTokenizer:
    if not eos_token_ids:
        raise ModelError("structured_outputs: this model has no end-of-sequence token that could end an output")
    try:
        return LLTokenizer(_without_gaps(tokenizer), n_vocab=tokenizer.vocab_size, eos_token=eos_token_ids)
    except ValueError as problem:
        raise ModelError(f"structured_outputs: llguidance cannot use this model's tokenizer: {problem}") from None


def _without_gaps(tokenizer: Tokenizer) -> str:
    """The tokenizer as llguidance needs it: it counts the tokens, and knows none whose id is not below their count.

    Ids that a pruned vocabulary lacks become special tokens, which no text is made of.
    """
    text, unused = tokenizer.to_json(), tokenizer.unused_ids
    if not unused:
        return text
    saved = json.loads(text)
    for token_id in unused:
        content = f"<|unused id {token_id}|>"
        saved["model"]["vocab"][content] = token_id
        saved["added_tokens"].append({"id": token_id, "content": content, **_SPECIAL})
    return json.dumps(saved)


class _Constraints:
    """See `token_constraint_factory`."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, eos_token_ids)
        self._markers = lru_cache(_CACHED_GRAMMARS)(lambda start, end: ThinkingMarkers(tokenizer, start, end))
        self._lists = lru_cache(_CACHED_GRAMMARS)(
            lambda words, allowed: TokenLists(word_token_ids(tokenizer, words), allowed)
        )

    def __call__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> TokenConstraint | None:
        inner = self._of_text(sampling, prompt_token_ids)
        if not sampling.bad_words and sampling.allowed_token_ids is None:
            return inner
        return ListedTokens(self._lists(sampling.bad_words, sampling.allowed_token_ids), inner)

    def _of_text(self, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> TokenConstraint | None:
        structured, thinking = sampling.structured_outputs, sampling.thinking
        answer = None
        if structured is not None:
            answer = self._grammars.constraint(structured, includes_stop=sampling.include_stop_str_in_output)
        if thinking is None or (answer is None and thinking.max_tokens is None):
            return answer
        markers = self._markers(thinking.start, thinking.end)
        ends = self._grammars.eos_token_ids
        return ThinkingConstraint(markers, thinking, answer, prompt_token_ids, eos_token_ids=ends)


def token_constraint_factory(tokenizer: Tokenizer, eos_token_ids: Collection[int] = ()) -> TokenConstraintFactory:
    """Makes constraints over `tokenizer`. `eos_token_ids` end a whole output; default: the tokenizer's own.

    The factory raises ValueError for a schema, regex, grammar or word that cannot be used, ModelError for a tokenizer
    that cannot be constrained. It looks at the prompt for thoughts that a chat template began.
    """
    return _Constraints(tokenizer, eos_token_ids)

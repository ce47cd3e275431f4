"""Forbidden words and allowed tokens against their definition, alone and over another constraint."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.request import Progress, SamplingParams, StructuredOutput
from bulkrun.text.constraint import token_constraint_factory
from bulkrun.text.token_lists import ListedTokens, TokenLists, word_token_ids
from bulkrun.text.tokenizer import Tokenizer
from tests.text import small_tokenizers
from tests.text.walking import allowed_tokens, at_random, text_of

VOCAB_SIZE = 70  # no multiple of 32
EVERY_TOKEN = set(range(VOCAB_SIZE))
FEW = st.integers(0, 4) | st.sampled_from([31, 32, 69, 500])  # so that words come, and one beyond the model
WORDS = st.lists(st.lists(FEW, min_size=1, max_size=4), max_size=6)
OUTPUT = st.lists(st.integers(0, 4) | st.sampled_from([31, 32, 69]), max_size=12)


class Allows:
    """Another constraint, of a set for each place; it forces what is alone in its set."""

    def __init__(self, sets: Sequence[set[int]]) -> None:
        self.sets, self.place = sets, 0

    def fill_mask(self, mask: memoryview[int]) -> bool:
        if not self.sets[self.place]:
            return False
        bits = sum(1 << token_id for token_id in self.sets[self.place])
        mask[:] = memoryview(bits.to_bytes(mask.nbytes, "little")).cast("i")
        return True

    def accept(self, token_id: int) -> str | None:
        self.place += 1
        return None

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        for one in self.sets[self.place :]:
            if len(one) != 1:
                break
            forced += one
        return forced

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        return "closed"


def left(words: Sequence[Sequence[int]], allowed: Sequence[int] | None, output: Sequence[int]) -> set[int]:
    """By definition: no token with which the output ends with a word."""
    told = EVERY_TOKEN if allowed is None else set(allowed)
    return {token for token in told if all([*output, token][-len(word) :] != word for word in words)}


@given(words=WORDS, allowed=st.none() | st.lists(st.integers(0, 69), min_size=1), output=OUTPUT)
def test_a_mask_holds_what_ends_no_word_and_is_allowed(
    words: list[list[int]], allowed: list[int] | None, output: list[int]
) -> None:
    lists = TokenLists(words, allowed)
    one = ListedTokens(lists)
    for place in range(len(output) + 1):
        ids, want = allowed_tokens(one, VOCAB_SIZE), left(words, allowed, output[:place])
        assert (EVERY_TOKEN if ids is None else EVERY_TOKEN.intersection(ids)) == want
        assert ids is not None or want == EVERY_TOKEN
        assert {t for t in EVERY_TOKEN if lists.allows(t, output[:place])} == want
        if place < len(output):
            assert one.accept(output[place]) is None
    assert one.forced_tokens() == [] and one.progress() == "whole"


SETS = st.lists(st.sets(st.integers(0, 4) | st.just(69), max_size=3), min_size=1, max_size=8)


@given(words=WORDS, allowed=st.none() | st.lists(st.integers(0, 69), min_size=1), sets=SETS, data=st.data())
def test_over_another_constraint_both_hold_and_what_is_forced_is_allowed(
    words: list[list[int]], allowed: list[int] | None, sets: list[set[int]], data: st.DataObject
) -> None:
    one, output = ListedTokens(TokenLists(words, allowed), Allows(sets)), []
    for place, inner in enumerate(sets):
        both = left(words, allowed, output) & (inner or EVERY_TOKEN)
        ids = allowed_tokens(one, VOCAB_SIZE)
        assert (EVERY_TOKEN if ids is None else EVERY_TOKEN.intersection(ids)) == both
        forced = one.forced_tokens()
        for number, token_id in enumerate(forced):
            assert {token_id} == sets[place + number]
            assert token_id in left(words, allowed, [*output, *forced[:number]])
        assert bool(forced) == (len(inner) == 1 and both == inner)
        output.append(data.draw(st.sampled_from(sorted(both or EVERY_TOKEN))))
        one.accept(output[-1])
    assert one.progress() == "closed"


def test_a_word_that_a_forced_text_spells_ends_what_is_forced() -> None:
    one = ListedTokens(TokenLists([[4, 5]], None), Allows([{3}, {4}, {5}, {6}]))
    assert list(one.forced_tokens()) == [3, 4]


def test_masks_of_another_size_are_made_anew() -> None:
    lists = TokenLists([[3]], None)
    for num_words in (1, 3, 1):
        mask = memoryview(array("i", [0] * num_words))
        assert ListedTokens(lists).fill_mask(mask)
        assert mask.tolist() == [-1 ^ 1 << 3, *[-1] * (num_words - 1)]


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(getattr(small_tokenizers, request.param)(tmp_path_factory.mktemp("tokenizer")))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text], False)[0]


@pytest.mark.parametrize("text", ["the", "the end", "The", "Zwölf", "0", ",", "\n", "é", "quick brown", "🎉"])
@pytest.mark.parametrize("before", ["", " ", "\n", "the ", "\n\n", "fox\n"])
def test_a_word_is_found_however_it_is_written(tokenizer: Tokenizer, before: str, text: str) -> None:
    """trap vLLM 23886: a word that has fewer tokens behind a space than without one came in spite of all."""
    for word in (text, f" {text}"):
        written = ids(tokenizer, before + text)
        lists = TokenLists(word_token_ids(tokenizer, [word]), None)
        assert not all(lists.allows(token_id, written[:place]) for place, token_id in enumerate(written))


def test_a_word_of_spaces_is_those_and_nothing_else(tokenizer: Tokenizer) -> None:
    assert ids(tokenizer, "   ") in word_token_ids(tokenizer, ["   "])
    assert all(text_of(tokenizer, word).isspace() or not word for word in word_token_ids(tokenizer, ["   ", "\n"]))


def test_a_word_without_tokens_is_refused(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import normalizers

    small_tokenizers.byte_level(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.Replace("\u200b", "")
    backend.save(str(tmp_path / "tokenizer.json"))
    factory = token_constraint_factory(Tokenizer.from_dir(tmp_path))
    with pytest.raises(ValueError, match=r"bad_words: '\\u200b' has no tokens in this model's tokenizer; leave it out"):
        factory(SamplingParams(bad_words=["the", "\u200b"]))
    with pytest.raises(ValueError, match=r"bad_words: '\\ud800' holds half a surrogate pair, which is not text"):
        factory(SamplingParams(bad_words=["\ud800"]))


def made(tokenizer: Tokenizer, **sampling: Any) -> Any:
    return token_constraint_factory(tokenizer)(SamplingParams(**sampling))


def test_only_samplings_with_lists_get_one_and_equal_ones_share_it(tokenizer: Tokenizer) -> None:
    assert made(tokenizer) is None
    factory = token_constraint_factory(tokenizer)
    one, other = (factory(SamplingParams(bad_words=["the"], allowed_token_ids=[5])) for _ in range(2))
    assert isinstance(one, ListedTokens) and isinstance(other, ListedTokens) and one is not other
    assert one._lists is other._lists


def walked(tokenizer: Tokenizer, seed: int, words: list[str], *structured: Any) -> tuple[list[int], str]:
    """The tokens of an output, and how it ended: whole, or with nothing left."""
    one = made(tokenizer, structured_outputs=StructuredOutput(*structured), bad_words=words)
    choose, output = at_random(seed), []
    while left := allowed_tokens(one, tokenizer.vocab_size):
        token_id = choose(left)
        assert one.accept(token_id) is None
        if token_id == ids(tokenizer, "</s>")[-1]:
            return output, "whole"
        output.append(token_id)
    return output, "nothing left"


@given(seed=st.integers(0, 2**32))
def test_a_grammar_goes_on_without_the_words(tokenizer: Tokenizer, seed: int) -> None:
    words = ["the", "fox"]
    output, _ = walked(tokenizer, seed, words, "regex", "(the|fox|dog|quick)( (the|fox|dog|quick)){3}")
    assert not any(_holds(output, word) for word in word_token_ids(tokenizer, words))


def test_choices_but_the_forbidden_one_are_left(tokenizer: Tokenizer) -> None:
    found = [walked(tokenizer, seed, ["dog"], "choice", json.dumps(["dog", "fox", "lazy"])) for seed in range(40)]
    assert {"fox", "lazy"} <= {text_of(tokenizer, output) for output, how in found if how == "whole"}
    words = word_token_ids(tokenizer, ["dog"])
    assert not any(_holds(output, word) for output, _ in found for word in words)
    assert any(how == "nothing left" and text_of(tokenizer, output)[:1] in ("d", "") for output, how in found)


def _holds(output: Sequence[int], word: Sequence[int]) -> bool:
    return any(list(output[n : n + len(word)]) == list(word) for n in range(len(output)))

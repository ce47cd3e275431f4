"""The oracle decodes everything after every token, behind a prompt, and searches it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.text.stop import stop_matcher_factory
from bulkrun.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import byte_level, metaspace

PIECES = ["the", " the", "end", " ", "\n", "\n\n", "é", "日本", "🎉", "x", "###", "</s", "a b", "ö\n"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_dir({"byte level": byte_level, "metaspace": metaspace}[kind](Path(mkdtemp())))


def text_of(kind: str, ids: list[int]) -> str:
    """What the tokens add to the text of a prompt."""
    prompt = tokenizer(kind).encode_batch(["Q"], False)[0]
    before, text = tokenizer(kind).decode_batch([prompt, prompt + ids])
    assert text.startswith(before)
    return text[len(before) :]


def first_match(kind: str, ids: list[int], stop: list[str]) -> int | None:
    """How many tokens there are when the decoded text first holds a stop string."""
    texts = ((count, text_of(kind, ids[:count])) for count in range(1, len(ids) + 1))
    return next((count for count, text in texts if any(string in text for string in stop)), None)


def run_matcher(kind: str, ids: list[int], stop: list[str]) -> tuple[int | None, str | None]:
    matcher = stop_matcher_factory(tokenizer(kind))(stop)
    for count, token_id in enumerate(ids, 1):
        if (found := matcher.append(token_id)) is not None:
            return count, found
    return None, None


stops = st.lists(st.sampled_from(PIECES) | st.text("the \né日🎉x#", min_size=1, max_size=6), min_size=1, max_size=3)


@settings(max_examples=150)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25), stop=stops)
@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_matches_at_the_token_where_the_whole_text_first_holds_a_stop_string(
    kind: str, pieces: list[str], stop: list[str]
) -> None:
    ids = tokenizer(kind).encode_batch(["".join(pieces)], False)[0]
    count, found = run_matcher(kind, ids, stop)
    assert count == first_match(kind, ids, stop)
    if found is not None:
        text = text_of(kind, ids[:count])
        assert found in stop and text.find(found) == min(at for string in stop if (at := text.find(string)) >= 0)


@settings(max_examples=150)
@given(data=st.data(), stop=stops)
def test_random_bytes_and_special_tokens_neither_hide_nor_invent_a_match(data: st.DataObject, stop: list[str]) -> None:
    vocab = tokenizer("byte level").vocab_size
    known = tokenizer("byte level").encode_batch(["".join(stop)], False)[0]
    ids = data.draw(st.lists(st.integers(0, vocab - 1) | st.sampled_from(known), max_size=40))
    assert run_matcher("byte level", ids, stop)[0] == first_match("byte level", ids, stop)


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_a_broken_character_at_the_start_hides_nothing_after_it(kind: str) -> None:
    [ids] = tokenizer(kind).encode_batch(["Q日本日本x"], False)
    for start in range(1, len(ids)):
        assert run_matcher(kind, ids[start:], ["本"])[0] == first_match(kind, ids[start:], ["本"])


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_a_stop_string_may_have_several_tokens_for_each_character(kind: str) -> None:
    [ids] = tokenizer(kind).encode_batch(["Q 語の絵文字🎉🚀 x"], False)
    assert run_matcher(kind, ids, ["語の絵文字🎉🚀"])[0] == first_match(kind, ids, ["語の絵文字🎉🚀"]) is not None


def test_special_tokens_within_a_stop_string_hide_nothing_of_it() -> None:
    [[first, *others]] = tokenizer("byte level").encode_batch(["qzq"], False)
    end = tokenizer("byte level").eos_token_id
    assert end is not None and others
    assert run_matcher("byte level", [first, *[end] * 20, *others], ["qzq"]) == (21 + len(others), "qzq")


def test_a_match_that_was_not_acted_on_is_not_reported_again() -> None:
    ids = tokenizer("byte level").encode_batch(["a###bcd###e"], False)[0]
    matcher = stop_matcher_factory(tokenizer("byte level"))(["###"])
    assert [matcher.append(token_id) for token_id in ids].count("###") == 2


def test_of_two_stop_strings_that_one_token_completes_the_earlier_one_is_reported() -> None:
    ids = tokenizer("byte level").encode_batch(["the end"], False)[0]
    assert run_matcher("byte level", ids, ["nd", "end"])[1] == "end"


def test_a_stop_string_that_one_token_completes_twice_counts_where_it_is_first() -> None:
    class OneToken:
        special_ids: frozenset[int] = frozenset()

        def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
            return ["a#b#" * len(sequence) for sequence in sequences]

    assert stop_matcher_factory(OneToken())(["b", "#"]).append(0) == "#"


@pytest.mark.parametrize("stop", [" the", " ", " t"])
def test_the_space_that_an_output_begins_with_counts_though_the_decoder_drops_it(stop: str) -> None:
    [ids] = tokenizer("metaspace").encode_batch(["Q the"], False)
    assert run_matcher("metaspace", ids[2:], [stop]) == (1, stop)
    assert run_matcher("metaspace", tokenizer("metaspace").encode_batch(["Qthe"], False)[0][2:], [stop])[0] is None


def test_the_tail_is_bounded_however_long_the_output_is() -> None:
    calls: list[int] = []

    class Counting:
        special_ids: frozenset[int] = frozenset()

        def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
            calls.append(len(sequences[0]))
            return ["".join(chr(97 + token_id % 26) for token_id in sequences[0])]

    matcher = stop_matcher_factory(Counting())(["never!"])
    for token_id in range(5000):
        assert matcher.append(token_id) is None
    assert max(calls) <= len("never!") + 4 and len(calls) == 5000 + 2, "two more at the first token"


class SpacesLost:
    """Decodes as `decoders.Metaspace` does: all spaces at the start of a text are dropped."""

    special_ids: frozenset[int] = frozenset()

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return ["".join(["  the", "end"][token_id] for token_id in ids).lstrip(" ") for ids in sequences]


@pytest.mark.parametrize("stop", ["  the", " theend", "  theend"])
def test_all_spaces_that_the_first_token_begins_with_are_seen(stop: str) -> None:
    matcher = stop_matcher_factory(SpacesLost())([stop])
    assert stop in [matcher.append(0), matcher.append(1)]

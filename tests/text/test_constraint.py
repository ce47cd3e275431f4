"""Constraints against oracles: what comes out is judged by `json`, `jsonschema`, `re` and plain sets."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.errors import ModelError
from bulkrun.request import SamplingParams, StructuredOutput, TokenConstraint
from bulkrun.text.constraint import token_constraint_factory
from bulkrun.text.tokenizer import Tokenizer
from tests.text import small_tokenizers
from tests.text.walking import allowed_tokens, at_random, text_of, walk

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": -5, "maximum": 200},
        "kind": {"enum": ["a", "b", None, 3]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "child": {"anyOf": [{"$ref": "#/$defs/child"}, {"type": "null"}]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
    "$defs": {
        "child": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    },
}
EOS = "</s>"


@pytest.fixture(scope="module", params=["byte_level", "metaspace", "with_gaps"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make = getattr(small_tokenizers, request.param)
    return Tokenizer.from_dir(make(tmp_path_factory.mktemp("tokenizer")))


def eos_of(tokenizer: Tokenizer) -> int:
    return tokenizer.encode_batch([EOS], False)[0][-1]


def constraint(tokenizer: Tokenizer, kind: Any, value: str, **sampling: Any) -> TokenConstraint:
    params = SamplingParams(structured_outputs=StructuredOutput(kind, value), **sampling)
    made = token_constraint_factory(tokenizer)(params)
    assert made is not None
    return made


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_every_json_output_fits_the_schema(tokenizer: Tokenizer, seed: int) -> None:
    made = constraint(tokenizer, "json", json.dumps(SCHEMA))
    output, ended = walk(made, tokenizer, eos_of(tokenizer), at_random(seed), max_tokens=2000)
    assert ended
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text_of(tokenizer, output)))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_every_regex_output_matches(tokenizer: Tokenizer, seed: int) -> None:
    pattern = r"(ab|[0-9]{2,4}x)+ end"
    made = constraint(tokenizer, "regex", pattern)
    output, ended = walk(made, tokenizer, eos_of(tokenizer), at_random(seed))
    assert ended
    assert re.fullmatch(pattern, text_of(tokenizer, output))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_every_grammar_output_is_of_the_language(tokenizer: Tokenizer, seed: int) -> None:
    made = constraint(tokenizer, "grammar", 'start: "(" start ")" | "x"{1,3}')
    output, ended = walk(made, tokenizer, eos_of(tokenizer), at_random(seed), max_tokens=3000)
    assert ended
    text = text_of(tokenizer, output)
    depth = text.count("(")
    assert re.fullmatch(rf"\({{{depth}}}x{{1,3}}\){{{depth}}}", text)


CHOICES = ["yes", "yesterday", "no", "naïve café", 'the "quick"\n']


def test_a_mask_allows_exactly_the_tokens_that_some_choice_goes_on_with(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path))
    eos, spelled = eos_of(tokenizer), _token_bytes(tokenizer)
    for seed in range(20):
        made, choose, written = constraint(tokenizer, "choice", json.dumps(CHOICES)), at_random(seed), b""
        token_id = -1
        while token_id != eos:
            rests = [c.encode()[len(written) :] for c in CHOICES if c.encode().startswith(written)]
            expected = {i for i, b in spelled.items() if b and any(rest.startswith(b) for rest in rests)}
            expected |= {eos} if b"" in rests else set()
            ids = allowed_tokens(made, tokenizer.vocab_size)
            assert ids is not None
            if len({rest[:1] for rest in rests}) > 1:
                assert set(ids) == expected
            else:  # where one way only is left, llguidance allows the token that the tokenizer itself would take
                assert ids
                assert set(ids) <= expected
            token_id = choose(ids)
            assert made.accept(token_id) is None
            written += spelled.get(token_id, b"")
        assert written.decode() in CHOICES


def test_there_may_be_thousands_of_choices(tokenizer: Tokenizer) -> None:
    choices = [f"{number} of many" for number in range(3000)]
    made = constraint(tokenizer, "choice", json.dumps(choices))
    output, ended = walk(made, tokenizer, eos_of(tokenizer), at_random(0))
    assert ended and text_of(tokenizer, output) in choices


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.metaspace])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "a<s>é</s>"),
        ("choice", '["a<s>\\u00e9</s>"]'),
        ("grammar", 'start: "a<s>" /é/ "</s>"'),
        ("json", '{"enum": ["a<s>\\u00e9</s>"]}'),
    ],
)
def test_the_name_of_a_special_token_is_written_in_letters(make: Any, kind: Any, value: str, tmp_path: Path) -> None:
    """The token itself has no text: the output would lack a part that the grammar asks for."""
    tokenizer = Tokenizer.from_dir(make(tmp_path))
    output, ended = walk(constraint(tokenizer, kind, value), tokenizer, eos_of(tokenizer), at_random(1))
    assert ended
    text = tokenizer.decode_batch([output], skip_special_tokens=True)[0]
    assert text == ('"a<s>é</s>"' if kind == "json" else "a<s>é</s>")


def _token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of each token that is not special, by the byte alphabet of GPT-2 (written out from its definition)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    ordinary = {text: i for text, i in vocabulary.items() if i not in tokenizer.special_ids}
    return {i: bytes(byte_of[character] for character in text) for text, i in ordinary.items()}


def test_json_whitespace_loop_is_not_possible(tokenizer: Tokenizer) -> None:
    """Whoever takes white space wherever it is allowed (outside of strings) comes to an end all the same."""
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}}
    schema |= {"minItems": 2, "maxItems": 4}
    schema["items"] |= {"required": ["a"], "additionalProperties": False}  # type: ignore[operator, call-overload]
    made = constraint(tokenizer, "json", json.dumps(schema))

    def blank_first(ids: list[int]) -> int:
        blank = [i for i in ids if text_of(tokenizer, [i]).isspace()]
        return (blank or ids)[-1]

    output, ended = walk(made, tokenizer, eos_of(tokenizer), blank_first, max_tokens=400)
    text = text_of(tokenizer, output)
    assert not re.search(r"\s\s", text)
    assert ended or len(text) < 400
    for written in ('[{"a":1},{"a":2}]', '[{"a": 1}, {"a": 2}]'):
        accepted = constraint(tokenizer, "json", json.dumps(schema))
        ids = tokenizer.encode_batch([written], False)[0]
        if text_of(tokenizer, ids) == written and tokenizer.decode_batch([ids[:1]])[0].startswith("["):
            assert [accepted.accept(i) for i in ids] == [None] * len(ids), "as models write it"


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("choice", '["abcdef"]', "abcdef"),
        ("regex", "(ab|cd) end", ""),
        ("json", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}', '{"a":'),
        ("choice", '["a<s>b"]', ""),  # its own special token's text: every token that fits is allowed
    ],
)
def test_a_text_that_has_to_follow_is_forced(tokenizer: Tokenizer, kind: str, value: str, text: str) -> None:
    made = constraint(tokenizer, kind, value)
    output: list[int] = []
    while made.progress() != "closed" and (forced := made.forced_tokens()):
        output += forced
        assert [made.accept(token_id) for token_id in forced] == [None] * len(forced)
    written = text_of(tokenizer, output)
    assert text.startswith(written)
    assert len(written) >= len(text) - 1, "the last character may be part of a longer token"
    if made.progress() == "closed":
        assert list(made.forced_tokens()) == [eos_of(tokenizer)]


def test_after_a_whole_output_only_the_end_is_allowed(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, "choice", '["no"]')
    for token_id in _spelling(made, tokenizer, "no"):
        assert made.accept(token_id) is None
    assert allowed_tokens(made, tokenizer.vocab_size) == [eos_of(tokenizer)]


def test_ends_that_are_no_tokens_end_nothing(tokenizer: Tokenizer) -> None:
    make = token_constraint_factory(tokenizer, {eos_of(tokenizer), tokenizer.vocab_size, 999_999, -1})
    made = make(SamplingParams(structured_outputs=StructuredOutput("choice", '["no"]')))
    assert made is not None
    for token_id in _spelling(made, tokenizer, "no"):
        assert made.accept(token_id) is None
    assert allowed_tokens(made, tokenizer.vocab_size) == [eos_of(tokenizer)]


def _spelling(made: TokenConstraint, tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of one character each."""
    return [i for character in text for i in _ids_reading(tokenizer, character)[:1]]


def _ids_reading(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = range(tokenizer.vocab_size)
    return [i for i, read in zip(ids, tokenizer.decode_batch([[i] for i in ids]), strict=True) if read == text]


@pytest.mark.parametrize(
    ("kind", "value", "text", "progress"),
    [
        ("regex", "[A-D]", "", "unfinished"),
        ("regex", "[A-D]", "B", "closed"),
        ("regex", "[0-9]{2,3}", "1", "unfinished"),
        ("regex", "[0-9]{2,3}", "12", "whole"),
        ("regex", "[0-9]{2,3}", "120", "closed"),
        ("regex", "a?", "", "whole"),
        ("grammar", 'start: "a" | "ab"', "a", "whole"),
        ("grammar", 'start: "a" | "ab"', "ab", "closed"),
        ("json", '{"type": "integer", "minimum": 1, "maximum": 5}', "3", "closed"),
        ("json", '{"type": "integer"}', "3", "whole"),
    ],
)
def test_how_far_an_output_has_come(tokenizer: Tokenizer, kind: str, value: str, text: str, progress: str) -> None:
    made = constraint(tokenizer, kind, value)
    for token_id in _spelling(made, tokenizer, text):
        assert made.accept(token_id) is None
    assert made.progress() == progress


@pytest.mark.parametrize(
    ("kind", "value", "text", "stop", "progress"),
    [
        ("regex", "[a-c]{3}x?", "a", "a", "unfinished"),
        ("regex", "[a-c]{3}x?", "abcx", "x", "whole"),
        ("regex", "[a-c]{3}x?", "abcx", "cx", "unfinished"),
        ("regex", "[a-c]{3}", "abc", "c", "unfinished"),
        ("regex", "(ab|ba)+", "abab", "ab", "whole"),  # the first one came too early to count
        ("regex", "é?é", "éé", "é", "whole"),
        ("regex", "[0-9]*", "12", "</think>1", "unfinished"),
        ("grammar", 'start: "a" | "ab" "c"?', "abc", "c", "whole"),
        ("grammar", 'start: "a" | "ab" "c"?', "abc", "bc", "whole"),
        ("json", '{"type": "array", "items": {"type": "integer"}}', "[1]", "]", "unfinished"),
        ("json", '{"type": "integer"}', "120", "0", "whole"),
        ("json", '{"type": "integer", "minimum": 1, "maximum": 10}', "10", "0", "whole"),
        ("choice", '["yes", "yesterday"]', "yesterday", "terday", "whole"),
    ],
)
def test_how_far_an_output_has_come_where_a_stop_string_cuts_it(
    tokenizer: Tokenizer, kind: str, value: str, text: str, stop: str, progress: str
) -> None:
    """Whatever tokens it is made of: those of one character, and at random."""
    for seed in range(5):
        made = constraint(tokenizer, kind, value)
        for token_id in _spelling_at_random(made, tokenizer, text, seed):
            assert made.accept(token_id) is None
        assert made.progress(stop) == progress


@pytest.mark.parametrize(
    ("kind", "value", "text", "stop", "progress"),
    [
        ("regex", "[a-c]{3}x?", "a", "a", "unfinished"),
        ("regex", "[a-c]{3}x?", "abc", "c", "whole"),
        ("regex", "[a-c]{3}x?", "abcx", "cx", "closed"),
        ("regex", "[a-c]{3}x?", "abcx", "c", "whole"),  # a token may go on behind the stop
        ("regex", "(ab|ba)+", "abab", "ab", "whole"),
        ("regex", "é?é", "éé", "é", "whole"),
        ("regex", "[0-9]*", "12", "</think>1", "unfinished"),
        ("json", '{"type": "array", "items": {"type": "integer"}}', "[1]", "]", "closed"),
        ("json", '{"type": "array", "items": {"type": "integer"}}', "[1, 2]", ",", "unfinished"),
        ("choice", '["yes", "yesterday"]', "yesterday", "yes", "whole"),
    ],
)
def test_how_far_an_output_has_come_with_the_stop_string_that_ends_it(
    tokenizer: Tokenizer, kind: str, value: str, text: str, stop: str, progress: str
) -> None:
    """Up to the token that completes the string, which may be the last one or hold what follows."""
    for seed in range(5):
        made = constraint(tokenizer, kind, value, include_stop_str_in_output=True)
        spelled: list[int] = []
        for token_id in _spelling_at_random(made, tokenizer, text, seed):
            assert made.accept(token_id) is None
            spelled.append(token_id)
            if stop in text_of(tokenizer, spelled):
                break
        assert made.progress(stop) == progress


def _spelling_at_random(made: TokenConstraint, tokenizer: Tokenizer, text: str, seed: int) -> list[int]:
    """Tokens that read as the text, longer and shorter ones."""
    choose, spelled, rest = at_random(seed), [], text
    readings = [(i, text_of(tokenizer, [i])) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    while rest:
        fitting = [(i, read) for i, read in readings if read and rest.startswith(read)]
        if not fitting:
            return _spelling(made, tokenizer, text)
        token_id = choose([i for i, _ in fitting])
        spelled.append(token_id)
        rest = rest.removeprefix(dict(fitting)[token_id])
    return spelled


def test_how_far_an_output_has_come_before_a_stop_token(tokenizer: Tokenizer) -> None:
    for text, progress in (("1", "unfinished"), ("12", "unfinished"), ("123", "whole"), ("1234", "whole")):
        made = constraint(tokenizer, "regex", "[0-9]{2,4}")
        spelling = _spelling(made, tokenizer, text)
        for token_id in spelling:
            assert made.accept(token_id) is None
        assert made.progress(spelling[-1]) == progress


def test_how_far_an_output_has_come_with_its_stop_token(tokenizer: Tokenizer) -> None:
    for text, progress in (("1", "unfinished"), ("12", "whole"), ("123", "whole"), ("1234", "closed")):
        made = constraint(tokenizer, "regex", "[0-9]{2,4}", include_stop_str_in_output=True)
        spelling = _spelling(made, tokenizer, text)
        for token_id in spelling:
            assert made.accept(token_id) is None
        assert made.progress(spelling[-1]) == progress


def test_an_output_whose_grammar_failed_is_not_whole(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, "regex", "a?")
    assert made.accept(_ids_reading(tokenizer, "b")[0]) is not None
    assert made.progress() == "unfinished"


def test_all_ends_of_a_model_may_end_an_output(tokenizer: Tokenizer) -> None:
    ends = sorted([eos_of(tokenizer), *tokenizer.encode_batch(["<s>"], False)[0][-1:]])
    factory = token_constraint_factory(tokenizer, ends)
    made = factory(SamplingParams(structured_outputs=StructuredOutput("choice", '[""]')))
    assert made is not None
    assert allowed_tokens(made, tokenizer.vocab_size) == ends


def test_a_token_that_does_not_fit_is_refused_with_a_reason(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, "choice", '["no"]')
    [x] = _ids_reading(tokenizer, "x")[:1]
    reason = made.accept(x)
    assert reason is not None
    assert "\n" not in reason
    assert allowed_tokens(made, tokenizer.vocab_size) == [eos_of(tokenizer)], "nothing but an end can follow"
    assert made.accept(eos_of(tokenizer)) is not None


def test_sequences_of_one_grammar_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    factory = token_constraint_factory(tokenizer)
    sampling = SamplingParams(structured_outputs=StructuredOutput("choice", '["ab", "cd"]'))
    first, second = factory(sampling), factory(sampling)
    assert first is not None
    assert second is not None
    before = allowed_tokens(second, tokenizer.vocab_size)
    assert first.accept(_ids_reading(tokenizer, "a")[0]) is None
    assert allowed_tokens(second, tokenizer.vocab_size) == before
    assert allowed_tokens(first, tokenizer.vocab_size) != before


@pytest.mark.parametrize("num_words", [1, 4, 64])
def test_a_model_may_have_more_or_fewer_logits_than_tokens(tokenizer: Tokenizer, num_words: int) -> None:
    made = constraint(tokenizer, "regex", ".*")
    exact = memoryview(array("i", [0] * (tokenizer.vocab_size // 32 + 1)))
    mask = memoryview(array("i", [-1] * num_words))
    assert made.fill_mask(exact)
    assert made.fill_mask(mask)
    assert mask.tolist() == (exact.tolist() + [0] * num_words)[:num_words]


def test_sampling_without_structure_needs_no_constraint(tokenizer: Tokenizer) -> None:
    assert token_constraint_factory(tokenizer)(SamplingParams()) is None


def test_an_unusable_schema_is_a_value_error_every_time(tokenizer: Tokenizer) -> None:
    factory = token_constraint_factory(tokenizer)
    for _ in range(2):
        with pytest.raises(ValueError, match="Invalid type: strin"):
            factory(SamplingParams(structured_outputs=StructuredOutput("json", '{"type": "strin"}')))


def test_a_model_without_an_end_cannot_be_constrained(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path, {"eos_token": None}))
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        constraint(tokenizer, "choice", '["no"]')


def test_a_grammar_that_gets_too_large_on_the_way_ends_its_row_with_a_reason(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, "regex", "((a{1,100}){1,100}){1,100}")
    [a] = _ids_reading(tokenizer, "a")[:1]
    reasons = (made.accept(a) for _ in range(100))
    reason = next(filter(None, reasons))
    assert "too many" in reason
    assert allowed_tokens(made, tokenizer.vocab_size) == [eos_of(tokenizer)]
    assert made.accept(eos_of(tokenizer)) is not None, "an end that was all that was left is no whole output"

"""The text of outputs behind their prompts and up to their stop strings, with small tokenizers of both kinds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from bulkrun.job.outputs.marker_decode import MarkerDecode
from bulkrun.job.outputs.output_text import Output, cut_at_stop, output_texts
from bulkrun.request import Completion, SamplingParams, StructuredOutput
from bulkrun.text.constraint import token_constraint_factory
from bulkrun.text.stop import stop_matcher_factory
from bulkrun.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import byte_level, metaspace
from tests.text.walking import at_random, walk

KINDS = {"byte level": byte_level, "metaspace": metaspace}
PIECES = ["the", " the", "end", " ", "\n", "é", "日本", "🎉", "🚀", "x", "###", "a b", "ö\n"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_dir(KINDS[kind](Path(mkdtemp())))


def read(
    kind: str, prompt: list[int], output: list[int], stop: int | str | None = None, *, includes_stop: bool = False
) -> str:
    done = Completion("0", tuple(output), "stop", stop_reason=stop)
    return output_texts(tokenizer(kind).decode_batch, [Output(prompt, done, includes_stop)])[0]


def split(kind: str, prompt: str, output: str) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, and of the text that goes on after it."""
    [first, whole] = tokenizer(kind).encode_batch([prompt, prompt + output], False)
    assert whole[: len(first)] == first, "the texts meet between two tokens"
    return first, whole[len(first) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("output", [" fox", "fox", "  fox", " 日本", "\n x", " ", ""])
def test_an_output_reads_as_it_goes_on_after_its_prompt(kind: str, output: str) -> None:
    assert read(kind, *split(kind, "the quick brown!", output)) == output


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_is_kept_after_special_tokens_at_the_end_of_a_prompt(kind: str) -> None:
    prompt, output = split(kind, "q!", " fox")
    [marker] = tokenizer(kind).encode_batch(["</s>"], False)
    assert read(kind, [*prompt, *marker * 3], output) == " fox"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_shows_markers_loses_no_space(kind: str) -> None:
    """A token that is a space alone reads as nothing where the decoder drops the space that a text begins with."""
    [ids] = tokenizer(kind).encode_batch(["q 日  x</s>"], False)
    assert MarkerDecode(tokenizer(kind).decode_batch, {"</s>"})([ids]) == ["q 日  x</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_that_the_prompt_began_belongs_to_the_output(kind: str) -> None:
    """A prompt that was cut to fit can end inside a character."""
    [ids] = tokenizer(kind).encode_batch(["x🎉"], False)
    for at in range(1, len(ids)):
        prompt, output = tokenizer(kind).decode_batch([ids[:at], ids])
        assert prompt.removesuffix("\ufffd") + read(kind, ids[:at], ids[at:]) == output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_choice_that_begins_with_a_space_is_read_as_that_choice(kind: str, seed: int) -> None:
    choices = [" the", " fox"]
    [prompt, [*_, end]] = tokenizer(kind).encode_batch(["Q:", "</s>"], False)
    structured = StructuredOutput("choice", json.dumps(choices))
    bound = token_constraint_factory(tokenizer(kind))(SamplingParams(structured_outputs=structured), prompt)
    assert bound is not None
    output, ended = walk(bound, tokenizer(kind), end, at_random(seed))
    assert ended
    assert read(kind, prompt, output) in choices


@settings(max_examples=100)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), cut=st.integers(0, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_what_a_stream_behind_the_prompt_shows(kind: str, pieces: list[str], cut: int) -> None:
    """Oracle: tokenizers' DecodeStream, as in vLLM. It holds back tokens that end inside a character."""
    prompt, output = split(kind, "A b!", "".join(pieces))
    output = output[: max(0, len(output) - cut)]
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    backend = tokenizer(kind)._backend
    shown = "".join(stream.step(backend, token_id) or "" for token_id in output)
    text = read(kind, prompt, output)
    assert text == shown or (text.startswith(shown) and text.endswith("\ufffd"))


@settings(max_examples=200)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=15), stop=st.sampled_from(PIECES), min_tokens=st.integers(0, 9)
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_ends_before_the_occurrence_that_stopped_it(
    kind: str, pieces: list[str], stop: str, min_tokens: int
) -> None:
    """Oracle: of all occurrences the first that was not yet whole before the token that the engine stopped at."""
    prompt, output = split(kind, "A b!", "".join(pieces))
    matcher = stop_matcher_factory(tokenizer(kind))([stop])
    found = [count for count, token_id in enumerate(output, 1) if matcher.append(token_id) and count > min_tokens]
    if not found:
        return
    whole, before = read(kind, prompt, output[: found[0]]), read(kind, prompt, output[: found[0] - 1])
    starts = [at for at in range(len(whole)) if whole.startswith(stop, at) and not before.startswith(stop, at)]
    assert read(kind, prompt, output[: found[0]], stop) == whole[: starts[0]]
    assert read(kind, prompt, output[: found[0]], stop, includes_stop=True) == whole[: starts[0] + len(stop)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("includes_stop", [False, True])
def test_the_text_of_a_stop_token_may_be_part_of_the_text(kind: str, includes_stop: bool) -> None:
    """Oracle: the text of all that was generated, the stop token too, as in vLLM."""
    prompt, output = split(kind, "A b!", "x the\n end")
    for count in range(1, len(output)):
        *before, stop = output[:count]
        text = read(kind, prompt, before, stop, includes_stop=includes_stop)
        assert text == read(kind, prompt, output[:count] if includes_stop else before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_stop_token_has_no_text(kind: str) -> None:
    prompt, output = split(kind, "A!", " the")
    [[*_, end]] = tokenizer(kind).encode_batch(["</s>"], False)
    assert read(kind, prompt, output, end, includes_stop=True) == " the"
    assert read(kind, prompt, output, None, includes_stop=True) == " the", "a model's own end has none either"
    assert read(kind, prompt, [], end, includes_stop=True) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_beside_characters_in_bytes_is_cut(kind: str) -> None:
    assert read(kind, *split(kind, "A!", "ok 🎉🚀"), "🚀") == "ok 🎉"


@pytest.mark.parametrize("kind", KINDS)
def test_an_occurrence_that_min_tokens_passed_over_stays_however_near_it_is(kind: str) -> None:
    assert read(kind, *split(kind, "A!", "One two\nx\n"), "\n") == "One two\nx"


@given(st.text("abX", max_size=12), st.sampled_from(["X", "aX", "bb"]), st.text("ab", max_size=2))
def test_the_last_token_may_begin_inside_the_stop_string_and_go_on_after_it(head: str, stop: str, rest: str) -> None:
    text = head + stop + rest
    cut = cut_at_stop(text, stop, (head + stop)[:-1])
    assert text.startswith(cut + stop) and len(cut) <= len(head)
    assert len(cut + stop) >= len(head + stop), "an earlier occurrence was whole before"
    assert cut_at_stop(text, stop, (head + stop)[:-1], includes_stop=True) == cut + stop


def test_a_text_without_its_stop_string_stays() -> None:
    assert cut_at_stop("no stop here", "zz", "no st") == "no stop here"


def test_the_prompt_of_an_output_that_never_ran_is_not_decoded() -> None:
    done = [Completion("0", (), "error"), Completion("1", tuple(split("byte level", "a", " the")[1]), "stop")]
    prompts = [[-1, 2**70], split("byte level", "a", " the")[0]]
    outputs = [Output(prompt, one) for prompt, one in zip(prompts, done, strict=True)]
    assert output_texts(tokenizer("byte level").decode_batch, outputs) == ["", " the"]

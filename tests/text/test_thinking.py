"""Thoughts, their budget and the answer after them. The oracle reads the finished text with a regular expression."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.request import Begun, SamplingParams, StructuredOutput, Thinking, TokenConstraint
from bulkrun.text.constraint import token_constraint_factory
from bulkrun.text.thinking import ThinkingMarkers
from bulkrun.text.tokenizer import Tokenizer
from tests.text import small_tokenizers
from tests.text.walking import allowed_tokens, at_random, walk

ADDED = {"151667": "<think>", "151668": "</think>"}
CHOICE = StructuredOutput("choice", '["yes", "no"]')
WANTED = re.compile(r"\s*(?:<think>(?P<thoughts>.*?)</think>)?(?P<answer>yes|no)", re.DOTALL)


@pytest.fixture(scope="module", params=["one token", "several tokens", "metaspace", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Markers that are tokens of their own (Qwen3), special ones, and markers that are spelled."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "metaspace":
        return Tokenizer.from_dir(small_tokenizers.metaspace(folder))
    special = request.param == "special"
    decoder = {i: {"content": text, "special": special} for i, text in ADDED.items()}
    config = {} if request.param == "several tokens" else {"added_tokens_decoder": decoder}
    return Tokenizer.from_dir(small_tokenizers.byte_level(folder, config))


def eos_of(tokenizer: Tokenizer) -> int:
    return tokenizer.encode_batch(["</s>"], False)[0][-1]


def constraint(
    tokenizer: Tokenizer,
    max_tokens: int | None,
    structured: StructuredOutput | None = CHOICE,
    prompt: str = "Hello?",
    begun: Begun | None = None,
) -> TokenConstraint:
    thinking = Thinking("<think>", "</think>", max_tokens, begun)
    sampling = SamplingParams(structured_outputs=structured, thinking=thinking)
    made = token_constraint_factory(tokenizer)(sampling, tokenizer.encode_batch([prompt], False)[0])
    assert made is not None
    return made


def bare(tokenizer: Tokenizer) -> TokenConstraint:
    """What binds the answer alone."""
    made = token_constraint_factory(tokenizer)(SamplingParams(structured_outputs=CHOICE))
    assert made is not None
    return made


def raw_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), budget=st.integers(0, 12))
def test_thoughts_keep_to_their_budget_and_the_answer_fits(tokenizer: Tokenizer, seed: int, budget: int) -> None:
    markers = ThinkingMarkers(tokenizer, "<think>", "</think>")
    eos, choose = eos_of(tokenizer), at_random(seed)
    made = constraint(tokenizer, budget, prompt="Hello?\n<think>\n")
    output, ended = walk(made, tokenizer, eos, choose)
    text = "<think>" + raw_text(tokenizer, output)
    assert ended
    found = WANTED.fullmatch(text.replace(" </think>", "</think>"))
    assert found, text
    _, answer = text.split("</think>", 1)
    assert len(output) <= budget + len(markers.end_ids) + len(answer)


def test_the_model_may_think_or_answer_at_once(tokenizer: Tokenizer) -> None:
    thought, answered = 0, 0
    for seed in range(30):
        output, ended = walk(constraint(tokenizer, 3), tokenizer, eos_of(tokenizer), at_random(seed))
        found = WANTED.fullmatch(raw_text(tokenizer, output).replace(" </think>", "</think>"))
        assert ended
        assert found
        thought += found["thoughts"] is not None
        answered += found["thoughts"] is None
    assert thought
    assert answered


def test_a_prompt_that_ends_the_thoughts_leaves_the_answer_only(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, 3, prompt="Hello?<think>\n\n</think>\n\n")
    assert allowed_tokens(made, tokenizer.vocab_size) == allowed_tokens(bare(tokenizer), tokenizer.vocab_size)


def test_a_prompt_that_only_mentions_a_marker_does_not_begin_thoughts(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, 3, prompt="What does <think> mean? Answer: ")
    assert allowed_tokens(made, tokenizer.vocab_size) is not None, "the answer is bound from its first token"


@pytest.mark.parametrize("prompt", ["<think>\nLet me see", "<think>\nWhat </think> is:</think> no"])
def test_a_message_that_has_begun_its_thoughts_is_still_in_them(tokenizer: Tokenizer, prompt: str) -> None:
    """Whatever its prompt ends with: the budget begins at once, and the grammar binds what comes after their end."""
    for seed in range(5):
        made = constraint(tokenizer, 4, prompt=prompt, begun="thoughts")
        assert allowed_tokens(made, tokenizer.vocab_size) != allowed_tokens(bare(tokenizer), tokenizer.vocab_size)
        output, ended = walk(made, tokenizer, eos_of(tokenizer), at_random(seed))
        found = WANTED.fullmatch("<think>" + raw_text(tokenizer, output).replace(" </think>", "</think>"))
        assert ended and found and found["thoughts"] is not None


@pytest.mark.parametrize("prompt", ["It is", "<think>\nx</think>\n\nIt is", "It ends with <think>"])
def test_a_message_that_has_begun_its_answer_thinks_no_more(tokenizer: Tokenizer, prompt: str) -> None:
    made = constraint(tokenizer, 3, prompt=prompt, begun="answer")
    assert allowed_tokens(made, tokenizer.vocab_size) == allowed_tokens(bare(tokenizer), tokenizer.vocab_size)


@pytest.mark.parametrize("budget", [4, 0])
def test_thoughts_are_free_until_their_budget_is_spent(tokenizer: Tokenizer, budget: int) -> None:
    markers = ThinkingMarkers(tokenizer, "<think>", "</think>")
    made = constraint(tokenizer, budget, structured=None, prompt="<think>")
    letter = tokenizer.encode_batch(["xxxx"], False)[0][-1]
    for _ in range(budget):
        assert allowed_tokens(made, tokenizer.vocab_size) is None
        assert made.accept(letter) is None
    for token_id in markers.end_ids:
        assert allowed_tokens(made, tokenizer.vocab_size) == list(made.forced_tokens()) == [token_id]
        assert made.accept(token_id) is None
    assert allowed_tokens(made, tokenizer.vocab_size) is None
    assert not made.forced_tokens()


@pytest.mark.parametrize(
    ("output", "progress"),
    [
        ("", "unfinished"),
        ("ye", "unfinished"),
        ("yes", "closed"),
        ("<think>", "unfinished"),
        ("<think>yes", "unfinished"),
        ("<think>a</think>", "unfinished"),
        ("<think>a</think>ye", "unfinished"),
        ("<think>a</think>yes", "closed"),
    ],
)
def test_progress_is_that_of_the_answer(tokenizer: Tokenizer, output: str, progress: str) -> None:
    before, ids = tokenizer.encode_batch(["Q", "Q" + output], False)
    assert ids[: len(before)] == before, "what comes before it keeps a space away"
    made = constraint(tokenizer, 50)
    for token_id in ids[len(before) :]:
        assert made.accept(token_id) is None
    assert made.progress() == progress


@pytest.mark.parametrize("stop", ["a", "es", "yes", "</think>yes"])
def test_before_a_stop_the_answer_is_not_whole_whether_that_began_in_the_answer_or_not(
    tokenizer: Tokenizer, stop: str
) -> None:
    output = "<think>a" if stop == "a" else "<think>a</think>yes"
    before, ids = tokenizer.encode_batch(["Q", "Q" + output], False)
    made = constraint(tokenizer, 50)
    for token_id in ids[len(before) :]:
        assert made.accept(token_id) is None
    assert made.progress(stop) == "unfinished"


def test_thoughts_before_an_answer_cannot_end_the_output(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, 4, prompt="<think>")
    allowed = allowed_tokens(made, tokenizer.vocab_size)
    assert allowed is not None
    assert set(range(tokenizer.vocab_size)) - set(allowed) == {eos_of(tokenizer)}


def test_an_end_that_the_model_does_not_have_is_no_trouble(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path, {"eos_token": "<|added later|>"}))
    made = constraint(tokenizer, 4, prompt="<think>")
    num_logits = tokenizer.vocab_size // 64 * 32
    allowed = allowed_tokens(made, num_logits)
    assert allowed is not None and len(allowed) == num_logits


def test_an_end_that_has_begun_is_finished_not_begun_again(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path))
    markers = ThinkingMarkers(tokenizer, "<think>", "</think>")
    assert len(markers.end_ids) > 2
    made = constraint(tokenizer, 3, structured=None, prompt="<think>")
    written = [tokenizer.encode_batch(["x"], False)[0][0], *markers.end_ids[:2]]
    for token_id in written:
        assert made.accept(token_id) is None
    for token_id in markers.end_ids[2:]:
        assert allowed_tokens(made, tokenizer.vocab_size) == [token_id]
        assert made.accept(token_id) is None
    assert allowed_tokens(made, tokenizer.vocab_size) is None


@pytest.mark.parametrize("ending", [">yes", ">\n\nyes"])
def test_an_answer_that_begins_inside_the_markers_last_token_is_not_lost(ending: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(
        small_tokenizers.byte_level(tmp_path, {"added_tokens_decoder": {"900": {"content": ending, "special": False}}})
    )
    made = constraint(tokenizer, 30, prompt="<think>")
    last = tokenizer.encode_batch([ending], False)[0]
    assert len(last) == 1
    for token_id in tokenizer.encode_batch(["x</think"], False)[0] + last:
        assert made.accept(token_id) is None
    assert allowed_tokens(made, tokenizer.vocab_size) == [eos_of(tokenizer)]


def test_an_end_of_several_tokens_a_character_is_seen(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path))
    sampling = SamplingParams(structured_outputs=CHOICE, thinking=Thinking("<思考>", "</思考终了>"))
    made = token_constraint_factory(tokenizer)(sampling)
    assert made is not None
    for token_id in tokenizer.encode_batch(["<思考>x</思考终了>yes"], False)[0]:
        assert made.accept(token_id) is None
    assert made.progress() == "closed"


@pytest.mark.parametrize(("token", "before"), [(">maybe", "x</think"), ("x</think>maybe", "")])
def test_a_token_cannot_end_the_thoughts_and_begin_the_answer_which_it_may_not_fit(
    tmp_path: Path, token: str, before: str
) -> None:
    added = {"900": {"content": token, "special": False}, "901": {"content": "> \n", "special": False}}
    tokenizer = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path, {"added_tokens_decoder": added}))
    [both, *others] = tokenizer.encode_batch([token, "> \n", ">"], False)
    made = constraint(tokenizer, 30, prompt="<think>")
    for token_id in tokenizer.encode_batch([f"x{token[:3]} y{before}"], False)[0]:
        assert made.accept(token_id) is None
    allowed = allowed_tokens(made, tokenizer.vocab_size)
    assert allowed is not None and not set(both) & set(allowed)
    assert {token_id for ids in others for token_id in ids} <= set(allowed), "the rest of the marker, and white space"


def test_a_token_like_the_last_of_a_marker_may_stand_in_thoughts(tmp_path: Path) -> None:
    added = {"900": {"content": ">maybe", "special": False}}
    tokenizer = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path, {"added_tokens_decoder": added}))
    made = constraint(tokenizer, 30, prompt="<think>")
    assert set(tokenizer.encode_batch([">maybe"], False)[0]) <= set(allowed_tokens(made, tokenizer.vocab_size) or ())


def test_an_output_without_thoughts_is_free_without_a_grammar(tokenizer: Tokenizer) -> None:
    made = constraint(tokenizer, 1, structured=None)
    for token_id in tokenizer.encode_batch(["xx <think> yy zz"], False)[0]:
        assert allowed_tokens(made, tokenizer.vocab_size) is None
        assert made.accept(token_id) is None


def test_thoughts_without_budget_or_grammar_need_no_constraint(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(thinking=Thinking("<think>", "</think>"))
    assert token_constraint_factory(tokenizer)(sampling) is None


def test_a_marker_that_the_tokenizer_cannot_write_is_refused(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "think": 1}, unk_token="<unk>"))
    tokenizer = Tokenizer.from_dir(small_tokenizers.save(tmp_path, words, {}))
    with pytest.raises(ValueError, match="cannot write the marker 'done'"):
        ThinkingMarkers(tokenizer, "think", "done")


def test_the_budget_of_a_channel_ends_with_the_whole_beginning_of_the_answer(tmp_path: Path) -> None:
    """gpt-oss's markers: special tokens with words between them."""
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")
    decoder = {str(200_005 + i): {"content": text, "special": True} for i, text in enumerate(special)}
    channels = Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path, {"added_tokens_decoder": decoder}))
    start, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
    ids = lambda text: channels.encode_batch([text], False)[0]  # noqa: E731
    for structured in (None, CHOICE):
        sampling = SamplingParams(structured_outputs=structured, thinking=Thinking(start, end, 3))
        made = token_constraint_factory(channels)(sampling, ids("<|start|>user<|message|>hi<|end|><|start|>assistant"))
        assert made is not None
        assert [made.accept(token_id) for token_id in [*ids(start), *ids("xxx")[:1] * 3]] == [None] * (
            len(ids(start)) + 3
        )
        for token_id in ids(end):
            assert allowed_tokens(made, channels.vocab_size) == list(made.forced_tokens()) == [token_id]
            assert made.accept(token_id) is None
        assert (allowed_tokens(made, channels.vocab_size) is None) == (structured is None)


def test_markers_beyond_the_models_vocabulary_are_allowed_to_nobody(tokenizer: Tokenizer) -> None:
    """A tokenizer may have more tokens than its model: then nothing may come next, which fails this row alone."""
    made = constraint(tokenizer, 1, prompt="<think>")
    assert made.accept(0) is None
    mask = memoryview(bytearray(4)).cast("i")
    assert made.fill_mask(mask)
    [forced] = made.forced_tokens()
    assert mask[0] & 0xFFFFFFFF == (1 << forced if forced < 32 else 0)


def test_thoughts_that_end_in_the_token_that_begins_them_are_over(tmp_path: Path) -> None:
    texts = ["f() g() h()"] * 20
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer = Tokenizer.from_dir(small_tokenizers.save(tmp_path, backend, {}))
    both = backend.token_to_id("()")
    assert both is not None
    sampling = SamplingParams(thinking=Thinking("(", ")", 2))
    made = token_constraint_factory(tokenizer)(sampling, tokenizer.encode_batch(["f"], False)[0])
    assert made is not None and made.accept(both) is None
    for token_id in tokenizer.encode_batch(["ghfgh"], False)[0]:
        assert allowed_tokens(made, tokenizer.vocab_size) is None, "nothing binds the answer"
        assert made.accept(token_id) is None

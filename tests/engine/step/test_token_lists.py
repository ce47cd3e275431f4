"""`bad_words` and `allowed_token_ids` in the running engine: against transformers, in every traffic, at their ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.request import Completion, Request, SamplingParams, StructuredOutput
from bulkrun.text.token_lists import ListedTokens, TokenLists
from tests.engine.conftest import EngineFactory, expect_short_outputs, generate_with_transformers, run
from tests.engine.step.test_token_masks import PROMPT, STEPS, _prompts
from tests.engine.test_async_scheduling import _step_until_done
from tests.engine.test_forced_tokens import Forcing, traffic_sizes
from tests.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_model

MAX_TOKENS = 14


def lists_factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> ListedTokens:
    """A word is written as its token ids: "5 17"."""
    words = [[int(token_id) for token_id in word.split()] for word in sampling.bad_words]
    structured = sampling.structured_outputs
    inner = None if structured is None else Forcing(json.loads(structured.value))
    return ListedTokens(TokenLists(words, sampling.allowed_token_ids), inner)


def _greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True} | changes))


def _by_transformers(prompt: Sequence[int], words: Sequence[Sequence[int]] = (), **options: Any) -> list[int]:
    """Transformers finds words in the prompt's last tokens too; these prompts hold none of them."""
    bad = {"bad_words_ids": [list(word) for word in words]} if words else {}
    return generate_with_transformers("llama", prompt, MAX_TOKENS, eos_token_id=None, **bad, **options)


def _as_text(words: Sequence[Sequence[int]]) -> list[str]:
    return [" ".join(map(str, word)) for word in words]


def _words_of(prompt: Sequence[int]) -> list[list[int]]:
    """Words that the model would write: found one after another, so that each matters."""
    words: list[list[int]] = []
    for place, length in ((3, 2), (1, 1), (6, 3), (9, 2), (11, 4)):
        output = _by_transformers(prompt, words)
        words.append(output[place : place + length])
    return words


ONLY = [4, 9, 31, 32, 63, 64, 99, 127, 130]


@pytest.fixture(scope="module")
def expected() -> list[tuple[SamplingParams, list[int]]]:
    """For each prompt its sampling and its output: words, a list of tokens, both, and nothing at all, in turn."""
    made = []
    for number, prompt in enumerate(_prompts()):
        words = _words_of(prompt) if number % 4 in (0, 2) else []
        only = ONLY if number % 4 in (1, 2) else None
        options = {} if only is None else {"prefix_allowed_tokens_fn": lambda *_: ONLY}
        sampling = _greedy(bad_words=_as_text(words), allowed_token_ids=only)
        made.append((sampling, _by_transformers(prompt, words, **options)))
    return made


def _requests(expected: Sequence[tuple[SamplingParams, list[int]]], num_saved: int = 0, **given: Any) -> list[Request]:
    return [
        Request(str(n), prompt, sampling, output_token_ids=tuple(output[:num_saved]), **given)
        for n, (prompt, (sampling, output)) in enumerate(zip(_prompts(), expected, strict=True))
    ]


def _tokens(done: dict[str, Completion]) -> list[list[int]]:
    assert all(one.error is None and one.finish_reason == "length" for one in done.values())
    return [list(done[str(n)].token_ids) for n in range(len(done))]


@pytest.mark.parametrize(
    "sizes", [{}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}, {"async_scheduling": True}]
)
def test_greedy_equals_transformers_alone_and_in_a_crowd(
    make_engine: EngineFactory, expected: list[tuple[SamplingParams, list[int]]], sizes: dict[str, Any]
) -> None:
    outputs = [output for _, output in expected]
    assert outputs[0] != _by_transformers(_prompts()[0]), "the words would have come"
    assert _tokens(run(make_engine(constraint_factory=lists_factory, **sizes), _requests(expected))) == outputs


@pytest.mark.parametrize("num_saved", [1, 2, 5, 13])
def test_saved_tokens_count(
    make_engine: EngineFactory, expected: list[tuple[SamplingParams, list[int]]], num_saved: int
) -> None:
    engine = make_engine(constraint_factory=lists_factory, async_scheduling=True)
    assert _tokens(run(engine, _requests(expected, num_saved))) == [output for _, output in expected]


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_equals_transformers(
    make_engine: EngineFactory, expected: list[tuple[SamplingParams, list[int]]], is_async: bool
) -> None:
    sizes = {"max_model_len": 64, "kv_cache_memory_bytes": 40_000, "enable_prefix_caching": False}
    engine = make_engine(constraint_factory=lists_factory, async_scheduling=is_async, **sizes)
    first, urgent = _requests(expected)[:3], [replace(one, priority=-1) for one in _requests(expected)[3:]]
    for request in first:
        engine.add_request(request)
    for _ in range(5):
        assert engine.step() == []
    for request in urgent:
        engine.add_request(request)
    assert _tokens(_step_until_done(engine)) == [output for _, output in expected]
    assert engine.stats().num_preemptions > 0


def test_no_word_is_ever_drawn_and_noise_does_not_depend_on_the_crowd(make_engine: EngineFactory) -> None:
    words = [[7], [5, 9], [9, 5, 4], [4, 4]]
    params = SamplingParams(
        max_tokens=40,
        temperature=1.8,
        ignore_eos=True,
        bad_words=_as_text(words),
        allowed_token_ids=[4, 5, 7, 9],  # so few that words would come all the time
        top_p=0.95,
        repetition_penalty=1.1,
    )
    requests = [Request(str(seed), PROMPT, params, seed=seed) for seed in range(24)]
    crowd = run(make_engine(constraint_factory=lists_factory, async_scheduling=True), requests)
    for done in crowd.values():
        text = f" {' '.join(map(str, done.token_ids))} "
        assert set(done.token_ids) <= {4, 5, 9} and len(done.token_ids) == 40
        assert not any(f" {word} " in text for word in _as_text(words))
    assert len({done.token_ids for done in crowd.values()}) == 24
    for request in requests[:3]:
        alone = run(make_engine(constraint_factory=lists_factory, max_num_seqs=1), [request])
        assert alone[request.request_id].token_ids == crowd[request.request_id].token_ids


@torch.no_grad()
def test_log_probabilities_are_raw_ones_or_those_over_what_is_left(make_engine: EngineFactory) -> None:
    raw, over = (
        Request(over, PROMPT, _greedy(allowed_token_ids=ONLY, bad_words=["99"], logprobs=20, logprobs_over=over))
        for over in ("vocabulary", "allowed")
    )
    done = run(make_engine(constraint_factory=lists_factory), [raw, over])
    left = [token_id for token_id in ONLY if token_id != 99]
    assert done["vocabulary"].token_ids == done["allowed"].token_ids
    for index, token_id in enumerate(done["allowed"].token_ids):
        tokens = torch.tensor([[*PROMPT, *done["allowed"].token_ids[:index]]])
        logits = make_tiny_model("llama")(tokens).logits[0, -1]
        entries = [(done[name].logprobs or ())[index] for name in ("vocabulary", "allowed")]
        assert entries[0].logprob == pytest.approx(logits.log_softmax(-1)[token_id].item(), abs=1e-4)
        want = dict(zip(left, logits[left].log_softmax(-1).tolist(), strict=True))
        assert dict(entries[1].top) == pytest.approx(want, abs=1e-4)


def test_an_end_comes_only_where_it_is_allowed_and_not_before_its_time(make_engine: EngineFactory) -> None:
    only, both = [EOS_TOKEN_ID], [EOS_TOKEN_ID, 9]
    bias = {EOS_TOKEN_ID: 100.0}
    requests = [
        Request("never", PROMPT, _greedy(ignore_eos=False, allowed_token_ids=[9])),
        Request("at once", PROMPT, _greedy(ignore_eos=False, allowed_token_ids=both, logit_bias=bias)),
        Request("late", PROMPT, _greedy(ignore_eos=False, allowed_token_ids=both, logit_bias=bias, min_tokens=3)),
        Request("nothing else", PROMPT, _greedy(ignore_eos=False, allowed_token_ids=only, min_tokens=3)),
        Request("forbidden", PROMPT, _greedy(ignore_eos=False, bad_words=[str(EOS_TOKEN_ID)])),
        Request("stop", PROMPT, _greedy(allowed_token_ids=[9], stop_token_ids=[9])),
    ]
    done = run(make_engine(constraint_factory=lists_factory), requests)
    assert {name: (one.finish_reason, one.stop_reason, len(one.token_ids)) for name, one in done.items()} == {
        "never": ("length", None, MAX_TOKENS),
        "at once": ("stop", None, 0),
        "late": ("stop", None, 3),
        "nothing else": ("stop", None, 0),
        "forbidden": ("length", None, MAX_TOKENS),
        "stop": ("stop", 9, 0),
    }


@pytest.mark.parametrize("is_async", [False, True])
def test_where_nothing_is_left_the_row_says_so_and_keeps_its_tokens(make_engine: EngineFactory, is_async: bool) -> None:
    """trap vLLM 57986: a token outside the list was drawn where the words took all of it away."""
    grammar = StructuredOutput("grammar", json.dumps(STEPS))
    requests = [
        Request("words", PROMPT, _greedy(allowed_token_ids=[5, 9], bad_words=["5", "9 9"])),
        Request("drawn", PROMPT, _greedy(temperature=1.0, allowed_token_ids=[9], bad_words=["9 9 9"])),
        Request("grammar", PROMPT, _greedy(ignore_eos=False, structured_outputs=grammar, bad_words=["101"])),
        Request("end", PROMPT, _greedy(ignore_eos=False, structured_outputs=grammar, allowed_token_ids=range(3, 131))),
        Request("fine", PROMPT, _greedy(allowed_token_ids=[9])),
    ]
    done = run(make_engine(constraint_factory=lists_factory, async_scheduling=is_async), requests)
    assert done.pop("fine").token_ids == (9,) * MAX_TOKENS
    codes = {name: one.error.code if one.error else None for name, one in done.items()}
    assert codes == dict.fromkeys(("words", "drawn", "grammar", "end"), "grammar_failed")
    assert {name: len(one.token_ids) for name, one in done.items()} == {"words": 1, "drawn": 2, "grammar": 3, "end": 6}
    messages = {name: one.error.message for name, one in done.items() if one.error}
    assert messages["words"].startswith("sampling.bad_words and allowed_token_ids: no token is left")
    assert messages["grammar"].startswith("sampling.structured_outputs and bad_words: no token is left")
    assert messages["end"].startswith("sampling.structured_outputs and allowed_token_ids: no token is left")


def test_an_id_that_the_model_lacks_is_bad_input(make_engine: EngineFactory) -> None:
    request = Request("r", PROMPT, _greedy(allowed_token_ids=[5, VOCAB_SIZE]))
    error = run(make_engine(constraint_factory=lists_factory), [request])["r"].error
    assert error is not None and error.code == "bad_input"
    assert error.message.startswith(f"sampling.allowed_token_ids has token id {VOCAB_SIZE}; the model's ids go from 0")


@st.composite
def _any_request(draw: st.DrawFn, number: int) -> Request:
    few = draw(st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=2, max_size=4, unique=True))
    word = st.lists(st.sampled_from(few), min_size=1, max_size=3)
    steps = draw(st.lists(st.lists(st.sampled_from(few), min_size=1, max_size=3, unique=True), max_size=8))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 14)),
        temperature=draw(st.sampled_from([0.0, 0.9])),
        min_tokens=draw(st.sampled_from([0, 1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        bad_words=_as_text(draw(st.lists(word, max_size=3))),
        allowed_token_ids=draw(st.sampled_from([None, few, [EOS_TOKEN_ID, *few]])),
        structured_outputs=draw(st.sampled_from([None, StructuredOutput("grammar", json.dumps(steps))])),
    )
    prompt = _prompts()[draw(st.integers(0, 7))]
    return Request(str(number), prompt, params, seed=number, priority=draw(st.integers(-1, 1)))


@settings(max_examples=60)
@given(data=st.data())
def test_any_traffic_gives_what_each_gives_alone(make_engine: EngineFactory, data: st.DataObject) -> None:
    """Priorities, chunks, saved tokens, a pool too small for everybody, steps that are launched ahead."""
    sizes = traffic_sizes(data)
    requests = [data.draw(_any_request(n)) for n in range(data.draw(st.integers(1, 8)))]
    slow = make_engine(constraint_factory=lists_factory, max_num_seqs=1)
    expected = {name: (c.token_ids, c.finish_reason, c.error) for name, c in run(slow, requests).items()}
    engine = make_engine(constraint_factory=lists_factory, **sizes)
    expect_short_outputs(engine.scheduler)
    done: dict[str, Completion] = {}
    for request in requests:
        engine.add_request(request)
        for _ in range(data.draw(st.integers(0, 3))):
            done |= {completion.request_id: completion for completion in engine.step()}
    if data.draw(st.booleans()):  # killed, and resumed with the tokens that were saved
        saved = {partial.request_id: partial.token_ids for partial in engine.partial_outputs()}
        engine.abort([request.request_id for request in requests])
        for r in [request for request in requests if request.request_id not in done]:
            given = saved.get(r.request_id, ())
            engine.add_request(Request(r.request_id, r.prompt_token_ids, r.sampling, r.seed, given, r.priority))
    done |= _step_until_done(engine)
    assert {name: (c.token_ids, c.finish_reason, c.error) for name, c in done.items()} == expected

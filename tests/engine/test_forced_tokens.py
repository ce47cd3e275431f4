"""Tokens that a constraint leaves no choice about: the same outputs in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.request import Completion, Request, SamplingParams, StructuredOutput
from tests.engine.conftest import EngineFactory, expect_short_outputs, run
from tests.engine.step.test_token_masks import (
    Steps,
    _constrained_by_transformers,
    _grammar,
    _plain,
    _prompts,
    steps_factory,
)
from tests.engine.test_async_scheduling import _step_until_done
from tests.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

# Like JSON: long texts that have to follow, a few choices between them, the last one before the end.
STEPS = [[50], [51], *[[60 + n] for n in range(9)], [7, 8, 9, 10], [70], [71], [72], list(range(40, 120)), [80]]


class Forcing(Steps):
    """Says what the masks would allow alone."""

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        for allowed in self.steps[self.position :]:
            if len(allowed) > 1:
                break
            forced += allowed
        return forced


def forcing_factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> Forcing:
    assert sampling.structured_outputs is not None, "no other request needs a constraint"
    return Forcing(json.loads(sampling.structured_outputs.value))


def _requests(num: int = 8, **changes: Any) -> list[Request]:
    params = [_grammar(STEPS, max_tokens=30, **changes), _plain()]
    return [Request(str(n), prompt, params[n % 2], seed=n) for n, prompt in enumerate(_prompts()[:num])]


def _said(done: dict[str, Completion]) -> dict[str, Any]:
    return {
        name: (c.token_ids, c.finish_reason, c.stop_reason, c.num_output_tokens, c.error) for name, c in done.items()
    }


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("is_async", [False, True])
def test_greedy_equals_transformers_in_fewer_steps(make_engine: EngineFactory, is_async: bool, block_size: int) -> None:
    sizes = {"async_scheduling": is_async, "block_size": block_size}
    requests = [Request(str(n), prompt, _grammar(STEPS, max_tokens=30)) for n, prompt in enumerate(_prompts())]
    engine, slow = (make_engine(constraint_factory=make, **sizes) for make in (forcing_factory, steps_factory))
    done = run(engine, requests)
    for n, prompt in enumerate(_prompts()):
        assert list(done[str(n)].token_ids) == _constrained_by_transformers(prompt, STEPS, max_tokens=30)
    assert _said(done) == _said(run(slow, requests))
    fast, stats = engine.stats(), slow.stats()
    assert fast.num_output_tokens == stats.num_output_tokens == len(requests) * (len(STEPS) + 1)
    assert stats.num_forced_tokens == 0
    if block_size == 16:  # smaller ones take a long text in pieces
        num_choices = 2  # of each; the end is forced too
        assert fast.num_forced_tokens == len(requests) * (len(STEPS) + 1 - num_choices)
        # launched ahead, a step computes what was chosen before the text behind that is known
        assert fast.num_steps == (2 * num_choices if is_async else num_choices)


def test_an_output_without_a_choice_needs_no_step(make_engine: EngineFactory) -> None:
    engine = make_engine(constraint_factory=forcing_factory)
    requests = [
        Request("whole", [5, 6], _grammar([[30], [31]])),
        Request("cut", [5, 6], _grammar([[30], [31], [32]], max_tokens=2)),
        Request("stopped", [5, 6], _grammar([[30], [31], [32]], stop_token_ids=(31,))),
        Request("saved", [5, 6], _grammar([[30], [31]]), output_token_ids=(30,)),
    ]
    done = run(engine, requests)
    assert engine.stats().num_steps == 0
    assert _said(done) == _said(run(make_engine(constraint_factory=steps_factory), requests))
    assert done["whole"].token_ids == done["saved"].token_ids == (30, 31)
    assert done["stopped"].stop_reason == 31
    assert engine.stats().num_forced_tokens == 3 + 2 + 2 + 2


@pytest.mark.parametrize("wanted", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_computed_for_every_token(make_engine: EngineFactory, wanted: str) -> None:
    engine = make_engine(constraint_factory=forcing_factory)
    done = run(engine, _requests(**{wanted: 1}))
    expected = run(make_engine(constraint_factory=steps_factory), _requests(**{wanted: 1}))
    assert engine.stats().num_forced_tokens == 0
    for name, one in done.items():
        assert (one.token_ids, getattr(one, wanted)) == (expected[name].token_ids, getattr(expected[name], wanted))


def test_a_token_that_the_model_does_not_have_is_a_failed_grammar(make_engine: EngineFactory) -> None:
    steps = [[30], [VOCAB_SIZE], [31]]
    request = Request("r", [5, 6], _grammar(steps))
    completion = run(make_engine(constraint_factory=forcing_factory), [request])["r"]
    assert completion.error is not None
    assert completion.error.code == "grammar_failed"
    assert completion.token_ids == (30,)


def test_a_grammar_that_fails_in_a_forced_text_ends_its_row_only(make_engine: EngineFactory) -> None:
    class Fails(Forcing):
        def accept(self, token_id: int) -> str | None:
            return "no way on" if token_id == 64 and self.position > 3 else super().accept(token_id)

    def factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> Forcing:
        return Fails(STEPS) if sampling.max_tokens == 29 else forcing_factory(sampling)

    bad = Request("bad", [5, 6], _grammar(STEPS, max_tokens=29))
    done = run(make_engine(constraint_factory=factory), [bad, *_requests()])
    assert done.pop("bad").error == ("grammar_failed", "no way on")
    assert _said(done) == _said(run(make_engine(constraint_factory=steps_factory), _requests()))


def test_an_interrupted_step_loses_no_forced_token(make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_async in (False, True):
        engine = make_engine(constraint_factory=forcing_factory, async_scheduling=is_async)
        for request in _requests():
            engine.add_request(request)
        sample, calls = engine.model_runner.sample, []

        def interrupted(*args: Any, sample: Any = sample, calls: list[int] = calls) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return sample(*args)

        monkeypatch.setattr(engine.model_runner, "sample", interrupted)
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert _said(_step_until_done(engine)) == _said(run(make_engine(constraint_factory=steps_factory), _requests()))


ALLOWED = st.one_of(
    st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=1),
    st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=2, max_size=6, unique=True),
)


@st.composite
def _any_request(draw: st.DrawFn, number: int) -> Request:
    steps = draw(st.lists(ALLOWED, min_size=1, max_size=14))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 16)),
        temperature=draw(st.sampled_from([0.0, 0.8])),
        min_tokens=draw(st.sampled_from([0, 1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (steps[-1][0],), (EOS_TOKEN_ID,)])),
        structured_outputs=draw(st.sampled_from([StructuredOutput("grammar", json.dumps(steps))] * 3 + [None])),
    )
    prompt = _prompts()[draw(st.integers(0, 7))]
    return Request(str(number), prompt, params, seed=number, priority=draw(st.integers(-1, 1)))


def traffic_sizes(data: st.DataObject) -> dict[str, Any]:
    """Settings under which traffic is chunked, preempted, shared and launched ahead, or not."""
    return {
        "async_scheduling": data.draw(st.booleans()),
        "max_num_seqs": data.draw(st.integers(1, 6)),
        "max_num_batched_tokens": data.draw(st.integers(6, 60)),
        "max_model_len": 64,
        "kv_cache_memory_bytes": data.draw(st.sampled_from([70_000, 110_000, 8 * 2**20])),
        "enable_prefix_caching": data.draw(st.booleans()),
        "block_size": data.draw(st.sampled_from([1, 2, 4, 16])),
    }


@settings(max_examples=80)
@given(data=st.data())
def test_any_traffic_has_the_tokens_that_masks_give(make_engine: EngineFactory, data: st.DataObject) -> None:
    """Priorities, chunks, saved tokens, a pool too small for everybody, steps that are launched ahead."""
    sizes = traffic_sizes(data)
    requests = [data.draw(_any_request(n)) for n in range(data.draw(st.integers(1, 10)))]
    expected = _said(run(make_engine(constraint_factory=steps_factory), requests))
    engine = make_engine(constraint_factory=forcing_factory, **sizes)
    expect_short_outputs(engine.scheduler)
    done: dict[str, Completion] = {}
    for request in requests:
        engine.add_request(request)
        for _ in range(data.draw(st.integers(0, 3))):
            done |= {completion.request_id: completion for completion in engine.step()}
    if data.draw(st.booleans()):  # killed, and resumed with the tokens that were saved
        saved = {partial.request_id: partial.token_ids for partial in engine.partial_outputs()}
        engine.abort([request.request_id for request in requests])
        left = [request for request in requests if request.request_id not in done]
        for request in left:
            given = saved.get(request.request_id, ())
            params, prompt = request.sampling, request.prompt_token_ids
            engine.add_request(Request(request.request_id, prompt, params, request.seed, given, request.priority))
    done |= _step_until_done(engine)
    assert _said(done) == expected
    assert engine.stats().kv_cache_usage == 0

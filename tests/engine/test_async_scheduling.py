"""A step launched before the last one's tokens are known must change nothing but when they are seen.

That every family has its tokens then is asked in test_llm_engine.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.request import Completion, Request, SamplingParams
from tests.engine.conftest import EngineFactory, generate_with_transformers, run
from tests.engine.step.test_token_masks import STEPS, Steps, _constrained_by_transformers, _grammar, steps_factory
from tests.models.tiny_models import VOCAB_SIZE

MAX_TOKENS = 17
PROMPTS = [[(7 * n + 5 * k * k) % (VOCAB_SIZE - 3) + 3 for k in range(1 + 5 * n)] for n in range(9)]
SHARED = [[*PROMPTS[4], n + 3, n + 9] for n in range(4)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What transformers generates for each prompt; the tokens after the fifth one of some are never wanted."""
    return {
        str(n): generate_with_transformers("llama", prompt, MAX_TOKENS, eos_token_id=None)
        for n, prompt in enumerate(PROMPTS + SHARED)
    }


def _request(number: int, expected: dict[str, list[int]], *, priority: int = 0) -> Request:
    """Every third one ends with a stop token that only the host can see."""
    stop = (expected[str(number)][5],) if number % 3 == 0 else ()
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, stop_token_ids=stop)
    return Request(str(number), (PROMPTS + SHARED)[number], params, priority=priority)


def _wanted(number: int, expected: dict[str, list[int]]) -> tuple[int, ...]:
    tokens = expected[str(number)]
    return tuple(tokens[: tokens.index(tokens[5])] if number % 3 == 0 else tokens)


def _step_until_done(engine: LLMEngine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.has_unfinished():
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


@settings(max_examples=60)
@given(data=st.data())
def test_any_traffic_equals_transformers(
    make_engine: EngineFactory, expected: dict[str, list[int]], data: st.DataObject
) -> None:
    """Arrivals, priorities, aborts, chunks, a pool too small for everybody: who ends, ends with the right tokens."""
    engine = make_engine(
        async_scheduling=True,
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(6, 60)),
        max_model_len=64,
        kv_cache_memory_bytes=data.draw(st.sampled_from([70_000, 110_000, 8 * 2**20])),
        enable_prefix_caching=data.draw(st.booleans()),
    )
    numbers = data.draw(st.lists(st.integers(0, len(PROMPTS + SHARED) - 1), unique=True, min_size=1))
    aborted, done = set(), {}
    for number in numbers:
        engine.add_request(_request(number, expected, priority=data.draw(st.integers(-1, 1))))
        for _ in range(data.draw(st.integers(0, 4))):
            done |= {completion.request_id: completion for completion in engine.step()}
        if data.draw(st.integers(0, 5)) == 0:
            aborted.add(str(number))
            engine.abort([str(number)])
    done |= _step_until_done(engine)
    assert {int(name): done[name].token_ids for name in done} == {
        n: _wanted(n, expected) for n in numbers if str(n) not in aborted or str(n) in done
    }
    assert engine.stats().kv_cache_usage == 0


def test_preempted_with_a_token_under_way_equals_transformers(
    make_engine: EngineFactory, expected: dict[str, list[int]]
) -> None:
    """Two give way at once, and the small one would fit again in the very step that still computes its token."""
    block_bytes = 1536  # 3 layers, 4 tokens, 2 heads of 8 numbers, keys and values, float32
    pool = {"kv_cache_memory_bytes": 23 * block_bytes, "max_model_len": 64}
    engine = make_engine(async_scheduling=True, max_num_seqs=3, **pool)
    small, big, urgent = (_request(number, expected, priority=1 - number // 8) for number in (1, 5, 8))
    for request in (small, big):
        engine.add_request(request)
    engine.step()
    engine.add_request(urgent)
    done = _step_until_done(engine)
    assert (engine.config.num_blocks, engine.stats().num_preemptions) == (23, 2)
    assert {int(name): done[name].token_ids for name in done} == {n: _wanted(n, expected) for n in (1, 5, 8)}


def test_an_end_by_length_costs_no_step(make_engine: EngineFactory) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    engine = make_engine(async_scheduling=True)
    run(engine, [Request(str(n), prompt, params) for n, prompt in enumerate(PROMPTS)])
    assert engine.stats().num_steps == MAX_TOKENS
    assert engine.stats().num_output_tokens == MAX_TOKENS * len(PROMPTS)


def test_what_is_computed_beyond_an_end_is_not_counted(
    make_engine: EngineFactory, expected: dict[str, list[int]]
) -> None:
    engine = make_engine(async_scheduling=True)
    done = run(engine, [_request(n, expected) for n in (0, 3, 6)])
    assert engine.stats().num_output_tokens == sum(one.num_output_tokens for one in done.values())


def test_a_completion_comes_one_step_later_and_partial_outputs_have_only_what_is_known(
    make_engine: EngineFactory,
) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine = make_engine(async_scheduling=True)
    engine.add_request(Request("one", PROMPTS[3], params))
    assert (engine.step(), engine.partial_outputs()) == ([], [])
    assert engine.step() == []
    assert [len(partial.token_ids) for partial in engine.partial_outputs()] == [1]
    assert engine.has_unfinished()
    assert [len(completion.token_ids) for completion in engine.step()] == [2]
    assert not engine.has_unfinished()


def test_a_grammar_sees_every_token_before_the_next_one_is_chosen(make_engine: EngineFactory) -> None:
    engine = make_engine(async_scheduling=True, constraint_factory=steps_factory)
    free = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    requests = [Request(f"bound{n}", prompt, _grammar()) for n, prompt in enumerate(PROMPTS[:4])]
    requests += [Request(f"free{n}", prompt, free) for n, prompt in enumerate(PROMPTS[:4])]
    done = run(engine, requests)
    for n, prompt in enumerate(PROMPTS[:4]):
        assert list(done[f"bound{n}"].token_ids) == _constrained_by_transformers(prompt)
        assert list(done[f"free{n}"].token_ids) == generate_with_transformers("llama", prompt, 9, eos_token_id=None)


def test_the_next_forward_pass_begins_before_a_grammar_has_seen_the_last_token(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the choice of a token waits for the one before; the device does not."""
    events: list[str] = []

    class Told(Steps):
        def accept(self, token_id: int) -> str | None:
            events.append("accept")
            return super().accept(token_id)

        def fill_mask(self, mask: memoryview) -> bool:
            events.append("mask")
            return super().fill_mask(mask)

    engine = make_engine(async_scheduling=True, constraint_factory=lambda *_: Told(STEPS))
    forward = engine.model_runner.model.forward

    def told_forward(*args: torch.Tensor) -> torch.Tensor:
        events.append("forward")
        return forward(*args)

    monkeypatch.setattr(engine.model_runner.model, "forward", told_forward)
    done = run(engine, [Request("bound", PROMPTS[3], _grammar())])
    assert list(done["bound"].token_ids) == _constrained_by_transformers(PROMPTS[3])
    of_each_token = ["forward", "accept", "mask"]
    first_two, rest = events[:4], events[4:]
    assert first_two in (["mask", "forward", "forward", "accept"], ["forward", "mask", "forward", "accept"])
    assert rest[0] == "mask"
    num_tokens = len(STEPS) + 1
    assert rest[1:] == of_each_token * (num_tokens - 2) + ["forward", "accept"]


def test_a_grammar_that_fails_while_the_next_step_computes_ends_its_row_only(make_engine: EngineFactory) -> None:
    """Rows with and without penalties and least lengths go on beside it, as if it had never been there."""

    class Fails(Steps):
        def accept(self, token_id: int) -> str | None:
            return "no way on" if self.position == 2 else super().accept(token_id)

    def factory(sampling: SamplingParams, prompt_token_ids: object = ()) -> Steps:
        return Fails(STEPS) if sampling.max_tokens == 11 else Steps(STEPS)

    params = SamplingParams(max_tokens=9, temperature=0.8, ignore_eos=True, repetition_penalty=1.2, min_tokens=4)
    beside = [Request(f"free{n}", PROMPTS[n], params, seed=n) for n in range(3)]
    beside += [Request(f"bound{n}", PROMPTS[n], _grammar(repetition_penalty=1.1)) for n in range(3)]
    failing = Request("fails", PROMPTS[5], _grammar(max_tokens=11, repetition_penalty=1.1))
    alone = run(make_engine(async_scheduling=True, constraint_factory=factory), beside)
    together = run(make_engine(async_scheduling=True, constraint_factory=factory), [failing, *beside])
    error = together.pop("fails").error
    assert error == ("grammar_failed", "no way on")
    assert {name: one.token_ids for name, one in together.items()} == {n: one.token_ids for n, one in alone.items()}

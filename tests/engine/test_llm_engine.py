"""The engine's tokens against transformers, and against themselves under every way of batching."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bulkrun.request import Completion, RepetitionStop, Request, SamplingParams, Thinking
from tests.engine.conftest import EngineFactory, expect_short_outputs, generate_with_transformers, is_greedy, run
from tests.engine.step.test_token_masks import steps_factory
from tests.engine.test_families import NAMES as IN_OTHER_WAYS_TOO
from tests.models.tiny_models import VARIANTS, VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=21, temperature=0.9, ignore_eos=True)


def _prompts(count: int = 13, longest: int = 45, *, seed: int = 0) -> list[list[int]]:
    """Odd lengths; every third prompt shares its first tokens with others."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(19)]
    prompts = []
    for number in range(count):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, longest))]
        prompts.append([*shared, *own] if number % 3 == 0 else own)
    return prompts


def _requests(params: SamplingParams, prompts: list[list[int]] | None = None) -> list[Request]:
    prompts = _prompts() if prompts is None else prompts
    return [Request(f"r{i}", prompt, params, seed=1000 + i) for i, prompt in enumerate(prompts)]


def _tokens(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {request_id: completion.token_ids for request_id, completion in completions.items()}


@pytest.mark.parametrize(
    "variant", [*(name for name in VARIANTS if name not in IN_OTHER_WAYS_TOO), "gemma2", "qwen3_5"]
)
def test_greedy_tokens_equal_transformers(make_engine: EngineFactory, variant: str) -> None:
    """Whether a step waits for the tokens of the one before it or is launched ahead of them. The longest prompt's are
    generated, the others' are told to be those that would be."""
    requests = _requests(GREEDY, _prompts(5, 37))
    found = [
        run(make_engine(variant, max_num_batched_tokens=29, max_num_seqs=4, async_scheduling=is_ahead), requests)
        for is_ahead in (False, True)
    ]
    longest = max(requests, key=lambda request: len(request.prompt_token_ids))
    expected = generate_with_transformers(variant, longest.prompt_token_ids, 21, eos_token_id=None)
    assert list(found[0][longest.request_id].token_ids) == expected
    for request in requests:
        [tokens, tokens_ahead] = [done[request.request_id].token_ids for done in found]
        assert len(tokens) == 21 and tokens == tokens_ahead, request.request_id
        assert is_greedy(variant, tuple(request.prompt_token_ids), tokens), request.request_id


@pytest.fixture(scope="module", params=[GREEDY, RANDOM], ids=["greedy", "sampled"])
def alone(
    request: pytest.FixtureRequest, make_engine: EngineFactory
) -> tuple[SamplingParams, dict[str, tuple[int, ...]]]:
    """Tokens of each request when nothing else runs, nothing is cached and prompts are not chunked."""
    tokens = {}
    for one in _requests(request.param):
        engine = make_engine(max_num_seqs=1, max_num_batched_tokens=500, enable_prefix_caching=False)
        tokens |= _tokens(run(engine, [one]))
    return request.param, tokens


def test_alone_equals_in_a_crowd(make_engine: EngineFactory, alone) -> None:
    params, expected = alone
    completions = run(make_engine(max_num_batched_tokens=500, enable_prefix_caching=False), _requests(params))
    assert _tokens(completions) == expected


def test_alone_equals_chunked(make_engine: EngineFactory, alone) -> None:
    params, expected = alone
    engine = make_engine(max_num_seqs=5, max_num_batched_tokens=7, enable_prefix_caching=False)
    assert _tokens(run(engine, _requests(params))) == expected


def test_alone_equals_preempted(make_engine: EngineFactory, alone) -> None:
    params, expected = alone
    params = SamplingParams(max_tokens=21, temperature=params.temperature)  # could stop, so admission dares more
    for caching in (False, True):
        engine = make_engine(enable_prefix_caching=caching, max_model_len=90, kv_cache_memory_bytes=110_000)
        engine._sequences.eos_token_ids = frozenset([VOCAB_SIZE + 1])
        expect_short_outputs(engine.scheduler)
        requests = [Request(r.request_id, r.prompt_token_ids, params, seed=r.seed) for r in _requests(params)]
        completions = run(engine, requests)
        assert engine.stats().num_preemptions > 0
        assert _tokens(completions) == expected


def test_alone_equals_prefix_cached(make_engine: EngineFactory, alone) -> None:
    """Prefixes shared in one step, while they are computed, and with finished sequences."""
    params, expected = alone
    engine = make_engine(max_num_batched_tokens=70)
    first = run(engine, _requests(params))
    assert engine.stats().num_cached_tokens > 0
    again = run(engine, _requests(params))
    assert _tokens(first) == _tokens(again) == expected
    assert all(again[r.request_id].num_cached_tokens >= len(r.prompt_token_ids) - 4 for r in _requests(params))


def test_prefix_is_shared_within_the_very_step_that_computes_it(make_engine: EngineFactory, alone) -> None:
    params, expected = alone
    engine = make_engine(max_num_batched_tokens=500)
    requests = _requests(params)[::3]  # all of these start alike
    for request in requests:
        engine.add_request(request)
    engine.step()
    assert engine.stats().num_steps == 1
    assert engine.stats().num_cached_tokens == 16 * (len(requests) - 1)
    completions = {}
    while engine.has_unfinished():
        completions |= {completion.request_id: completion.token_ids for completion in engine.step()}
    assert completions == {request.request_id: expected[request.request_id] for request in requests}


@pytest.mark.parametrize("stop_at_step", [4, 9, 24])
def test_alone_equals_resumed_from_partial_outputs(make_engine: EngineFactory, alone, stop_at_step: int) -> None:
    params, expected = alone
    engine = make_engine(max_num_seqs=6, max_num_batched_tokens=40)
    requests = _requests(params)
    for request in requests:
        engine.add_request(request)
    tokens = {}
    for _ in range(stop_at_step):
        tokens |= {completion.request_id: completion.token_ids for completion in engine.step()}
    saved = {partial.request_id: partial.token_ids for partial in engine.partial_outputs()}
    assert saved
    rest = [
        Request(r.request_id, r.prompt_token_ids, params, seed=r.seed, output_token_ids=saved.get(r.request_id, ()))
        for r in requests
        if r.request_id not in tokens
    ]
    completions = run(make_engine(max_num_seqs=3, max_num_batched_tokens=23), rest)
    assert tokens | _tokens(completions) == expected
    assert all(completion.num_output_tokens == 21 for completion in completions.values())


def _samples() -> list[Request]:
    """Eight of one prompt; the last one is greedy."""
    prompt = [3 + 7 * n % (VOCAB_SIZE - 3) for n in range(37)]
    return [Request(f"s{seed}", prompt, RANDOM if seed < 7 else GREEDY, seed=seed) for seed in range(8)]


@pytest.fixture(scope="module")
def samples_alone(make_engine: EngineFactory) -> dict[str, tuple[int, ...]]:
    """Tokens of each of the samples when nobody shares anything."""
    tokens: dict[str, tuple[int, ...]] = {}
    for request in _samples():
        tokens |= _tokens(run(make_engine(max_num_seqs=1, enable_prefix_caching=False), [request]))
    return tokens


@pytest.mark.parametrize("block_size", [1, 4, 16, 36, 37, 64])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}])
def test_samples_compute_their_prompt_once_and_answer_as_alone(
    make_engine: EngineFactory, samples_alone: dict[str, tuple[int, ...]], block_size: int, settings: dict[str, int]
) -> None:
    engine = make_engine(block_size=block_size, **settings)
    tokens = _tokens(run(engine, _samples()))
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (37 + 7, 7 * 36)
    assert tokens == samples_alone
    assert len(set(tokens.values())) == 8


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 500, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_batched_tokens": 70},
        {"max_model_len": 90, "kv_cache_memory_bytes": 110_000},
    ],
    ids=["in a crowd", "chunked", "prefix cached", "preempted"],
)
def test_options_that_only_watch_change_no_token(make_engine: EngineFactory, alone, settings) -> None:
    params, expected = alone
    watched = SamplingParams(
        max_tokens=21,
        temperature=params.temperature,
        prompt_logprobs=2,
        thinking=Thinking("<think>", "</think>"),
        repetition_stop=RepetitionStop(8, 30, 200),
        timeout_s=1000.0,
    )
    requests = [Request(r.request_id, r.prompt_token_ids, watched, seed=r.seed) for r in _requests(params)]
    engine = make_engine(constraint_factory=steps_factory, **settings)
    engine._sequences.eos_token_ids = frozenset([VOCAB_SIZE + 1])
    expect_short_outputs(engine.scheduler)
    completions = run(engine, requests)
    assert _tokens(completions) == expected
    assert ("max_model_len" in settings) == (engine.stats().num_preemptions > 0)
    without_logprobs = replace(watched, prompt_logprobs=None)
    resumed = [
        Request(r.request_id, r.prompt_token_ids, without_logprobs, r.seed, expected[r.request_id][: 2 * n])
        for n, r in enumerate(requests[:9])
    ]
    again = _tokens(run(engine, resumed))
    assert again == {request.request_id: expected[request.request_id] for request in resumed}


def test_seeds_make_samples_differ_and_repeat(make_engine: EngineFactory) -> None:
    prompt = _prompts()[1]
    requests = [Request(f"s{n}", prompt, RANDOM, seed=n) for n in range(8)]
    first, second = _tokens(run(make_engine(), requests)), _tokens(run(make_engine(max_num_seqs=3), requests[::-1]))
    assert first == second
    assert len(set(first.values())) == 8


def test_greedy_and_sampled_neighbours_do_not_disturb_each_other(make_engine: EngineFactory) -> None:
    kinds = [
        SamplingParams(max_tokens=15, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=15, temperature=0.7, top_k=5, ignore_eos=True),
        SamplingParams(max_tokens=15, temperature=1.3, top_p=0.8, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(max_tokens=15, temperature=1.0, min_p=0.05, min_tokens=4),
        SamplingParams(max_tokens=15, temperature=0.0, presence_penalty=0.7, logprobs=2, ignore_eos=True),
    ]
    requests = [Request(f"r{i}", p, kinds[i % 5], seed=i) for i, p in enumerate(_prompts(15))]
    together = run(make_engine(), requests)
    for request in requests:
        single = run(make_engine(max_num_seqs=1), [request])[request.request_id]
        assert single.token_ids == together[request.request_id].token_ids

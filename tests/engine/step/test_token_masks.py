"""Constrained sequences: against transformers with the same constraint, beside free neighbours, and how they fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import pytest
import torch

from bulkrun.request import Completion, Progress, Request, SamplingParams, StructuredOutput, Thinking
from tests.engine.conftest import EngineFactory, expect_short_outputs, generate_with_transformers, run
from tests.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_model

PROMPT = [17, 5, 99, 42, 63]
STEPS = [[30, 31, 32, 90, 91], [7, 8, 9], list(range(40, 120)), [101], [5, 6, 64, 65, 127, 130], [33, 34, 35]]


class Steps:
    """Allows the n-th set of tokens at the n-th place, and behind the last one only the end of the sequence."""

    def __init__(self, steps: Sequence[Sequence[int]]) -> None:
        self.steps = [*map(set, steps), {EOS_TOKEN_ID}]
        self.position = 0
        self.num_masks = 0

    @property
    def allowed(self) -> set[int]:
        return self.steps[min(self.position, len(self.steps) - 1)]

    def fill_mask(self, mask: memoryview) -> bool:
        self.num_masks += 1
        for word in range(len(mask)):
            bits = sum(1 << token_id % 32 for token_id in self.allowed if token_id // 32 == word)
            mask[word] = bits - (1 << 32) if bits >> 31 else bits
        return True

    def accept(self, token_id: int) -> str | None:
        if token_id not in self.allowed:
            return f"token {token_id} cannot stand at place {self.position}"
        self.position += 1
        return None

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        place = self.position if stop_reason is None else self.position - 1
        return "closed" if place == len(self.steps) - 1 else "unfinished"


class Free:
    """Allows everything, like a thinking budget that is not used up."""

    def fill_mask(self, mask: memoryview) -> bool:
        return False

    def accept(self, token_id: int) -> str | None:
        return None

    def forced_tokens(self) -> Sequence[int]:
        return ()

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        return "whole"


def steps_factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> Steps | Free:
    """`structured_outputs.value` is the JSON of the steps; bad JSON raises ValueError, as a bad grammar does."""
    if sampling.structured_outputs is None:
        return Free()
    return Steps(json.loads(sampling.structured_outputs.value))


def _grammar(steps: Sequence[Sequence[int]] | str = STEPS, **changes: object) -> SamplingParams:
    value = steps if isinstance(steps, str) else json.dumps(steps)
    params = {"max_tokens": 12, "temperature": 0.0, "structured_outputs": StructuredOutput("grammar", value)}
    return SamplingParams(**(params | changes))


def _plain(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | changes))


def _constrained_by_transformers(
    prompt: Sequence[int], steps: Sequence[Sequence[int]] = STEPS, max_tokens: int = 12
) -> list[int]:
    places = [*map(list, steps), [EOS_TOKEN_ID]]
    output = generate_with_transformers(
        "llama",
        prompt,
        max_tokens,
        eos_token_id=EOS_TOKEN_ID,
        prefix_allowed_tokens_fn=lambda _, ids: places[len(ids) - len(prompt)],
    )
    assert output[-1] == EOS_TOKEN_ID
    return output[:-1]


def _prompts() -> list[list[int]]:
    return [[*PROMPT, *range(10, 10 + 5 * number)] for number in range(8)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By prompt: constrained for even ones, free for odd ones."""
    return [
        generate_with_transformers("llama", prompt, 12, eos_token_id=None)
        if number % 2
        else _constrained_by_transformers(prompt)
        for number, prompt in enumerate(_prompts())
    ]


def _mixed() -> list[Request]:
    return [
        Request(str(number), prompt, _plain() if number % 2 else _grammar()) for number, prompt in enumerate(_prompts())
    ]


def _check(completions: dict[str, Completion], expected: list[list[int]]) -> None:
    for number, tokens in enumerate(expected):
        completion = completions[str(number)]
        assert list(completion.token_ids) == tokens
        assert completion.error is None
        assert completion.finish_reason == ("length" if number % 2 else "stop")


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}, {"max_num_seqs": 1}])
def test_greedy_under_a_constraint_equals_transformers_and_neighbours_stay_free(
    make_engine: EngineFactory, expected: list[list[int]], settings: dict[str, int]
) -> None:
    _check(run(make_engine(constraint_factory=steps_factory, **settings), _mixed()), expected)


def test_constrained_sequences_survive_preemption(make_engine: EngineFactory) -> None:
    engine = make_engine(
        constraint_factory=steps_factory, max_model_len=60, kv_cache_memory_bytes=60_000, enable_prefix_caching=False
    )
    expect_short_outputs(engine.scheduler)
    prompts = [[first] * 7 for first in range(10, 26)]
    completions = run(engine, [Request(str(p[0]), p, _grammar()) for p in prompts])
    assert engine.stats().num_preemptions > 0
    for prompt in prompts:
        assert list(completions[str(prompt[0])].token_ids) == _constrained_by_transformers(prompt)


def test_resumed_constraint_has_accepted_the_earlier_tokens(
    make_engine: EngineFactory, expected: list[list[int]]
) -> None:
    for num_saved in (1, 3, 6):
        request = Request("r", PROMPT, _grammar(), output_token_ids=tuple(expected[0][:num_saved]))
        completion = run(make_engine(constraint_factory=steps_factory), [request])["r"]
        assert list(completion.token_ids) == expected[0]
        assert completion.finish_reason == "stop"


def test_samples_under_a_constraint_are_allowed_and_do_not_depend_on_the_crowd(make_engine: EngineFactory) -> None:
    params = _grammar(temperature=1.5, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.3)
    requests = [Request(str(seed), PROMPT, params, seed=seed) for seed in range(40)]
    crowd = run(make_engine(constraint_factory=steps_factory), requests)
    for completion in crowd.values():
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) == len(STEPS)
        assert all(token_id in allowed for token_id, allowed in zip(completion.token_ids, STEPS, strict=True))
    assert len({completion.token_ids for completion in crowd.values()}) > 30
    for request in requests[:3]:
        alone = run(make_engine(constraint_factory=steps_factory, max_num_seqs=1), [request])
        assert alone[request.request_id].token_ids == crowd[request.request_id].token_ids


def test_log_probabilities_are_those_of_the_raw_logits(make_engine: EngineFactory, expected: list[list[int]]) -> None:
    completion = run(make_engine(constraint_factory=steps_factory), [Request("r", PROMPT, _grammar(logprobs=1))])["r"]
    assert completion.logprobs is not None
    free = run(make_engine(), [Request("r", PROMPT, _plain(logprobs=1, max_tokens=1))])["r"]
    assert free.logprobs is not None
    assert completion.logprobs[0].top == free.logprobs[0].top
    assert completion.logprobs[0].token_id == expected[0][0]
    assert completion.logprobs[0].logprob < free.logprobs[0].logprob


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.5, "presence_penalty": 1.5, "min_tokens": 3}])
def test_log_probabilities_over_what_is_allowed_sum_to_one_there(
    make_engine: EngineFactory, changes: dict[str, float]
) -> None:
    over_allowed = _grammar(logprobs=4, logprobs_over="allowed", **changes)
    asking = [Request("allowed", PROMPT, over_allowed, seed=3), Request("raw", PROMPT, _grammar(logprobs=2))]
    free = Request("free", PROMPT, _plain(logprobs=1, logprobs_over="allowed"))
    completions = run(make_engine(constraint_factory=steps_factory), [*_mixed(), *asking, free])
    done = completions["allowed"]
    assert done.logprobs is not None and len(done.logprobs) == len(STEPS) == len(done.token_ids)
    for index, (entry, allowed) in enumerate(zip(done.logprobs, STEPS, strict=True)):
        logits = make_tiny_model("llama")(torch.tensor([[*PROMPT, *done.token_ids[:index]]])).logits[0, -1]
        expected = dict(zip(allowed, logits[allowed].log_softmax(-1).tolist(), strict=True))
        best = sorted(allowed, key=lambda token_id: -expected[token_id])[:4]
        assert [token_id for token_id, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx([expected[token_id] for token_id in best], abs=1e-4)
        assert entry.logprob == pytest.approx(expected[done.token_ids[index]], abs=1e-4)
    alone = run(make_engine(constraint_factory=steps_factory), [asking[1], free])
    for name in ("raw", "free"):
        pairs = zip(completions[name].logprobs or (), alone[name].logprobs or (), strict=True)
        assert all(one.token_id == other.token_id for one, other in pairs)
        of_both = [[entry.logprob for entry in done[name].logprobs or ()] for done in (completions, alone)]
        assert of_both[0] == pytest.approx(of_both[1], abs=1e-4)


def test_end_that_is_all_the_grammar_allows_wins_over_min_tokens_and_ignore_eos(make_engine: EngineFactory) -> None:
    for changes in ({"min_tokens": 9}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True, "temperature": 1.0}):
        completion = run(make_engine(constraint_factory=steps_factory), [Request("r", PROMPT, _grammar(**changes))])[
            "r"
        ]
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) == len(STEPS)
        assert completion.num_output_tokens == len(STEPS) + 1


def test_min_tokens_takes_an_early_end_away_where_the_grammar_allows_more(make_engine: EngineFactory) -> None:
    may_end = [[EOS_TOKEN_ID, 50 + n] for n in range(6)]
    completion = run(
        make_engine(constraint_factory=steps_factory), [Request("r", PROMPT, _grammar(may_end, min_tokens=4))]
    )["r"]
    assert completion.token_ids[:4] == (50, 51, 52, 53)


def test_trap_invalid_grammar_crashed_the_engine_vllm_17623(
    make_engine: EngineFactory, expected: list[list[int]]
) -> None:
    engine = make_engine(constraint_factory=steps_factory)
    bad = Request("bad", PROMPT, _grammar("[[1, 2"))
    completions = run(engine, [*_mixed()[:4], bad, *_mixed()[4:]])
    error = completions.pop("bad").error
    assert error is not None
    assert error.code == "grammar_failed"
    assert "delimiter" in error.message  # what json says about it
    _check(completions, expected)


def test_trap_grammar_mismatch_aborts_the_request_vllm_18783(
    make_engine: EngineFactory, expected: list[list[int]]
) -> None:
    """A constraint that contradicts its own mask in the middle of an output: that row ends, with what it has."""

    class Contradiction(Steps):
        def accept(self, token_id: int) -> str | None:
            return "this token cannot follow" if self.position == 3 else super().accept(token_id)

    def factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> Steps | Free:
        made = steps_factory(sampling)
        return Contradiction(STEPS) if sampling.max_tokens == 11 else made

    bad = Request("bad", PROMPT, _grammar(max_tokens=11))
    completions = run(make_engine(constraint_factory=factory), [bad, *_mixed()])
    completion = completions.pop("bad")
    assert completion.error == ("grammar_failed", "this token cannot follow")
    assert completion.finish_reason == "error"
    assert list(completion.token_ids) == expected[0][:4]
    _check(completions, expected)


def test_trap_one_finished_constrained_row_stopped_the_whole_batch_outlines_757(
    make_engine: EngineFactory, expected: list[list[int]]
) -> None:
    short = [Request(f"short{n}", PROMPT, _grammar(STEPS[: n + 1])) for n in range(4)]
    completions = run(make_engine(constraint_factory=steps_factory), [*short, *_mixed()])
    for number in range(4):
        assert list(completions[f"short{number}"].token_ids) == expected[0][: number + 1]
    _check(completions, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nothing", [[], [VOCAB_SIZE + 3]], ids=["no token", "only a token beyond the vocabulary"])
def test_mask_without_any_token_is_a_failed_grammar_never_a_random_token(
    make_engine: EngineFactory, expected: list[list[int]], nothing: list[int], temperature: float
) -> None:
    dead_end = Request("bad", PROMPT, _grammar([*STEPS[:2], nothing], temperature=temperature, top_p=0.9))
    completions = run(make_engine(constraint_factory=steps_factory), [dead_end, *_mixed()])
    completion = completions.pop("bad")
    assert completion.error is not None
    assert completion.error.code == "grammar_failed"
    assert (completion.finish_reason, len(completion.token_ids)) == ("error", 2)
    _check(completions, expected)


def test_constraint_that_cannot_say_what_follows_ends_its_own_row_only(
    make_engine: EngineFactory, expected: list[list[int]]
) -> None:
    class Breaks(Steps):
        def fill_mask(self, mask: memoryview) -> bool:
            if self.position == 2:
                raise ValueError("the grammar grew too large")
            return super().fill_mask(mask)

    def factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> Steps | Free:
        return Breaks(STEPS) if sampling.max_tokens == 11 else steps_factory(sampling)

    bad = Request("bad", PROMPT, _grammar(max_tokens=11))
    completions = run(make_engine(constraint_factory=factory), [*_mixed(), bad])
    completion = completions.pop("bad")
    assert completion.error == ("grammar_failed", "the grammar grew too large")
    assert list(completion.token_ids) == expected[0][:2]
    _check(completions, expected)


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}])
@pytest.mark.parametrize(("max_tokens", "progress"), [(len(STEPS), "closed"), (len(STEPS) - 1, "unfinished")])
def test_a_constrained_output_that_its_limit_ends_says_how_far_it_came(
    make_engine: EngineFactory, settings: dict[str, bool], max_tokens: int, progress: Progress
) -> None:
    engine = make_engine(constraint_factory=steps_factory, **settings)
    requests = [Request("bound", PROMPT, _grammar(max_tokens=max_tokens)), Request("free", PROMPT, _plain())]
    done = run(engine, [*requests, Request("ended", PROMPT, _grammar())])
    assert (done["bound"].finish_reason, done["bound"].progress) == ("length", progress)
    assert (done["free"].progress, done["ended"].progress) == (None, None)
    again = Request("bound", PROMPT, requests[0].sampling, output_token_ids=done["bound"].token_ids)
    assert run(engine, [again])["bound"].progress == progress, "an output that a kill left whole"


def test_failed_constraint_that_allows_only_the_end_is_a_failure_and_not_an_answer(make_engine: EngineFactory) -> None:
    class Fails(Steps):
        def accept(self, token_id: int) -> str | None:
            return "too complex" if token_id == EOS_TOKEN_ID else super().accept(token_id)

    completion = run(
        make_engine(constraint_factory=lambda *_: Fails(STEPS[:2])), [Request("r", PROMPT, _grammar(logprobs=0))]
    )["r"]
    assert completion.error == ("grammar_failed", "too complex")
    assert len(completion.token_ids) == len(completion.logprobs or ()) == 2  # the end is no part of the answer


def test_factory_gets_the_sampling_and_the_prompt_of_constrained_requests_only(make_engine: EngineFactory) -> None:
    calls: list[tuple[SamplingParams, Sequence[int]]] = []

    def factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        calls.append((sampling, prompt_token_ids))

    requests = [Request("plain", PROMPT, _plain()), Request("constrained", [7, *PROMPT], _grammar(max_tokens=3))]
    completions = run(make_engine(constraint_factory=factory), requests)
    assert calls == [(requests[1].sampling, requests[1].prompt_token_ids)]
    assert len(completions["constrained"].token_ids) == 3  # it needs no constraint, said the factory


@pytest.mark.parametrize(
    "params",
    [
        _grammar(),
        SamplingParams(thinking=Thinking("<think>", "</think>")),
        SamplingParams(bad_words=["no"]),
        SamplingParams(allowed_token_ids=[5]),
    ],
    ids=["structured", "thinking", "words", "ids"],
)
def test_constraints_need_a_factory(make_engine: EngineFactory, params: SamplingParams) -> None:
    error = run(make_engine(), [Request("r", PROMPT, params)])["r"].error
    assert error is not None
    assert error.code == "bad_input"
    assert "token constraints" in error.message


def test_constraint_that_allows_all_changes_nothing(make_engine: EngineFactory) -> None:
    params = _plain(thinking=Thinking("<think>", "</think>", 100))
    completions = run(
        make_engine(constraint_factory=steps_factory),
        [Request("free", PROMPT, params), Request("g", PROMPT, _grammar())],
    )
    assert list(completions["free"].token_ids) == generate_with_transformers("llama", PROMPT, 12, eos_token_id=None)
    assert list(completions["g"].token_ids) == _constrained_by_transformers(PROMPT)


def test_masks_are_filled_once_per_sampled_token_and_not_while_the_prompt_is_chunked(
    make_engine: EngineFactory,
) -> None:
    made: list[Steps] = []

    def factory(sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> Steps:
        made.append(Steps(STEPS))
        return made[-1]

    engine = make_engine(constraint_factory=factory, max_num_seqs=1, max_num_batched_tokens=4)
    completion = run(engine, [Request("r", _prompts()[-1], _grammar())])["r"]
    assert made[0].num_masks == completion.num_output_tokens == len(STEPS) + 1
    assert engine.stats().num_steps > made[0].num_masks + 5


def test_masks_are_filled_while_the_model_computes(
    make_engine: EngineFactory, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask waits for the forward pass to begin and the forward pass for the mask to begin: neither comes first."""
    computes, fills = threading.Event(), threading.Event()

    class Waits(Steps):
        def fill_mask(self, mask: memoryview) -> bool:
            fills.set()
            assert computes.wait(10), "the mask was filled before the model began"
            return super().fill_mask(mask)

    engine = make_engine(constraint_factory=lambda *_: Waits(STEPS))
    forward = engine.model_runner.model.forward

    def slow_forward(*args: torch.Tensor) -> torch.Tensor:
        computes.set()
        assert fills.wait(10), "the model was done before the mask was begun"
        return forward(*args)

    monkeypatch.setattr(engine.model_runner.model, "forward", slow_forward)
    assert list(run(engine, [Request("r", PROMPT, _grammar())])["r"].token_ids) == expected[0]


def test_stop_tokens_and_constraints_go_together(make_engine: EngineFactory, expected: list[list[int]]) -> None:
    stops = _grammar(stop_token_ids=(expected[0][3],))
    completion = run(make_engine(constraint_factory=steps_factory), [Request("r", PROMPT, stops)])["r"]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", expected[0][3])
    assert list(completion.token_ids) == expected[0][:3]

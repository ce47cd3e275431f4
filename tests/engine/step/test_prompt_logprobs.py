"""Log-probabilities of prompts against a plain forward pass of transformers, however the prompt was computed."""

from __future__ import annotations

import random

import pytest
import torch

from bulkrun.engine.step import prompt_logprobs
from bulkrun.request import Completion, Request, SamplingParams
from tests.engine.conftest import EngineFactory, expect_short_outputs, run
from tests.models.tiny_models import VOCAB_SIZE, make_tiny_model

NUM_TOP = 3
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, prompt_logprobs=NUM_TOP)


def _prompts(count: int = 9) -> list[list[int]]:
    """Odd lengths, one token among them; every second one starts like the first."""
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(13)]
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (20, 1, 7, 33, 2, 16, 17, 5, 29)]
    return [[*shared, *tokens] if number % 2 == 0 else tokens for number, tokens in enumerate(own[:count])]


def _requests(params: SamplingParams = PARAMS) -> list[Request]:
    return [Request(f"r{number}", prompt, params) for number, prompt in enumerate(_prompts())]


@torch.no_grad()
def _check(request: Request, completion: Completion, num_top: int = NUM_TOP) -> None:
    prompt = list(request.prompt_token_ids)
    entries = completion.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    expected = make_tiny_model("llama")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        row = expected[position - 1]
        assert entry.token_id == prompt[position]
        # two float32 implementations of one model: their sums differ in the last bits
        assert entry.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert [row[token_id].item() for token_id, _ in entry.top] == pytest.approx(
            [value for _, value in entry.top], abs=1e-4
        )


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}, {"max_num_seqs": 1}])
def test_prompt_logprobs_equal_transformers(make_engine: EngineFactory, settings: dict[str, int]) -> None:
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    without = run(make_engine(), _requests(plain))
    completions = run(make_engine(**settings), _requests())
    for request in _requests():
        _check(request, completions[request.request_id])
        assert completions[request.request_id].token_ids == without[request.request_id].token_ids
        assert without[request.request_id].prompt_logprobs is None


def test_prompt_that_is_cached_already_is_computed_again(make_engine: EngineFactory) -> None:
    engine = make_engine()
    run(engine, _requests())
    again = run(engine, _requests())
    for request in _requests():
        _check(request, again[request.request_id])
        assert again[request.request_id].num_cached_tokens == 0


def test_preempted_requests_have_the_same_prompt_logprobs(make_engine: EngineFactory) -> None:
    """The pool is small enough for preemption in the middle of prompts and of outputs."""
    params = SamplingParams(max_tokens=21, temperature=0.0, prompt_logprobs=NUM_TOP)
    for caching in (False, True):
        engine = make_engine(
            enable_prefix_caching=caching, max_model_len=70, kv_cache_memory_bytes=90_000, max_num_batched_tokens=16,
            max_num_seqs=12,
        )  # fmt: skip
        engine._sequences.eos_token_ids = frozenset([VOCAB_SIZE + 1])
        expect_short_outputs(engine.scheduler)
        requests = [Request(r.request_id, r.prompt_token_ids, params) for r in _requests()]
        completions = run(engine, requests)
        assert engine.stats().num_preemptions > 0
        for request in requests:
            _check(request, completions[request.request_id])


def test_resumed_request_has_them_too_and_the_same_tokens(make_engine: EngineFactory) -> None:
    whole = run(make_engine(), _requests())
    for request in _requests()[:4]:
        saved = whole[request.request_id].token_ids[:4]
        resumed = Request(request.request_id, request.prompt_token_ids, PARAMS, output_token_ids=saved)
        completion = run(make_engine(), [resumed])[request.request_id]
        _check(request, completion)
        assert completion.token_ids == whole[request.request_id].token_ids


def test_zero_asks_for_the_tokens_of_the_prompt_alone(make_engine: EngineFactory) -> None:
    """In a step that begins with the prompt of somebody who asks for nothing."""
    nobody = Request("nobody", _prompts()[2], SamplingParams(max_tokens=2, temperature=0.0))
    request = Request("r", _prompts()[0], SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0))
    other = Request("other", _prompts()[3], SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=5))
    completions = run(make_engine(), [nobody, request, other])
    _check(request, completions["r"], 0)
    _check(other, completions["other"], 5)


def test_trap_prompt_logprobs_run_out_of_memory_vllm_5907(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the prompts of a step, the head never sees more than a bounded number of rows at once."""
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", 5 * VOCAB_SIZE)
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=500)
    model = engine.model_runner.model
    compute_logits, num_rows = model.compute_logits, []

    def spy(hidden_SE: torch.Tensor, **how: bool) -> torch.Tensor:
        num_rows.append(hidden_SE.shape[0])
        return compute_logits(hidden_SE, **how)

    monkeypatch.setattr(model, "compute_logits", spy)
    completions = run(engine, _requests())
    for request in _requests():
        _check(request, completions[request.request_id])
    assert max(num_rows) == 5

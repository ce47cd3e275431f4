"""Penalties, filters and log-probabilities of the running engine, against transformers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, run
from tests.models.tiny_models import make_tiny_model

PROMPT = [17, 5, 99, 42, 63, 5, 5]


@torch.no_grad()
def _logits(token_ids: list[int]) -> torch.Tensor:
    return make_tiny_model("llama")(torch.tensor([token_ids])).logits[0, -1]


def _penalized_greedy(params: SamplingParams) -> list[int]:
    """One full forward pass of transformers per token; repetition by its processor, the others by their definition."""
    repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    output: list[int] = []
    for _ in range(params.max_tokens):
        tokens = [*PROMPT, *output]
        scores = repetition(torch.tensor([tokens]), _logits(tokens)[None])[0]
        for token_id, count in Counter(output).items():
            scores[token_id] -= params.presence_penalty + params.frequency_penalty * count
        output.append(int(scores.argmax()))
    return output


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.9},
        {"frequency_penalty": 1.1},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.7},
    ],
)
def test_penalties_equal_transformers(make_engine: EngineFactory, penalties: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, **penalties)
    expected = _penalized_greedy(params)
    requests = [
        Request("plain", PROMPT, SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)),
        Request("whole", PROMPT, params),
        Request("resumed", PROMPT, params, output_token_ids=tuple(expected[:6])),
    ]
    completions = run(make_engine(max_num_batched_tokens=11), requests)
    assert list(completions["whole"].token_ids) == expected
    assert list(completions["resumed"].token_ids) == expected
    assert list(completions["plain"].token_ids) != expected


def test_biases_equal_transformers_and_neighbours_have_none(make_engine: EngineFactory) -> None:
    def greedy(bias: dict[int, float]) -> list[int]:
        process = (
            SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()}) if bias else None
        )
        output: list[int] = []
        for _ in range(10):
            ids = torch.tensor([[*PROMPT, *output]])
            scores = _logits(ids[0].tolist())[None]
            output.append(int((process(ids, scores) if process else scores).argmax()))
        return output

    free = greedy({})
    biases = [{free[0]: -100.0}, {free[0]: -2.0, free[3]: 1.5, 7: 0.75}, {9: 100.0}, {}]
    requests = [
        Request(str(n), PROMPT, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logit_bias=bias))
        for n, bias in enumerate(biases)
    ]
    completions = run(make_engine(), requests)
    assert [list(completions[str(n)].token_ids) for n in range(4)] == [greedy(bias) for bias in biases]
    assert completions["2"].token_ids == (9,) * 10 and free[0] not in completions["0"].token_ids
    unknown = Request("x", PROMPT, SamplingParams(logit_bias={10**6: 1.0}))
    [error] = [run(make_engine(), [unknown])["x"].error]
    assert error is not None and error.message.startswith("sampling.logit_bias has token id 1000000")


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_equal_transformers(make_engine: EngineFactory, temperature: float) -> None:
    params = SamplingParams(max_tokens=9, temperature=temperature, top_k=7, logprobs=3, ignore_eos=True)
    requests = [
        Request("asks", PROMPT, params, seed=4, output_token_ids=(1, 2)),  # starts over: see add_request
        Request("asks less", PROMPT, SamplingParams(max_tokens=9, temperature=1e-42, logprobs=0, ignore_eos=True)),
        Request("asks not", PROMPT, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)),
    ]
    completions = run(make_engine(), requests)
    completion = completions["asks"]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 9
    for index, entry in enumerate(completion.logprobs):
        expected = _logits([*PROMPT, *completion.token_ids[:index]]).log_softmax(-1)
        top = expected.topk(3)
        assert entry.token_id == completion.token_ids[index]
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert [entry.top for entry in completions["asks less"].logprobs or ()] == [()] * 9
    assert completions["asks not"].logprobs is None
    assert completions["asks less"].token_ids == completions["asks not"].token_ids  # its temperature is none


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 9, "top_p": 0.7}]
)
def test_samples_follow_the_filtered_distribution(make_engine: EngineFactory, filters: dict[str, float]) -> None:
    temperature, draws = 1.5, 600
    probs = (_logits(PROMPT) / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    kept = order[: int(filters["top_k"])] if "top_k" in filters else order
    if "top_p" in filters:
        within = probs[kept] / probs[kept].sum()
        kept = kept[(within.cumsum(0) - within) < filters["top_p"]]
    if "min_p" in filters:
        kept = kept[probs[kept] >= filters["min_p"] * probs.max()]
    expected = {int(t): float(probs[t] / probs[kept].sum()) for t in kept}
    params = SamplingParams(max_tokens=1, temperature=temperature, ignore_eos=True, **filters)
    neighbour = Request("unfiltered", PROMPT, SamplingParams(max_tokens=1, temperature=temperature, ignore_eos=True))
    completions = run(make_engine(), [neighbour, *(Request(str(n), PROMPT, params, seed=n) for n in range(draws))])
    del completions["unfiltered"]
    seen = Counter(completion.token_ids[0] for completion in completions.values())
    assert set(seen) <= set(expected)
    for token_id, probability in expected.items():
        sigma = math.sqrt(probability * (1 - probability) / draws)
        assert abs(seen[token_id] / draws - probability) < 5 * sigma + 1e-9

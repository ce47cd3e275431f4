"""The same engine on a CUDA device: float32 equals transformers, bf16 agrees with float32 where it is no tie.

Skipped where there is no GPU (CI has none). `python -m pytest -m gpu` runs them where there is one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.models.decoder.quantized_layers import FourBitWeights
from bulkrun.models.loading import kept_four_bits
from bulkrun.request import Request, SamplingParams, StructuredOutput
from tests.engine import test_stored_quantized as stored_quantized
from tests.engine.conftest import EngineFactory, generate_with_transformers, run
from tests.engine.step.test_token_lists import lists_factory
from tests.engine.step.test_token_masks import STEPS, _grammar, steps_factory
from tests.engine.test_forced_tokens import forcing_factory
from tests.models.tiny_models import VARIANTS, VOCAB_SIZE, known
from tests.models.tiny_mxfp4 import save_tiny_mxfp4
from tests.models.tiny_packed import save_tiny_packed

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 7, 16, 33, 61)]


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("variant", known(VARIANTS))
def test_greedy_float32_tokens_equal_transformers(make_engine: EngineFactory, variant: str) -> None:
    requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts())]
    completions = run(make_engine(variant, device="cuda", max_num_batched_tokens=29, max_num_seqs=4), requests)
    for request in requests:
        expected = generate_with_transformers(variant, request.prompt_token_ids, 21, eos_token_id=None)
        assert list(completions[request.request_id].token_ids) == expected


@pytest.mark.parametrize(
    "variant",
    known(
        [
            *("llama", "mistral_sliding", "qwen2", "qwen3", "qwen3_5", "lfm2", "granite_h", "nemotron_h_moe"),
            *("llama4", "gemma3n", "mamba", "jamba", "deepseek_v3"),
        ]
    ),
)
def test_bfloat16_first_tokens_are_near_the_best_of_float32(make_engine: EngineFactory, variant: str) -> None:
    """One token each: where bf16 chooses another one, float32 must have found it nearly as likely."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts())]
    exact = run(make_engine(variant), requests)
    rounded = run(make_engine(variant, device="cuda", dtype="bfloat16"), requests)
    for request_id, completion in exact.items():
        assert completion.logprobs is not None
        likely = dict(completion.logprobs[0].top)
        best = completion.logprobs[0].logprob
        assert likely.get(rounded[request_id].token_ids[0], -99.0) > best - 0.3


def test_constrained_tokens_and_prompt_logprobs_equal_those_of_the_cpu(make_engine: EngineFactory) -> None:
    """Samples of one prompt too: the copied end of a prompt is the same on both."""
    params = SamplingParams(
        max_tokens=12,
        temperature=0.0,
        prompt_logprobs=2,
        structured_outputs=StructuredOutput("grammar", json.dumps(STEPS)),
    )
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [Request(f"c{i}", prompt, params) for i, prompt in enumerate(prompts())]
    requests += [Request(f"f{n}", prompts()[-1], free) for n in range(4)]
    on_cpu = run(make_engine(constraint_factory=steps_factory), requests)
    engine = make_engine(device="cuda", constraint_factory=steps_factory)
    for request_id, completion in run(engine, requests).items():
        assert completion.token_ids == on_cpu[request_id].token_ids
        assert len(completion.prompt_logprobs or ()) == len(on_cpu[request_id].prompt_logprobs or ())
        pairs = zip((completion.prompt_logprobs or ())[1:], (on_cpu[request_id].prompt_logprobs or ())[1:], strict=True)
        for got, expected in pairs:
            assert got is not None
            assert expected is not None
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-3)


def test_forced_tokens_are_those_of_the_masks(make_engine: EngineFactory) -> None:
    steps = [[50], [51], *[[60 + n] for n in range(5)], [7, 8, 9, 10], [70], [71], list(range(40, 120)), [80]]
    params = [_grammar(steps, max_tokens=30), GREEDY]
    requests = [Request(str(i), prompt, params[i % 2]) for i, prompt in enumerate(prompts())]
    on_cpu = run(make_engine(constraint_factory=steps_factory), requests)
    engine = make_engine(device="cuda", constraint_factory=forcing_factory)
    for request_id, completion in run(engine, requests).items():
        assert completion.token_ids == on_cpu[request_id].token_ids
    assert engine.stats().num_forced_tokens > 0


def test_lists_of_words_and_tokens_hold(make_engine: EngineFactory) -> None:
    only = SamplingParams(
        max_tokens=20, temperature=0.8, ignore_eos=True, allowed_token_ids=[5, 9, 31], bad_words=["5 9"]
    )
    free = run(make_engine(), [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts())])
    requests = [Request(f"only{i}", prompt, only, seed=i) for i, prompt in enumerate(prompts())]
    for i, prompt in enumerate(prompts()):
        words = [" ".join(map(str, free[str(i)].token_ids[place : place + 2])) for place in (1, 4, 9)]
        requests.append(Request(f"words{i}", prompt, replace(GREEDY, bad_words=words)))
    on_cpu = run(make_engine(constraint_factory=lists_factory), requests)
    for request_id, completion in run(make_engine(device="cuda", constraint_factory=lists_factory), requests).items():
        assert completion.token_ids == on_cpu[request_id].token_ids


def test_sampled_tokens_do_not_depend_on_the_crowd(make_engine: EngineFactory) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, top_k=20, ignore_eos=True)
    requests = [Request(str(i), prompt, params, seed=i) for i, prompt in enumerate(prompts())]
    crowd = run(make_engine(device="cuda"), requests)
    for request in requests:
        alone = run(make_engine(device="cuda", max_num_seqs=1), [request])
        assert alone[request.request_id].token_ids == crowd[request.request_id].token_ids


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("form", ["table", "whole", "e2m1"])
def test_weights_that_stay_in_four_bits_are_multiplied_as_transformers_does(
    form: str, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked before their product, and by the kernel that multiplies: a matrix's and experts'."""
    monkeypatch.setattr(kept_four_bits, "_free_bytes", lambda device: 0)
    sizes = {"hidden_size": 192, "intermediate_size": 192}
    if form == "e2m1":
        stored, plain = save_tiny_mxfp4(tmp_path, intermediate_size=128)
    else:
        stored, plain = save_tiny_packed(tmp_path, "qwen2", "gptq" if form == "table" else "ct_zeros", **sizes)
    settings = stored_quantized.SMALL | {"device": "cuda", "enforce_eager": enforce_eager}
    engine = LLMEngine.from_model_dir(stored, **settings)
    kept = [module for module in engine.model_runner.model.modules() if isinstance(module, FourBitWeights)]
    assert kept and {module.four_bit_weight.form for module in kept} == {form}
    asked = stored_quantized.requests()
    completions = run(engine, asked)
    theirs = stored_quantized.of_transformers(stored_quantized.reference(plain))
    assert [list(completions[one.request_id].token_ids) for one in asked] == theirs

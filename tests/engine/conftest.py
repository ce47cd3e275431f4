"""Tiny checkpoints on disk, engines over them, and transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.scheduling.admission import MIN_SAMPLES
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import Completion, Request, SamplingParams
from tests.models.tiny_models import make_tiny_model, save_tiny_model

EngineFactory = Callable[..., LLMEngine]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a variant's checkpoint, written once per session."""
    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = save_tiny_model(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return get


@pytest.fixture(scope="session")
def make_engine(model_dir: Callable[[str], Path]) -> EngineFactory:
    """An engine over a variant, float32 on the CPU, with a small pool unless told otherwise."""

    def make(variant: str = "llama", **settings: Any) -> LLMEngine:
        defaults = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 8 * 2**20, "block_size": 4}
        return LLMEngine.from_model_dir(model_dir(variant), **(defaults | settings))

    return make


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(engine: LLMEngine, requests: SequenceOf[Request], *, max_steps: int = 5000) -> dict[str, Completion]:
    """Every request's completion, by id; fails when one is missing, doubled or blocks are left over."""
    for request in requests:
        engine.add_request(request)
    completions: dict[str, Completion] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            break
        for completion in engine.step():
            assert completion.request_id not in completions
            completions[completion.request_id] = completion
    assert not engine.has_unfinished(), "did not finish"
    assert sorted(completions) == sorted(request.request_id for request in requests)
    assert engine.stats().kv_cache_usage == 0
    return completions


def expect_short_outputs(scheduler: Scheduler) -> None:
    """Let it see many outputs of one token, so that it lets in more than can get to their ends."""
    for number in range(MIN_SAMPLES):
        seq = Sequence(Request("short", [1], SamplingParams(max_tokens=1)), arrival=-1 - number, max_model_len=2)
        seq.token_ids.append(1)
        scheduler.finish([seq])


def preempted(scheduler: Scheduler) -> list[Sequence]:
    """Those who wait again, in order."""
    return [seq for seq in scheduler.waiting if seq.num_preemptions]


@torch.no_grad()
def generate_with_transformers(variant: str, prompt: SequenceOf[int], max_tokens: int, **options: Any) -> list[int]:
    """Greedy output of transformers for one prompt, without the end-of-sequence token."""
    model = _reference(variant)
    input_ids = torch.tensor([list(prompt)])
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()


@lru_cache(maxsize=64)
@torch.no_grad()
def is_greedy(variant: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether each of these tokens is the best one of transformers behind all that stand before it, which is what its
    `generate` gives: told by one pass over all of them, where that takes one for each. The two round differently,
    each logit by up to 5e-5 in the variants of `test_families`: of two tokens within both errors either may be best."""
    logits_TV = _reference(variant)(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen_T = logits_TV.gather(1, torch.tensor(output)[:, None])[:, 0]
    return bool((logits_TV.amax(1) - chosen_T <= 1e-4).all())


@lru_cache(maxsize=4)
def _reference(variant: str) -> transformers.PreTrainedModel:
    """One for several prompts: making it takes as long as some tokens."""
    return make_tiny_model(variant)

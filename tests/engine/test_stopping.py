"""How requests end: limits, end-of-sequence, stop tokens and strings, refusals, broken numbers, aborts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.request import Completion, Request, SamplingParams
from tests.engine.conftest import EngineFactory, generate_with_transformers, run
from tests.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

PROMPT = [17, 5, 99, 42, 63]


class WordMatcher:
    """Pretends that token n reads as the word "<n>"; looks for stop strings in the joined text."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.text = stop, ""

    def append(self, token_id: int) -> str | None:
        self.text += f"<{token_id}>"
        return next((stop for stop in self.stop if stop in self.text), None)


def _greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | changes))


def _one(engine: LLMEngine, params: SamplingParams, prompt: Sequence[int] = PROMPT, **request: object) -> Completion:
    return run(engine, [Request("r", prompt, params, **request)])["r"]


@pytest.fixture(scope="module")
def free() -> list[int]:
    """What the model says to PROMPT when nothing stops it."""
    return generate_with_transformers("llama", PROMPT, 12, eos_token_id=None)


def test_max_tokens_ends_with_length(make_engine: EngineFactory, free: list[int]) -> None:
    completion = _one(make_engine(), _greedy(max_tokens=7))
    assert list(completion.token_ids) == free[:7]
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert (completion.num_prompt_tokens, completion.num_output_tokens) == (5, 7)


def test_stop_token_ends_without_itself(make_engine: EngineFactory, free: list[int]) -> None:
    completion = _one(make_engine(), _greedy(stop_token_ids=(free[4],)))
    first = free.index(free[4])
    assert list(completion.token_ids) == free[:first]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", free[4])
    assert completion.num_output_tokens == first + 1


def test_end_of_sequence_ends_without_itself_and_without_a_reason(make_engine: EngineFactory, free: list[int]) -> None:
    engine = make_engine()
    engine._sequences.eos_token_ids = frozenset([free[3]])
    first = free.index(free[3])
    completion = _one(engine, _greedy(ignore_eos=False))
    assert list(completion.token_ids) == free[:first]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert list(_one(engine, _greedy(ignore_eos=True)).token_ids) == free


def test_end_of_sequence_ids_come_from_the_generation_config_else_the_config(
    make_engine: EngineFactory, model_dir, tmp_path: Path
) -> None:
    assert make_engine()._sequences.eos_token_ids == {EOS_TOKEN_ID}
    for file in model_dir("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    engine = LLMEngine.from_model_dir(tmp_path, device="cpu", dtype="float32", kv_cache_memory_bytes=2**20)
    assert engine._sequences.eos_token_ids == {7, 9}


def test_stop_string_keeps_its_tokens_and_is_named(make_engine: EngineFactory, free: list[int]) -> None:
    stop = f"{free[2]}><{free[3]}"
    completion = _one(make_engine(stop_matcher_factory=WordMatcher), _greedy(stop=("never", stop)))
    assert list(completion.token_ids) == free[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_stop_string_across_a_resume(make_engine: EngineFactory, free: list[int]) -> None:
    stop = f"{free[2]}><{free[3]}"
    engine = make_engine(stop_matcher_factory=WordMatcher)
    completion = _one(engine, _greedy(stop=(stop,)), output_token_ids=tuple(free[:3]))
    assert list(completion.token_ids) == free[:4]
    assert completion.stop_reason == stop


def test_min_tokens_holds_every_end_back(make_engine: EngineFactory, free: list[int]) -> None:
    expected = generate_with_transformers("llama", PROMPT, 12, eos_token_id=free[0], min_new_tokens=5)
    engine = make_engine(stop_matcher_factory=WordMatcher)
    engine._sequences.eos_token_ids = frozenset([free[0]])
    completion = _one(engine, _greedy(ignore_eos=False, min_tokens=5))
    kept = expected[: expected.index(free[0])] if free[0] in expected else expected
    assert list(completion.token_ids) == kept
    assert len(kept) >= 5
    stopped = _one(engine, _greedy(min_tokens=5, stop=(f"<{free[1]}>",)))
    assert stopped.num_output_tokens == 6  # seen early, honoured as soon as it may


def test_min_tokens_holds_back_an_end_that_is_ignored(make_engine: EngineFactory, free: list[int]) -> None:
    """As in vLLM: before so many tokens an end-of-sequence token cannot be generated; after them it may."""
    expected = generate_with_transformers("llama", PROMPT, 5, eos_token_id=free[0], min_new_tokens=5)
    engine = make_engine()
    engine._sequences.eos_token_ids = frozenset([free[0]])
    assert list(_one(engine, _greedy(min_tokens=5)).token_ids)[:5] == expected
    assert list(_one(engine, _greedy()).token_ids) == free


def test_output_that_already_reached_its_end_is_returned_as_it_is(make_engine: EngineFactory, free: list[int]) -> None:
    completion = _one(make_engine(), _greedy(max_tokens=4), output_token_ids=tuple(free[:4]))
    assert list(completion.token_ids) == free[:4]
    assert completion.finish_reason == "length"


def test_max_model_len_ends_with_length(make_engine: EngineFactory, free: list[int]) -> None:
    completion = _one(make_engine(max_model_len=9), _greedy())
    assert list(completion.token_ids) == free[:4]
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "changes", "code", "words"),
    [
        ([], {}, "empty_prompt", "no tokens"),
        (
            [5] * 64,
            {},
            "too_long",
            "64 tokens .* 64 .* 63 .*kv_cache_memory_bytes, or .*run.on_too_long with engine.max_model_len: 64",
        ),
        ([5, VOCAB_SIZE], {}, "bad_input", f"{VOCAB_SIZE}; .* 0 to {VOCAB_SIZE - 1}"),
        ([5, -1], {}, "bad_input", "-1"),
        ([5], {"stop": ("x",)}, "bad_input", "tokenizer"),
        ([5], {"stop_token_ids": (999,)}, "bad_input", "999"),
    ],
)
def test_request_that_cannot_be_served_ends_as_an_error(
    make_engine: EngineFactory, prompt: list[int], changes: dict[str, object], code: str, words: str, free: list[int]
) -> None:
    engine = make_engine(max_model_len=64)
    requests = [Request("bad", prompt, _greedy(**changes)), Request("good", PROMPT, _greedy())]
    completions = run(engine, requests)
    error = completions["bad"].error
    assert error is not None
    assert error.code == code
    assert re.search(words, error.message)
    assert completions["bad"].finish_reason == "error"
    assert list(completions["good"].token_ids) == free


@pytest.mark.parametrize("bad_value", [float("nan"), float("inf")])
def test_row_with_broken_numbers_ends_as_an_error_and_spoils_nobody(
    make_engine: EngineFactory, free: list[int], bad_value: float
) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    poison = 120
    assert poison not in [*PROMPT, *free]
    with torch.inference_mode():
        engine.model_runner.model.embed_weight[poison] = bad_value
    requests = [Request("good", PROMPT, _greedy()), Request("bad", [5, poison, 9, 9, 9], _greedy())]
    requests += [Request(f"late{n}", PROMPT, _greedy()) for n in range(40)]
    completions = run(engine, requests)
    assert completions["bad"].error is not None
    assert completions["bad"].error.code == "engine_error"
    assert completions["bad"].token_ids == ()
    assert all(list(completions[r.request_id].token_ids) == free for r in requests if r.request_id != "bad")
    assert all(torch.isfinite(cache).all() for cache in engine.model_runner.kv_cache.k + engine.model_runner.kv_cache.v)


def test_samples_of_a_broken_prompt_end_as_errors_and_leave_no_broken_numbers(
    make_engine: EngineFactory, free: list[int]
) -> None:
    """Their last block is a copy of a block that holds no numbers."""
    engine = make_engine(max_num_batched_tokens=64)
    with torch.inference_mode():
        engine.model_runner.model.embed_weight[120] = float("nan")
    requests = [Request(f"bad{n}", [5, 9, 9, 9, 120, 9, 9], _greedy(), seed=n) for n in range(5)]
    requests += [Request(f"good{n}", PROMPT, _greedy()) for n in range(40)]
    completions = run(engine, requests)
    for request_id, completion in completions.items():
        if request_id.startswith("bad"):
            assert completion.error is not None
            assert completion.error.code == "engine_error"
        else:
            assert list(completion.token_ids) == free
    assert all(torch.isfinite(cache).all() for cache in engine.model_runner.kv_cache.k + engine.model_runner.kv_cache.v)


def test_abort_drops_without_completion_and_frees_everything(make_engine: EngineFactory, free: list[int]) -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abcd":
        engine.add_request(Request(name, PROMPT, _greedy()))
    engine.add_request(Request("refused", [], _greedy()))
    engine.abort(["refused"])
    assert engine.step() == []
    engine.abort(["a", "d"])
    completions = {}
    while engine.has_unfinished():
        completions |= {completion.request_id: list(completion.token_ids) for completion in engine.step()}
    assert completions == {"b": free, "c": free}
    assert engine.stats().kv_cache_usage == 0


def test_stats_count_tokens_and_levels(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    for name in "abc":
        engine.add_request(Request(name, [*PROMPT, *PROMPT], _greedy(max_tokens=3)))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_prompt_tokens) == (1, 2, 8)
    assert 0 < stats.kv_cache_usage < 1
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert stats.num_output_tokens == 9
    assert stats.num_prompt_tokens + stats.num_cached_tokens == 30
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)

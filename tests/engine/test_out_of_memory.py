"""Memory that runs out costs time and nothing else: the tokens are transformers', and the log says what to set."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.memory_errors import is_out_of_memory
from bulkrun.engine.out_of_memory import MAX_IN_A_ROW
from bulkrun.engine.step import sequence_rows
from bulkrun.engine.step.shared_prefixes import SharedPrefixTable
from bulkrun.engine.step.staging import HostStaging
from bulkrun.errors import ModelError, UsageError
from bulkrun.models.kv_cache import KVCache
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, generate_with_transformers, run
from tests.engine.step.test_token_masks import Steps, _constrained_by_transformers, _grammar
from tests.models.tiny_models import VOCAB_SIZE

MAX_TOKENS = 15
SHARED = [(3 * k * k + 7) % (VOCAB_SIZE - 3) + 3 for k in range(21)]
PROMPTS = [[(7 * n + 5 * k * k) % (VOCAB_SIZE - 3) + 3 for k in range(1 + 6 * n)] for n in range(6)]
# one with keys and values alone, others with states of two kinds, one with states alone
VARIANTS = ["llama", "lfm2", "granite_h", "mamba"]
PROMPTS += [[*SHARED, n + 3, n + 9] for n in range(3)]
CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"


class ModelThatRunsOut:
    """A model in which chosen calls of the forward pass, or of the head, find no memory."""

    def __init__(self, model: Any, runs_out: Callable[[int], bool], *, at_logits: bool = False) -> None:
        self._model, self._runs_out, self._at_logits = model, runs_out, at_logits
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any) -> torch.Tensor:
        hidden_TE = self._model(*args)
        if not self._at_logits:
            self._maybe_run_out()
        return hidden_TE

    def compute_logits(self, hidden_SE: torch.Tensor, **how: bool) -> torch.Tensor:
        if self._at_logits:
            self._maybe_run_out()
        return self._model.compute_logits(hidden_SE, **how)

    def _maybe_run_out(self) -> None:
        self._num_calls += 1
        if self._runs_out(self._num_calls):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


def _run_out(engine: LLMEngine, runs_out: Callable[[int], bool], *, at_logits: bool = False) -> LLMEngine:
    engine.model_runner.model = ModelThatRunsOut(engine.model_runner.model, runs_out, at_logits=at_logits)
    return engine


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return {variant: [generate_with_transformers(variant, prompt, MAX_TOKENS, eos_token_id=None) for prompt in PROMPTS]
            for variant in VARIANTS}  # fmt: skip


def _requests(**params: Any) -> list[Request]:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, **params)
    return [Request(str(n), prompt, sampling) for n, prompt in enumerate(PROMPTS)]


@settings(max_examples=40)
@given(data=st.data())
def test_tokens_equal_transformers_whenever_memory_runs_out(
    make_engine: EngineFactory, expected: dict[str, list[list[int]]], data: st.DataObject
) -> None:
    variant = data.draw(st.sampled_from(VARIANTS))
    fails = data.draw(st.sets(st.integers(1, 60), max_size=6))
    engine = _run_out(
        make_engine(
            variant,
            max_num_seqs=data.draw(st.integers(1, 6)),
            max_num_batched_tokens=data.draw(st.sampled_from([7, 16, 64])),
            max_model_len=64,
            kv_cache_memory_bytes=data.draw(st.sampled_from([2**16, 2**18, 2**20])),
            async_scheduling=data.draw(st.booleans()),
            batching=data.draw(st.sampled_from(["continuous", "static"])),
        ),
        fails.__contains__,
        at_logits=data.draw(st.booleans()),
    )
    done = run(engine, _requests())
    for n, tokens in enumerate(expected[variant]):
        assert list(done[str(n)].token_ids) == tokens
        assert done[str(n)].finish_reason == "length"


def test_the_pool_shrinks_by_a_fifth_and_the_log_says_what_to_set(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16)
    before = engine.config.num_blocks
    with caplog.at_level(logging.WARNING):
        run(_run_out(engine, {4}.__contains__), _requests())
    assert engine.model_runner.kv_cache.num_blocks == engine.config.num_blocks == int(0.8 * before)
    assert engine.scheduler.block_manager.num_blocks == engine.config.num_blocks
    assert engine.stats().num_preemptions > 0
    (record,) = caplog.records
    assert "nothing is lost, going on with a KV pool of" in record.message
    block_bytes = 2 * 3 * 4 * 2 * 8 * 4  # keys and values, layers, block, heads, head dim, float32
    assert f"set engine.kv_cache_memory_bytes: {engine.config.num_blocks * block_bytes} (CUDA" in record.message
    assert "more lines" not in record.message


def test_steps_get_smaller_where_they_take_more_than_the_pool(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=512, kv_cache_memory_bytes=2**17)
    before = engine.config.num_blocks
    with caplog.at_level(logging.WARNING):
        run(_run_out(engine, {1}.__contains__), _requests())
    assert engine.config.num_blocks == before
    assert engine.scheduler.max_num_batched_tokens == engine.config.max_num_batched_tokens == 256
    assert "set engine.max_num_batched_tokens: 256" in caplog.text


def test_memory_that_never_comes_back_ends_in_an_error_that_names_the_keys(make_engine: EngineFactory) -> None:
    engine = _run_out(make_engine(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16), lambda _: True)
    with pytest.raises(ModelError, match=r"even with a KV pool of .* lower engine\.max_num_seqs .*\(CUDA out"):
        run(engine, _requests())
    # the least: a longest sequence beside the null block, and a token for everyone
    assert (engine.config.num_blocks, engine.config.max_num_batched_tokens) == (1 + 64 // 4, 2)


def test_it_gives_up_after_so_many_times_in_a_row_but_not_after_so_many_in_all(make_engine: EngineFactory) -> None:
    settings = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    run(_run_out(make_engine(**settings), lambda call: call % 2 == 1 and call < 4 * MAX_IN_A_ROW), _requests())
    with pytest.raises(ModelError, match="out of memory"):
        run(_run_out(make_engine(**settings), lambda call: 3 < call <= 4 + MAX_IN_A_ROW), _requests())


def test_a_smaller_pool_that_does_not_fit_either_is_made_smaller_again(
    make_engine: EngineFactory, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _run_out(make_engine(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16), {5}.__contains__)
    allocate, before = KVCache.allocate, engine.config.num_blocks

    def scarce(config: Any, num_blocks: int, *rest: Any) -> KVCache:
        if num_blocks > before // 2:
            raise RuntimeError(CPU_ALLOCATOR)
        return allocate(config, num_blocks, *rest)

    monkeypatch.setattr(KVCache, "allocate", scarce)
    done = run(engine, _requests())
    assert engine.config.num_blocks <= before // 2
    assert [list(done[str(n)].token_ids) for n in range(len(PROMPTS))] == expected["llama"]


def test_a_pool_that_does_not_fit_at_the_start_is_refused_with_its_size(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> KVCache:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")

    monkeypatch.setattr(KVCache, "allocate", full)
    with pytest.raises(UsageError, match=r"kv_cache_memory_bytes: a KV pool of 0\.01 GiB does not fit \(CUDA out"):
        make_engine()
    sizes = r"0\.01 GiB beside 1008 rows of states of \d\.\d\d GiB"
    with pytest.raises(UsageError, match=rf"{sizes} does not fit \(CUDA.*lower engine\.max_num_seqs, 1000 now, or it"):
        make_engine("qwen3_5", max_num_seqs=1000)


def test_rows_that_do_not_fit_are_not_put_down_to_the_pool(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **keys: Any) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(sequence_rows, "untouched_zeros", full)
    with pytest.raises(UsageError, match=r"engine\.max_num_seqs: .* of 1000000 .*Cannot allocate.*lower it or engine"):
        make_engine(max_num_seqs=1_000_000)


@pytest.mark.parametrize("given", [None, 2**20])
def test_states_that_do_not_fit_are_put_down_to_them(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, given: int | None
) -> None:
    def full(*args: Any) -> KVCache:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")

    monkeypatch.setattr(KVCache, "allocate", full)
    states = r"engine\.max_num_seqs: 1008 rows of states, of 1000 sequences .* take 0\.01 GiB, which.*\(CUDA.*lower it$"
    with pytest.raises(UsageError, match=states):
        make_engine("mamba", max_num_seqs=1000, kv_cache_memory_bytes=given)
    with pytest.raises(UsageError, match=r"beside 1008 rows of states .*lower engine\.max_num_seqs, 1000 now"):
        make_engine("jamba", max_num_seqs=1000, kv_cache_memory_bytes=2**16, max_model_len=64)


def test_without_a_pool_steps_get_smaller_and_nothing_else(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine("mamba", max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16)
    before = engine.config.num_blocks
    with caplog.at_level(logging.WARNING):
        run(_run_out(engine, {1, 2, 3}.__contains__), _requests())
    assert (engine.config.num_blocks, engine.config.max_num_batched_tokens) == (before, 8)
    assert "KV pool" not in caplog.text


def test_a_pool_of_no_given_size_is_made_smaller_until_it_fits(
    make_engine: EngineFactory,
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    allocate, asked = KVCache.allocate, []

    def scarce(config: Any, num_blocks: int, *rest: Any) -> KVCache:
        asked.append(num_blocks)
        if num_blocks > asked[0] // 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")
        return allocate(config, num_blocks, *rest)

    monkeypatch.setattr(KVCache, "allocate", scarce)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(kv_cache_memory_bytes=None, max_model_len=64, max_num_seqs=8)
    assert engine.config.num_blocks == engine.scheduler.block_manager.num_blocks == asked[-1] <= asked[0] // 2
    assert len(asked) == len(caplog.records) + 1 == 5
    assert "out of memory; going on with a KV pool of" in caplog.text and "kv_cache_memory_bytes: " in caplog.text
    done = run(engine, _requests())
    assert [list(done[str(n)].token_ids) for n in range(len(PROMPTS))] == expected["llama"]

    asked[:] = [0]
    with pytest.raises(UsageError, match=r"does not fit \(CUDA out of memory\.\); lower it"):
        make_engine(kv_cache_memory_bytes=None, max_model_len=64, max_num_seqs=2)
    assert asked == [0, 33, 26, 20, 17]  # the least: a longest sequence beside the null block


def test_what_is_captured_anew_sees_no_shared_prefixes_and_no_larger_steps(make_engine: EngineFactory) -> None:
    engine = make_engine(max_model_len=64, max_num_seqs=8)
    runner = engine.model_runner
    table = SharedPrefixTable(8, 4, 1, HostStaging(torch.device("cpu")))
    view = table.view(8)
    view.prefix_lens_S.fill_(512)  # as the step that ran out has left it
    runner.prefixes, seen = table, []
    runner.graphs = Mock()  # they hold memory, and read the pool that is gone

    def capture() -> None:
        sizes = (runner._config.max_num_batched_tokens, runner.kv_cache.num_blocks)
        seen.append((bool(view.prefix_lens_S.any()), runner.graphs, *sizes))

    runner._capture = capture  # type: ignore[method-assign]
    runner.restart(replace(engine.config, num_blocks=20, max_num_batched_tokens=100))
    assert seen == [(False, None, 100, 20)]


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_the_old_pool_is_gone_before_a_smaller_one_is_taken(
    make_engine: EngineFactory, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(variant, max_model_len=64, max_num_seqs=8)
    run(engine, _requests()[:1])
    old, allocate, is_alive = ref(engine.model_runner.kv_cache.k[0]), KVCache.allocate, []

    def watched(*args: Any) -> KVCache:
        is_alive.append(old() is not None)
        return allocate(*args)

    monkeypatch.setattr(KVCache, "allocate", watched)
    engine.model_runner.restart(replace(engine.config, num_blocks=20, max_num_batched_tokens=100))
    assert is_alive == [False]


def test_log_probabilities_are_there_once(make_engine: EngineFactory) -> None:
    requests = _requests(logprobs=2, prompt_logprobs=1)
    plain = run(make_engine(max_model_len=64, max_num_batched_tokens=9, max_num_seqs=4), requests)
    engine = make_engine(max_model_len=64, max_num_batched_tokens=9, max_num_seqs=4)
    done = run(_run_out(engine, {3, 9, 10, 24}.__contains__), requests)
    for n, prompt in enumerate(PROMPTS):
        got, want = done[str(n)], plain[str(n)]
        assert got.logprobs is not None and want.logprobs is not None and got.prompt_logprobs is not None
        assert len(got.logprobs) == MAX_TOKENS and len(got.prompt_logprobs) == len(prompt)
        for one, other in zip(got.logprobs, want.logprobs, strict=True):
            assert one is not None and other is not None
            assert one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-4


def test_an_error_that_is_not_about_memory_stays_one(make_engine: EngineFactory) -> None:
    engine = make_engine()

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("a kernel is wrong")

    engine.model_runner.model = ModelThatRunsOut(broken, lambda _: False)
    engine.add_request(_requests()[0])
    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        engine.step()


class _SlowSteps(Steps):
    """Slower than the model, and not to be asked twice at a time."""

    is_asked = False

    def fill_mask(self, mask: memoryview) -> bool:
        assert not self.is_asked
        self.is_asked = True
        time.sleep(0.02)
        self.is_asked = False
        return super().fill_mask(mask)


def test_constraints_are_asked_again_and_see_every_token_once(make_engine: EngineFactory) -> None:
    requests = [Request(str(n), prompt, _grammar()) for n, prompt in enumerate(PROMPTS[:4])]

    def slow_factory(sampling: SamplingParams, prompt_token_ids: object = ()) -> _SlowSteps:
        assert sampling.structured_outputs is not None
        return _SlowSteps(json.loads(sampling.structured_outputs.value))

    engine = make_engine(max_model_len=64, constraint_factory=slow_factory, async_scheduling=True)
    done = run(_run_out(engine, {1, 3, 4, 6}.__contains__), requests)
    for n, prompt in enumerate(PROMPTS[:4]):
        assert list(done[str(n)].token_ids) == _constrained_by_transformers(prompt)


def _all_memory_but(rest_bytes: int) -> list[torch.Tensor]:
    """In pieces that the allocator need not round."""
    torch.cuda.empty_cache()
    pieces = []
    while (free_bytes := torch.cuda.mem_get_info()[0] - rest_bytes) >= 2**25:
        num_bytes = min(free_bytes, 2**33) // 2**21 * 2**21
        pieces.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
    return pieces


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_on_a_gpu_that_is_really_full(
    make_engine: EngineFactory, expected: list[list[int]], async_scheduling: bool, enforce_eager: bool
) -> None:
    """But for what new graphs take: the pool of so small a model is not worth mentioning."""
    settings = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "enforce_eager": enforce_eager}
    engine = make_engine(device="cuda", kv_cache_memory_bytes=2**30, async_scheduling=async_scheduling, **settings)
    before = engine.config.num_blocks
    run(engine, _requests()[:1])  # libraries have their workspaces
    ballast = _all_memory_but(2**27)

    def take_a_lot(call: int) -> bool:
        if call == 5:  # in the middle of a step
            torch.empty(2**28, dtype=torch.uint8, device="cuda")
        return False

    done = run(_run_out(engine, take_a_lot), _requests())
    assert [list(done[str(n)].token_ids) for n in range(len(PROMPTS))] == expected["llama"]
    assert engine.config.num_blocks < before
    ballast.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError(CPU_ALLOCATOR), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("out of resource: shared memory, Required: 300000"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory

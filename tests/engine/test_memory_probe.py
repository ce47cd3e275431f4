"""The widest steps really are: every token and every row of them, through the model, and nothing stays behind."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from bulkrun.engine import memory_probe
from bulkrun.engine.config import EngineConfig
from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.memory import DeviceMemory
from bulkrun.engine.memory_probe import (
    GRAPH_RECORD_BYTES,
    graph_bytes,
    measure_cuda,
    run_widest_steps,
    widest_prompts,
)
from bulkrun.engine.step.model_runner import ModelRunner
from bulkrun.errors import UsageError
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.recurrent_state import bytes_per_row
from bulkrun.ops.triton.partial_results import CHUNK
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, run
from tests.engine.test_out_of_memory import ModelThatRunsOut
from tests.models.tiny_models import VARIANTS


class WatchedModel:
    """A model that remembers how wide its steps were."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.tokens: list[int] = []
        self.longest: list[int] = []
        self.logits: list[int] = []
        self.pools: list[weakref.ref[torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, kv_cache: KVCache, meta: Any, *rest: Any
    ) -> torch.Tensor:
        self.tokens.append(ids_T.numel())
        self.longest.append(meta.max_context_len)
        self.pools.append(weakref.ref(kv_cache.k[0]))
        return self._model(ids_T, positions_T, kv_cache, meta, *rest)

    def compute_logits(self, hidden_SE: torch.Tensor, **how: bool) -> torch.Tensor:
        self.logits.append(hidden_SE.shape[0])
        return self._model.compute_logits(hidden_SE, **how)


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(1, 1), (5, 5), (3, 100), (7, 29), (4, 400)])
def test_a_step_of_every_token_and_one_behind_the_longest_context(
    make_engine: EngineFactory, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    engine = make_engine(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=150, block_size=4
    )
    model = WatchedModel(engine.model_runner.model)
    run_widest_steps(model, engine.config)
    assert model.tokens == [max_num_batched_tokens, max_num_seqs]
    assert model.logits == [max_num_seqs, max_num_seqs]
    assert model.longest[1] == 149
    gc.collect()
    assert all(pool() is None for pool in model.pools)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model_can_take_them(make_engine: EngineFactory, variant: str) -> None:
    engine = make_engine(variant, max_num_seqs=3, max_num_batched_tokens=17, max_model_len=90)
    run_widest_steps(engine.model_runner.model, engine.config)


def test_one_token_sequences_come_first(make_engine: EngineFactory) -> None:
    batch = widest_prompts(make_engine(max_num_seqs=5, max_num_batched_tokens=7).config)
    assert batch.num_scheduled_tokens == [1, 1, 1, 2, 2]
    assert batch.num_decode_seqs == 3


def test_no_sequence_is_longer_than_the_model_takes(make_engine: EngineFactory) -> None:
    config = replace(make_engine(max_num_seqs=2).config, max_model_len=20, max_num_batched_tokens=100)
    assert widest_prompts(config).num_scheduled_tokens == [19, 19]


def test_what_a_step_takes_is_measured_from_where_it_begins(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The highest mark since then, less what was there; and what others have is seen once torch has given back."""
    calls: list[str] = []
    answers = {"memory_reserved": 5, "max_memory_reserved": 25, "mem_get_info": (60, 100)}
    for name in (*answers, "empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: (calls.append(name), answers.get(name))[1])
    monkeypatch.setattr(memory_probe, "run_widest_steps", lambda *_: calls.append("steps"))
    engine = make_engine(enforce_eager=True)
    assert measure_cuda(engine.model_runner.model, engine.config) == DeviceMemory(100, 60, step_bytes=20)
    before, after = (
        ["empty_cache", "reset_peak_memory_stats", "memory_reserved"],
        ["synchronize", "max_memory_reserved"],
    )
    assert calls == [*before, "steps", *after, "empty_cache", "mem_get_info"]


@pytest.mark.parametrize("variant", ["llama", "mamba"])  # of the second nothing attends in parts
def test_captured_steps_are_reserved_for_unless_there_are_none(make_engine: EngineFactory, variant: str) -> None:
    engine = make_engine(variant, max_num_seqs=8, max_num_batched_tokens=512)
    model, config = engine.model_runner.model, engine.config
    assert 512 * 2**20 < graph_bytes(model, config, 2**30) < 2**30 + 100 * GRAPH_RECORD_BYTES
    assert graph_bytes(model, replace(config, enforce_eager=True), 2**30) == 0


def test_states_are_not_reserved_for_twice(make_engine: EngineFactory) -> None:
    """They are in what the widest step took, and no graph has its own."""
    engine = make_engine("qwen3_5", max_num_seqs=8, max_num_batched_tokens=256)
    model, config = engine.model_runner.model, engine.config
    state_bytes = config.num_state_rows * bytes_per_row(model.config, torch.float32)
    activations = graph_bytes(model, config, state_bytes + 2**20) - graph_bytes(model, config, 0)
    assert activations == 2**20 * 256 // config.max_num_batched_tokens


def test_so_are_partial_results_of_long_contexts(make_engine: EngineFactory) -> None:
    """As many as a captured step has room for, whatever its share of the widest step's tokens."""
    engine = make_engine(max_num_seqs=64, max_num_batched_tokens=512)
    short, long = (
        graph_bytes(engine.model_runner.model, replace(engine.config, max_model_len=length), 0)
        for length in (1024, 1024 + 100 * CHUNK)
    )
    model = engine.model_runner.model.config
    assert long - short == 64 * 100 * model.num_heads * (model.head_dim + 1) * 4


def test_steps_that_do_not_fit_are_refused_with_the_keys(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=17, max_model_len=90)
    model = ModelThatRunsOut(engine.model_runner.model, lambda _: True)
    with pytest.raises(UsageError, match=r"batched_tokens: .* 17 tokens and 3 sequences .*engine\.max_num_seqs"):
        run_widest_steps(model, engine.config)


def test_so_they_are_where_the_allocator_says_nothing(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own MemoryError has no message: an IndexError hid what to lower."""

    def run_out(self: Any, _: Any) -> Any:
        raise MemoryError

    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=17, max_model_len=90)
    monkeypatch.setattr(ModelRunner, "compute", run_out)
    with pytest.raises(UsageError, match=r"engine\.max_model_len \(MemoryError\)"):
        run_widest_steps(engine.model_runner.model, engine.config)


@pytest.mark.gpu
def test_on_a_gpu_the_pool_takes_what_the_step_leaves(model_dir) -> None:
    engine = LLMEngine.from_model_dir(model_dir("llama"), device="cuda", dtype="bfloat16")
    config: EngineConfig = engine.config
    memory = measure_cuda(engine.model_runner.model, config)
    logits_bytes = config.max_num_seqs * engine.model_runner.model.config.vocab_size * 4
    assert logits_bytes < memory.step_bytes < memory.total_bytes
    assert torch.cuda.memory_allocated() < 0.9 * memory.total_bytes


@pytest.mark.gpu
def test_on_a_gpu_the_next_engine_of_a_process_has_the_room_of_the_first(model_dir) -> None:
    """As a worker loads the model again for the rows of another adapter."""
    blocks = []
    for _ in range(3):
        engine = LLMEngine.from_model_dir(model_dir("llama"), device="cuda", dtype="bfloat16")
        run(engine, [Request("a", (5, 6, 7), SamplingParams(max_tokens=4))])
        blocks.append(engine.config.num_blocks)
        del engine
        gc.collect()
    assert min(blocks) > 0.98 * blocks[0]

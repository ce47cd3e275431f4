"""Padded steps against transformers. Without a GPU a "graph" is its function called again over the same buffers.

Everything but capturing itself is the same: shapes, padding, what larger steps before left in the buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.step import model_runner, shared_prefixes
from bulkrun.engine.step.cuda_graphs import CudaCapture, Forward, StepGraphs, capture_stream
from bulkrun.engine.step.shared_prefixes import SharedPrefixTable
from bulkrun.engine.step.step_shape import CapturedShapes
from bulkrun.ops import dispatch
from bulkrun.ops.triton import partial_results
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, generate_with_transformers, run
from tests.models.tiny_models import VOCAB_SIZE

MAX_TOKENS = 9
SHARED = [3 + 11 * n % (VOCAB_SIZE - 3) for n in range(17)]
PROMPTS = [[*SHARED, *(3 + (7 * n + 5 * k) % (VOCAB_SIZE - 3) for n in range(2 + 5 * k))] for k in range(5)]
PROMPTS += [[5], [9, 8], [*range(20, 71)]]
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


def capture_steps(engine: LLMEngine, *, num_tokens: int | None = None, shares_prefixes: bool = False) -> Counter[bool]:
    """Give the engine graphs, and NaN where padding is stored; counts replays, by whether a step had prompts in it."""
    runner, config, replays = engine.model_runner, engine.config, Counter[bool]()
    for cache in (*runner.kv_cache.k, *runner.kv_cache.v):
        cache[0] = math.nan
    if shares_prefixes:
        runner.prefixes = SharedPrefixTable(config.max_num_seqs, config.block_size, 4, runner.rows.staging)

    def capture(forward: Forward) -> Forward:
        shape = forward.args[0]  # type: ignore[attr-defined]

        def replay() -> torch.Tensor:
            replays[shape.num_chunk_seqs > 0] += 1
            return forward()

        return replay

    shapes = CapturedShapes(config.max_num_seqs, num_tokens or config.max_num_batched_tokens, config.max_model_len)
    runner.graphs = StepGraphs(
        runner.model,
        runner.kv_cache,
        shapes,
        max_blocks_per_seq=config.max_blocks_per_seq,
        prefixes=runner.prefixes,
        capture=capture,
    )
    assert runner.graphs.num_captured == len(list(shapes))
    return replays


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return {}


def expected_of(expected: dict[str, list[list[int]]], variant: str) -> list[list[int]]:
    if variant not in expected:
        expected[variant] = [generate_with_transformers(variant, p, MAX_TOKENS, eos_token_id=None) for p in PROMPTS]
    return expected[variant]


def check(engine: LLMEngine, order: list[int], expected: list[list[int]]) -> None:
    completions = run(engine, [Request(f"{n}", PROMPTS[i], PARAMS) for n, i in enumerate(order)])
    assert [list(completions[f"{n}"].token_ids) for n in range(len(order))] == [expected[i] for i in order]


@pytest.mark.parametrize(
    "variant", ["llama", "mistral_sliding", "qwen3_moe", "gpt_oss", "gemma2", "gemma3", "smollm3", "phi3"]
)
def test_padded_steps_have_transformers_tokens(
    make_engine: EngineFactory, expected: dict[str, list[list[int]]], variant: str
) -> None:
    engine = make_engine(variant, max_num_batched_tokens=70, max_num_seqs=6, enable_prefix_caching=False)
    replays = capture_steps(engine)
    check(engine, list(range(len(PROMPTS))), expected_of(expected, variant))
    assert replays[False] > 5
    assert replays[True] > 0


@settings(max_examples=12)
@given(
    order=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 9),
    num_tokens=st.sampled_from([9, 33, 40, 150]),
    async_scheduling=st.booleans(),
)
def test_any_mix_of_steps(
    make_engine: EngineFactory,
    expected: dict[str, list[list[int]]],
    order: list[int],
    max_num_seqs: int,
    num_tokens: int,
    async_scheduling: bool,
) -> None:
    """With the prefix cache too, whose copies of prompts' ends make steps that no graph has room for."""
    engine = make_engine(
        "qwen3", max_num_batched_tokens=num_tokens, max_num_seqs=max_num_seqs, async_scheduling=async_scheduling
    )
    capture_steps(engine)
    check(engine, order, expected_of(expected, "qwen3"))


def test_a_cpu_and_enforce_eager_have_no_graphs(make_engine: EngineFactory) -> None:
    engine = make_engine(enforce_eager=True)
    assert engine.config.enforce_eager
    assert engine.model_runner.graphs is None
    assert make_engine().model_runner.graphs is None


def test_a_model_that_waits_for_its_device_is_not_captured(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_engine().model_runner
    monkeypatch.setattr(runner, "_config", dataclasses.replace(runner._config, device=torch.device("cuda")))
    monkeypatch.setattr(type(runner.model), "is_capturable", False)
    monkeypatch.setattr(model_runner, "CudaCapture", lambda device: pytest.fail("captured"))
    assert runner._capture() is None


@pytest.fixture(autouse=True)
def _stream_of_this_test() -> Iterator[None]:
    capture_stream.cache_clear()
    yield
    capture_stream.cache_clear()


class FakeCuda:
    """Writes down what is asked of a device that is not there."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def CUDAGraph(self) -> FakeCuda:
        return self

    def Stream(self, device: object) -> FakeCuda:
        return self

    def current_stream(self) -> FakeCuda:
        return self

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.calls.append(name)


def test_kernels_are_compiled_before_they_are_captured_and_a_failed_capture_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    capture = CudaCapture(torch.device("cuda"))

    def forward() -> torch.Tensor:
        fake.calls.append("forward")
        if fake.calls.count("forward") == 4:
            raise ValueError("not capturable")
        return torch.ones(1)

    replay = capture(forward)
    first = ["wait_stream", "forward", "synchronize", "empty_cache", "capture_begin", "forward", "capture_end"]
    assert fake.calls == ["graph_pool_handle", *first, "wait_stream"]
    assert replay().item() == 1
    assert fake.calls[-1] == "replay"
    with pytest.raises(ValueError, match="not capturable"):
        capture(forward)
    assert fake.calls[-1] == "capture_end"


def test_what_made_a_capture_fail_is_said_and_not_that_it_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()

    def capture_end() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    fake.capture_end = capture_end  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "cuda", fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda index, pool, name=name: fake.calls.append(name), raising=False)

    def forward() -> torch.Tensor:
        fake.calls.append("forward")
        if fake.calls.count("forward") == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(1)

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        CudaCapture(torch.device("cuda", 0))(forward)
    assert fake.calls[-2:] == ["_cuda_endAllocateToPool", "_cuda_releasePool"]


@pytest.mark.parametrize("error", [RuntimeError("not permitted when capturing"), torch.OutOfMemoryError("no room")])
def test_a_model_that_cannot_be_captured_runs_without_graphs(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Running out of memory is answered by a smaller pool instead."""

    def fail(*args: object, **options: object) -> None:
        raise error

    runner = make_engine().model_runner
    monkeypatch.setattr(runner, "_config", dataclasses.replace(runner._config, device=torch.device("cuda")))
    monkeypatch.setattr(model_runner, "CudaCapture", fail)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            runner._capture()
    else:
        assert runner._capture() is None
        assert "no CUDA graphs" in caplog.text and "not permitted when capturing" in caplog.text


@pytest.mark.parametrize(
    ("capability", "is_capturable"), [((9, 0), True), ((10, 0), True), ((12, 0), False), ((8, 9), False)]
)
def test_experts_are_captured_where_torch_multiplies_them_without_waiting(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_capturable: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert make_engine("qwen3_moe", dtype="bfloat16").model_runner.model.is_capturable == is_capturable
    assert not make_engine("qwen3_moe", dtype="float32").model_runner.model.is_capturable
    assert make_engine("qwen3").model_runner.model.is_capturable


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted")
def test_padded_steps_with_shared_prefixes_through_the_kernels(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks of context, a prefix that ends in the middle of one; long prompts go through the references."""
    interprets = False
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: interprets)
    monkeypatch.setattr(partial_results, "CHUNK", 128)
    for name, value in (("MIN_GROUP_SIZE", 2), ("MIN_PREFIX_LEN", 64), ("MIN_SAVED_TOKENS", 1)):
        monkeypatch.setattr(shared_prefixes, name, value)
    prefix = [3 + 17 * n % (VOCAB_SIZE - 3) for n in range(200)]
    prompts = [[*prefix, 30, 31], [9] * 30, [*prefix, 40], [*prefix[:100], 50, 51], [7, 8, 9]]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine = make_engine("llama_mqa", max_num_batched_tokens=600, max_num_seqs=5)
    replays = capture_steps(engine, num_tokens=32, shares_prefixes=True)
    table = engine.model_runner.prefixes
    assert table is not None
    groups, completions = [], []
    for step in range(4):
        for i in range(4) if step == 0 else [4] if step == 2 else []:
            engine.add_request(Request(str(i), prompts[i], params))
        interprets = step > 0
        completions += engine.step()
        groups += table.groups
    interprets = False
    while engine.has_unfinished():
        completions += engine.step()
    for completion in completions:
        prompt = prompts[int(completion.request_id)]
        assert list(completion.token_ids) == generate_with_transformers("llama_mqa", prompt, 4, eos_token_id=None)
    assert ([0, 2], 192) in groups
    assert replays[False] > 0
    assert replays[True] == 1

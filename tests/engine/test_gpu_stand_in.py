"""The engine's whole GPU path on a stand-in for a GPU: captured steps, copies on their way, Triton's kernels.

Greedy tokens equal those of transformers, drawn ones those of the references; nothing waits for the device but for
tokens. On a machine with a GPU, tests/engine/test_on_gpu.py asks the same of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun import ops
from bulkrun.engine.step import shared_prefixes
from bulkrun.engine.step.cuda_graphs import StepGraphs
from bulkrun.engine.step.step_shape import StepShape
from bulkrun.ops.matmul.fp8_linear import quantize_rows
from bulkrun.ops.triton import fp8_experts, fp8_linear, partial_results
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, generate_with_transformers, run
from tests.engine.gpu_stand_in import GpuStandIn, gpu_stand_in
from tests.engine.step.test_token_lists import lists_factory
from tests.engine.step.test_token_masks import _grammar, steps_factory
from tests.engine.test_forced_tokens import forcing_factory
from tests.models.fake_quantized import assert_best, with_fake_quantized_projections
from tests.models.tiny_models import VARIANTS, VOCAB_SIZE

pytestmark = [
    pytest.mark.usefixtures("watched_kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered"
    ),  # hashes wrap; NaN is everywhere
]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
DRAWN = [
    SamplingParams(max_tokens=5, temperature=0.9, top_k=30, top_p=0.9, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=5, temperature=0.8, min_p=0.05, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=3),
]
SMALL = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "max_model_len": 64}  # few sizes to capture


def prompts() -> list[list[int]]:
    """Two that begin alike, one token, and one that takes more than a step."""
    alike = [3 + 11 * n % (VOCAB_SIZE - 3) for n in range(17)]
    return [[*alike, 30, 31], [*alike, 40], [5], [3 + 7 * n % (VOCAB_SIZE - 3) for n in range(31)]]


def greedy_requests() -> list[Request]:
    return [Request(f"greedy{i}", prompt, GREEDY) for i, prompt in enumerate(prompts())]


def one_token() -> Request:
    """The shortest of them: kernels are interpreted."""
    return greedy_requests()[2]


def drawn_requests() -> list[Request]:
    return [Request(f"drawn{i}", prompts()[i], params, seed=i + 7) for i, params in enumerate(DRAWN)]


def tokens(engine: Any, requests: list[Request]) -> dict[str, list[int]]:
    return {request_id: list(completion.token_ids) for request_id, completion in run(engine, requests).items()}


def by_transformers(variant: str, requests: list[Request]) -> dict[str, list[int]]:
    def greedy(prompt: list[int]) -> list[int]:
        return generate_with_transformers(variant, prompt, GREEDY.max_tokens or 0, eos_token_id=None)

    return {request.request_id: greedy(list(request.prompt_token_ids)) for request in requests}


def test_captured_steps_give_the_tokens_of_transformers_and_the_references(make_engine: EngineFactory) -> None:
    drawn = drawn_requests()
    expected = by_transformers("qwen3", greedy_requests()) | tokens(make_engine("qwen3"), drawn)
    with gpu_stand_in() as gpu:
        engine = make_engine("qwen3", device="cuda", **SMALL)
        gpu.waits.clear()
        assert tokens(engine, [*greedy_requests(), *drawn]) == expected
    assert gpu.num_replays > engine.stats().num_steps // 2  # the others copy the end of a shared prompt
    assert not gpu.waits


@pytest.mark.parametrize(
    "variant",
    ["qwen3_5", "nemotron_h", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lfm2_biases", "granite_h"))],
)
def test_captured_steps_bring_states_forward(make_engine: EngineFactory, variant: str) -> None:
    """With a prefix long enough that its state is kept."""
    asked = [one_token(), *(Request(f"long{n}", [*range(3, 38), 90 + n], GREEDY) for n in range(2))]
    expected = by_transformers(variant, asked) | tokens(make_engine(variant), asked[:1])  # written outside, too
    with gpu_stand_in() as gpu:
        engine = make_engine(variant, device="cuda", **SMALL)
        gpu.waits.clear()
        assert tokens(engine, asked) == expected
    assert engine.stats().num_cached_tokens == 32
    assert gpu.num_replays > engine.stats().num_steps // 2
    assert not gpu.waits


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_steps_with_experts_in_fp8_are_captured(
    make_engine: EngineFactory, model_dir: Callable[[str], Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are quantized by the references, for the interpreter does it wrong (tests/ops/triton/test_fp8.py)."""
    model_dir(variant)  # see below
    monkeypatch.setattr(ops, "quantize_rows", quantize_rows)
    monkeypatch.setattr(fp8_linear, "quantize_rows", quantize_rows)
    monkeypatch.setattr(fp8_experts, "quantize_rows", quantize_rows)
    monkeypatch.setattr(fp8_linear, "_MULTIPLE", 7)  # torch's scaled product is a GPU's alone
    model, asked = with_fake_quantized_projections(variant), greedy_requests()[1:]
    with gpu_stand_in() as gpu:
        engine = make_engine(variant, device="cuda", quantization="fp8", **SMALL)
        gpu.waits.clear()
        found = tokens(engine, asked)
    assert gpu.num_replays > engine.stats().num_steps // 2
    assert not gpu.waits
    for request in asked:
        assert_best(model, request.prompt_token_ids, found[request.request_id])


def test_forced_tokens_reach_captured_steps(make_engine: EngineFactory) -> None:
    steps = [[50], [51], [7, 8, 9], [60], [61], [62], list(range(40, 60)), [80]]
    requests = [Request("bound", [5, 6, 7], _grammar(steps)), Request("free", [5], GREEDY)]
    expected = tokens(make_engine(constraint_factory=steps_factory), requests)
    sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 2, "max_model_len": 32}
    with gpu_stand_in() as gpu:
        engine = make_engine(device="cuda", constraint_factory=forcing_factory, **sizes)
        assert tokens(engine, requests) == expected
    assert engine.stats().num_forced_tokens == 7
    assert gpu.num_replays > 1


def test_lists_of_words_and_tokens_hold_in_captured_steps(make_engine: EngineFactory) -> None:
    only = SamplingParams(max_tokens=5, temperature=0.8, ignore_eos=True, allowed_token_ids=[5, 9], bad_words=["5 9"])
    words = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, bad_words=["7", "30 31"])
    requests = [Request("only", [5, 6, 7], only), Request("words", [5], words), Request("free", [5], GREEDY)]
    expected = tokens(make_engine(constraint_factory=lists_factory), requests)
    with gpu_stand_in() as gpu:
        engine = make_engine(
            device="cuda", constraint_factory=lists_factory, max_num_batched_tokens=8, max_num_seqs=3, max_model_len=32
        )
        gpu.waits.clear()
        assert tokens(engine, requests) == expected
    assert gpu.num_replays > 1
    assert not gpu.waits


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"enforce_eager": True}, {"deterministic": True}, {"async_scheduling": False}]
)
def test_drawn_tokens_do_not_depend_on_how_steps_are_launched(
    make_engine: EngineFactory, settings: dict[str, Any]
) -> None:
    expected = tokens(make_engine("llama"), drawn_requests())
    with gpu_stand_in():
        assert tokens(make_engine("llama", device="cuda", **SMALL, **settings), drawn_requests()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_family_gives_the_tokens_of_transformers(
    make_engine: EngineFactory, model_dir: Callable[[str], Path], variant: str
) -> None:
    model_dir(variant)  # on the stand-in, whose new memory is NaN, other weights would be drawn
    expected = by_transformers(variant, greedy_requests())
    with gpu_stand_in():
        assert tokens(make_engine(variant, device="cuda", **SMALL), greedy_requests()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama_mqa", "minicpm3"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_shared_prefixes_in_captured_steps(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool, variant: str
) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_GROUP_SIZE", 2)
    monkeypatch.setattr(shared_prefixes, "MIN_PREFIX_LEN", 64)
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(partial_results, "CHUNK", 128)
    alike = [3 + 17 * n % (VOCAB_SIZE - 3) for n in range(200)]
    starts = ([*alike, 30, 31], [9] * 30, [*alike, 40], [*alike[:100], 50, 51])
    requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(starts)]
    expected = by_transformers(variant, requests)
    sizes = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "max_model_len": 256}
    with gpu_stand_in():
        engine = make_engine(variant, device="cuda", enforce_eager=enforce_eager, **sizes)
        assert tokens(engine, requests) == expected


def test_a_pool_that_the_stand_in_measures(make_engine: EngineFactory) -> None:
    """The probe before it waits, and may."""
    expected = by_transformers("llama", [one_token()])
    with gpu_stand_in(memory_bytes=2**24) as gpu:
        engine = make_engine(device="cuda", kv_cache_memory_bytes=None, enforce_eager=True, **SMALL)
        assert gpu.waits["synchronize"] > 0
        assert tokens(engine, [one_token()]) == expected


def test_after_a_capture_that_failed_steps_are_launched_and_memory_is_given_back(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = StepGraphs._forward
    expected = by_transformers("llama", [one_token()])
    with gpu_stand_in() as gpu:

        def void(graphs: StepGraphs, shape: StepShape) -> torch.Tensor:
            gpu.void_capture()
            return forward(graphs, shape)

        monkeypatch.setattr(StepGraphs, "_forward", void)
        engine = make_engine(device="cuda", **SMALL)
        assert "no CUDA graphs, steps are launched kernel by kernel" in caplog.text
        engine.model_runner.restart(engine.config)
        assert tokens(engine, [one_token()]) == expected


class TestStandIn:
    def test_new_memory_is_not_a_number(self) -> None:
        with gpu_stand_in():
            assert torch.empty(3, device="cuda").isnan().all()
            assert torch.zeros(3, device="cuda").new_empty(2).isnan().all()

    def test_a_copy_to_the_host_is_there_once_its_event_is(self) -> None:
        with gpu_stand_in():
            copy = torch.ones(2, device="cuda").to("cpu", non_blocking=True)
            assert copy.isnan().all()
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()
            assert copy.tolist() == [1.0, 1.0]

    def test_host_and_device_do_not_mix(self) -> None:
        with gpu_stand_in(), pytest.raises(AssertionError, match="host and device"):
            torch.ones(2, device="cuda") + torch.ones(2)

    def test_waiting_is_counted_and_wrong_while_capturing(self) -> None:
        with gpu_stand_in() as gpu:
            numbers = torch.ones(2, device="cuda")
            numbers.tolist()
            assert gpu.waits == {"tolist": 1}
            torch.cuda.CUDAGraph().capture_begin()
            with pytest.raises(AssertionError, match="while a graph is captured"):
                numbers.sum().item()

    def test_a_number_of_the_host_waits_where_torch_copies_it(self) -> None:
        with gpu_stand_in() as gpu:
            numbers, places = torch.ones(2, 3, device="cuda"), torch.zeros(1, dtype=torch.int64).pin_memory()
            places = places.to("cuda", non_blocking=True)
            numbers[1] = numbers[:, 1:] = 2.0  # fills
            numbers[places] = numbers[places] + 1.0
            assert not gpu.waits
            numbers[places] = numbers[0, 1] = 2.0
            torch.tensor([1], device="cuda")
            assert gpu.waits == {"__setitem__ of a number of the host": 2, "tensor": 1}
            assert numbers[places.sum()].shape == (3,)
            assert gpu.waits["__getitem__ at a place that the device knows"] == 1

    def test_only_copies_from_pinned_memory_are_left_to_the_device(self) -> None:
        with gpu_stand_in() as gpu:
            ordinary, target = torch.ones(2), torch.zeros(2, device="cuda")
            target.copy_(ordinary.pin_memory(), non_blocking=True)
            assert not gpu.waits
            target.copy_(ordinary.pin_memory())
            ordinary.to("cuda", non_blocking=True)
            assert gpu.waits == {"copy from ordinary memory": 2}

    def test_a_graph_computes_again_from_its_inputs_of_now(self) -> None:
        with gpu_stand_in():
            numbers = torch.ones(2, device="cuda")
            target, graph = torch.zeros(2, device="cuda"), torch.cuda.CUDAGraph()
            graph.capture_begin()
            doubled = numbers.to(torch.float64) * 2
            target.copy_(doubled[:1])
            graph.capture_end()
            numbers.fill_(3.0)
            graph.replay()
            assert target.tolist() == [6.0, 6.0]
            assert doubled.isnan().all()


def test_the_stand_in_is_gone_afterwards() -> None:
    with gpu_stand_in() as gpu:
        assert isinstance(gpu, GpuStandIn)
    assert not torch.cuda.is_available()

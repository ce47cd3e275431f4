"""Captured steps on a CUDA device: float32 tokens are transformers', bf16 ones those of the same steps uncaptured.

Skipped where there is no GPU (CI has none). `python -m pytest -m gpu` runs them where there is one.
"""

from __future__ import annotations

import pytest
import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.step.cuda_graphs import StepGraphs
from bulkrun.engine.step.step_shape import CapturedShapes
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, generate_with_transformers, run
from tests.engine.step.test_cuda_graphs import MAX_TOKENS, PARAMS, PROMPTS
from tests.models.tiny_models import VARIANTS, VOCAB_SIZE, known

pytestmark = pytest.mark.gpu
FAST = known(list(VARIANTS)[: list(VARIANTS).index("gpt2")])  # the general path is behind it
SIZES = {"max_num_batched_tokens": 70, "max_num_seqs": 6, "device": "cuda"}


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def requests() -> list[Request]:
    return [Request(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]


def tokens_of(engine: LLMEngine, wanted: list[Request]) -> dict[str, list[int]]:
    return {request_id: list(completion.token_ids) for request_id, completion in run(engine, wanted).items()}


def count_replays(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Token counts of the shapes replayed, as they come."""
    graphs, replayed = engine.model_runner.graphs, []
    assert graphs is not None
    replay = graphs.replay

    def counted(shape):  # type: ignore[no-untyped-def]
        replayed.append(shape.num_tokens)
        return replay(shape)

    monkeypatch.setattr(graphs, "replay", counted)
    return replayed


def uncaptured(engine: LLMEngine) -> LLMEngine:
    """The same padded steps, launched kernel by kernel."""
    runner, config = engine.model_runner, engine.config
    runner.graphs = StepGraphs(
        runner.model,
        runner.kv_cache,
        CapturedShapes(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len),
        max_blocks_per_seq=config.max_blocks_per_seq,
        prefixes=runner.prefixes,
        capture=lambda forward: forward,
    )
    return engine


@pytest.mark.parametrize("variant", FAST)
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_captured_float32_tokens_are_transformers(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, variant: str, enable_prefix_caching: bool
) -> None:
    engine = make_engine(variant, **SIZES, enable_prefix_caching=enable_prefix_caching)
    is_captured = engine.model_runner.graphs is not None
    assert is_captured == engine.model_runner.model.is_capturable
    replayed = count_replays(engine, monkeypatch) if is_captured else []
    got = tokens_of(engine, requests())
    for request in requests():
        expected = generate_with_transformers(variant, request.prompt_token_ids, MAX_TOKENS, eos_token_id=None)
        assert got[request.request_id] == expected
    assert (len(replayed) > 5) == is_captured


@pytest.mark.parametrize(
    ("variant", "quantization"), [*((name, None) for name in FAST), ("gpt_oss", "fp8"), ("qwen3_moe", "fp8")]
)
def test_captured_bfloat16_tokens_are_those_of_the_same_steps_uncaptured(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, variant: str, quantization: str | None
) -> None:
    """To the bit: the same kernels over the same shapes, experts included."""
    settings = SIZES | {"dtype": "bfloat16", "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    settings |= {"quantization": quantization}
    captured, plain = make_engine(variant, **settings), uncaptured(make_engine(variant, **settings))
    if not captured.model_runner.model.is_capturable:
        pytest.skip("torch has no grouped product for this GPU")
    replayed = count_replays(captured, monkeypatch)
    drawn = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, ignore_eos=True)
    wanted = [*requests(), *(Request(f"drawn{i}", prompt, drawn, seed=i) for i, prompt in enumerate(PROMPTS))]
    assert tokens_of(captured, wanted) == tokens_of(plain, wanted)
    assert len(set(replayed)) > 2


def test_enforce_eager_captures_nothing(make_engine: EngineFactory) -> None:
    assert make_engine(**SIZES, enforce_eager=True).model_runner.graphs is None


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_rows_behind_a_long_shared_prefix_have_transformers_tokens(
    make_engine: EngineFactory, enforce_eager: bool
) -> None:
    prefix = [3 + 17 * n % (VOCAB_SIZE - 3) for n in range(400)]
    prompts = [[*prefix, *range(3, 5 + i % 9), 20 + i] for i in range(40)]
    settings = {"device": "cuda", "max_num_seqs": 32, "max_num_batched_tokens": 600, "enforce_eager": enforce_eager}
    engine = make_engine("qwen3", **settings, block_size=16, kv_cache_memory_bytes=2**26)
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
    table = engine.model_runner.prefixes
    assert table is not None
    largest, got = 0, {}
    while engine.has_unfinished():
        got |= {completion.request_id: list(completion.token_ids) for completion in engine.step()}
        largest = max([largest, *(len(members) for members, _ in table.groups)])
    assert largest > 20
    for i in range(0, 40, 7):
        assert got[str(i)] == generate_with_transformers("qwen3", prompts[i], 8, eos_token_id=None)

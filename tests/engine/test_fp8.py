"""fp8 keys and values, fp8 weights: the tokens of transformers over a model that was rounded the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bulkrun.engine.config import EngineConfig
from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.kv_cache import bytes_per_block
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.matmul import fp8
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.request import Request, SamplingParams
from bulkrun.settings import EngineArgs
from tests.engine.conftest import EngineFactory, expect_short_outputs, run
from tests.models.fake_quantized import generate, round_keys_and_values, with_fake_quantized_projections
from tests.models.tiny_models import VOCAB_SIZE, known, make_tiny_model

NUM_TOKENS = 9  # over two ends of blocks; the oracle rounds every input of every product anew
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
FAMILIES = ["llama_biases", "mistral_sliding", "qwen3", "phi3", "gemma2", "olmo2", "granite"]
MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss"]


@pytest.fixture
def without_compiled_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The torch references, where a compiler is there."""
    monkeypatch.setenv("BULKRUN_CPU_OPS", "reference")
    compiled_ops.cache_clear()
    yield
    compiled_ops.cache_clear()


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(4)
    lengths = (1, 7, 16, 33, 61)
    return [
        Request(str(i), torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(), GREEDY)
        for i, length in enumerate(lengths)
    ]


def tokens(engine: LLMEngine) -> list[list[int]]:
    completions = run(engine, requests())
    return [list(completions[request.request_id].token_ids) for request in requests()]


@pytest.mark.parametrize("variant", [*FAMILIES, *MIXTURES])
def test_fp8_weights_give_the_tokens_of_a_model_quantized_by_hand(make_engine: EngineFactory, variant: str) -> None:
    model = with_fake_quantized_projections(variant)
    engine = make_engine(variant, quantization="fp8", max_num_batched_tokens=29, max_num_seqs=4)
    assert tokens(engine) == [generate(model, request.prompt_token_ids, NUM_TOKENS) for request in requests()]


@pytest.mark.parametrize(
    "variant", [*FAMILIES, *known(["gemma3n_whole_panels", "gemma4", "gemma4_whole_panels"]), "deepseek_v3", "gpt2"]
)
def test_fp8_keys_and_values_give_the_tokens_of_attention_over_rounded_ones(
    make_engine: EngineFactory, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(variant, kv_cache_dtype="fp8", max_num_batched_tokens=29, max_num_seqs=4)
    ours = tokens(engine)
    assert engine.model_runner.kv_cache.k[0].dtype == FP8
    model = make_tiny_model(variant)
    round_keys_and_values(monkeypatch, model)
    assert ours == [generate(model, request.prompt_token_ids, NUM_TOKENS) for request in requests()]


def test_the_references_give_them_too(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, without_compiled_ops: None
) -> None:
    engine = make_engine("qwen3", kv_cache_dtype="fp8", max_num_batched_tokens=29, max_num_seqs=4)
    ours = tokens(engine)
    assert engine.model_runner.model.layer_stack is None
    model = make_tiny_model("qwen3")
    round_keys_and_values(monkeypatch, model)
    assert ours == [generate(model, request.prompt_token_ids, NUM_TOKENS) for request in requests()]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("variant", ["llama", "mistral_sliding"])
def test_shared_prefixes_and_preemption_change_no_token(
    make_engine: EngineFactory,
    model_dir: Callable[[str], Path],
    variant: str,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = list(range(3, 30))
    may_stop = SamplingParams(max_tokens=17, temperature=0.0)
    asked = [Request(str(i), [*start[: 27 - i % 3], 40 + i], may_stop) for i in range(8)]
    block_bytes = bytes_per_block(ModelConfig.from_dir(model_dir(variant)), 4, FP8)
    engine = make_engine(
        variant, kv_cache_dtype="fp8", kv_cache_memory_bytes=24 * block_bytes, max_model_len=60,
        deterministic=deterministic,
    )  # fmt: skip
    engine._sequences.eos_token_ids = frozenset([VOCAB_SIZE])  # could stop, so admission dares more; never does
    expect_short_outputs(engine.scheduler)
    ours = run(engine, asked)
    assert engine.stats().num_preemptions > 0 and engine.stats().num_cached_tokens > 0
    model = make_tiny_model(variant)
    round_keys_and_values(monkeypatch, model)
    for request in asked:
        assert list(ours[request.request_id].token_ids) == generate(model, request.prompt_token_ids, 17)


def test_both_together(make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_fake_quantized_projections("qwen3")
    engine = make_engine("qwen3", quantization="fp8", kv_cache_dtype="fp8", max_num_seqs=3)
    ours = tokens(engine)
    round_keys_and_values(monkeypatch, model)
    assert ours == [generate(model, request.prompt_token_ids, NUM_TOKENS) for request in requests()]


def test_samples_of_one_prompt_share_and_copy_fp8_blocks(make_engine: EngineFactory) -> None:
    drawn = SamplingParams(max_tokens=9, temperature=0.9, ignore_eos=True)
    prompt = list(range(5, 24))
    samples = [Request(str(seed), prompt, drawn, seed=seed) for seed in range(4)]
    together = run(make_engine(kv_cache_dtype="fp8"), samples)
    for request in samples:
        alone = run(make_engine(kv_cache_dtype="fp8", max_num_seqs=1, enable_prefix_caching=False), [request])
        assert alone[request.request_id].token_ids == together[request.request_id].token_ids


def test_blocks_of_a_row_whose_numbers_are_broken_are_cleared(make_engine: EngineFactory) -> None:
    cache = make_engine(kv_cache_dtype="fp8").model_runner.kv_cache
    cache.k[0].view(torch.uint8).fill_(0x7F)
    assert cache.k[0].float().isnan().all()
    cache.clear_blocks(torch.tensor([1, 3]))
    assert not cache.k[0][[1, 3]].float().any()
    assert cache.k[0][2].float().isnan().all()


@pytest.mark.parametrize("variant", [*FAMILIES, "deepseek_v3", "gpt2"])
def test_keys_and_values_in_bfloat16_under_float32_give_the_tokens_of_attention_over_rounded_ones(
    make_engine: EngineFactory, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(variant, kv_cache_dtype="bfloat16", max_num_batched_tokens=29, max_num_seqs=4)
    ours = tokens(engine)
    model = make_tiny_model(variant)
    round_keys_and_values(monkeypatch, model, torch.Tensor.bfloat16)
    assert ours == [generate(model, request.prompt_token_ids, NUM_TOKENS) for request in requests()]


@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_kv_cache_dtype_may_differ_from_the_models(make_engine: EngineFactory, name: str, dtype: torch.dtype) -> None:
    engine = make_engine(kv_cache_dtype=name)
    assert engine.model_runner.kv_cache.v[1].dtype == dtype
    assert len(tokens(engine)) == 5


def test_the_same_memory_holds_four_times_the_tokens_of_float32(model_dir: Callable[[str], Path]) -> None:
    config, cpu = ModelConfig.from_dir(model_dir("llama")), torch.device("cpu")
    memory = 50 * bytes_per_block(config, 16, torch.float32)
    blocks = [
        EngineConfig.resolve(
            config, torch.float32, cpu, EngineArgs(kv_cache_memory_bytes=memory, kv_cache_dtype=name)
        ).num_blocks
        for name in ("auto", "bfloat16", "fp8")
    ]
    assert blocks == [50, 100, 200]


def test_models_that_cannot_have_fp8_weights_are_refused(make_engine: EngineFactory) -> None:
    with pytest.raises(ModelError, match=r"engine\.quantization: .*GPT2LMHeadModel"):
        make_engine("gpt2", quantization="fp8")
    with pytest.raises(UsageError, match=r"engine\.deterministic: .*depend on the batch"):
        make_engine("mixtral", quantization="fp8", deterministic=True)


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_a_gpu_without_fp8_is_refused_by_name(
    model_dir: Callable[[str], Path], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bulkrun.models.loading.quantization import refuse_without_fp8

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert not fp8.can_multiply_fp8(torch.device("cuda"))
    with pytest.raises(UsageError, match=rf"engine\.{key}: fp8 needs .* 8\.9 .*A100 has 8\.0"):
        refuse_without_fp8(torch.device("cuda"), f"engine.{key}")


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}], ids=str)
@pytest.mark.parametrize("variant", ["llama_biases", "qwen3"])
def test_a_gpu_agrees_with_the_cpu_where_it_is_no_tie(
    make_engine: EngineFactory, variant: str, settings: dict[str, str]
) -> None:
    """One token each: where the GPU (bfloat16) chooses another one, the CPU must have found it nearly as likely."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
    asked = [Request(one.request_id, one.prompt_token_ids, params) for one in requests()]
    on_gpu = run(make_engine(variant, device="cuda", dtype="bfloat16", **settings), asked)
    for request_id, completion in run(make_engine(variant, **settings), asked).items():
        assert completion.logprobs is not None
        likely, best = dict(completion.logprobs[0].top), completion.logprobs[0].logprob
        assert likely.get(on_gpu[request_id].token_ids[0], -99.0) > best - 0.3

"""Every kind of difference between families under every way of batching, against transformers' own generate."""

from __future__ import annotations

from functools import cache

import pytest

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.models.kv_cache import bytes_per_block
from bulkrun.request import Completion, Request, SamplingParams
from tests.engine.conftest import EngineFactory, expect_short_outputs, generate_with_transformers, is_greedy, run
from tests.models.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, known

NAMES = [
    "gemma2",
    "gemma3_rope_linear",
    "phi3_longrope",
    "ministral3",
    "glm4",
    "olmo2",
    "smollm3_sliding",
    "granite",
    "qwen3_moe",
    "qwen3_moe_whole_panels",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2_biases",
    "lfm2_moe",
    "lfm3",
    "granite_h",
    "granite_h_moe",
    "nemotron_h",
    "nemotron_h_moe",
    "falcon_h1",
    "olmo_hybrid",
    "mixtral",
    "gpt_oss",
    "gpt_oss_whole_panels",
    "gpt2",
    "opt",
    "cohere2",
    "cohere2_moe",
    "codegen",
    "falcon_new",
    "gpt_neox",
    "nanochat",
    "stablelm_beside",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "deepseek_v2_lite",
    "deepseek_v3",
    "mistral4",
    "apertus",
    "afmoe",
    "minimax_m2",
    "llama4",
    "llama4_maverick",
    "kimi_linear",
    "minicpm3",
    "mimo_v2_flash",
]
VARIANTS = known(NAMES)
MAX_TOKENS = 14
SHARED = [3 + 11 * n % (VOCAB_SIZE - 3) for n in range(17)]
PROMPTS = [[*SHARED, *(3 + (7 * n + 5 * k) % (VOCAB_SIZE - 3) for n in range(2 + 5 * k))] for k in range(5)]
SETTINGS = {
    "in a crowd": {"max_num_batched_tokens": 500, "enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 3, "enable_prefix_caching": False},
    "prefix cached": {"max_num_batched_tokens": 40},
    "preempted": {"max_model_len": 60},
}


def _requests() -> list[Request]:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    return [Request(f"r{i}", prompt, params) for i, prompt in enumerate(PROMPTS)]


@cache
def generated(variant: str) -> list[int]:
    """Behind the last prompt, which is the longest."""
    return generate_with_transformers(variant, PROMPTS[-1], MAX_TOKENS, eos_token_id=None)


def assert_transformers_tokens(variant: str, completions: dict[str, Completion]) -> None:
    """Those of the last prompt as it generates them, all others as it would."""
    outputs = [completions[f"r{i}"].token_ids for i in range(len(PROMPTS))]
    assert list(outputs[-1]) == generated(variant)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output) == MAX_TOKENS and is_greedy(variant, tuple(prompt), output), prompt


def _pool_of(engine: LLMEngine, tokens: int) -> int:
    """Bytes of KV cache for so many tokens."""
    cache = engine.model_runner.kv_cache
    per_block = bytes_per_block(engine.model_runner.model.config, cache.block_size, cache.dtype)
    return per_block * (1 + tokens // cache.block_size)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_equal_prompts_of_one_step_share_the_end_that_fills_no_block(make_engine: EngineFactory, variant: str) -> None:
    engine, params = (
        make_engine(variant, max_num_batched_tokens=500),
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0),
    )
    expect_short_outputs(engine.scheduler)
    engine._sequences.eos_token_ids = frozenset()
    completions = run(engine, [Request(f"r{i}", PROMPTS[-1], params) for i in range(3)])
    assert [list(completions[f"r{i}"].token_ids) for i in range(3)] == [generated(variant)] * 3
    assert engine.stats().num_cached_tokens == 2 * (len(PROMPTS[-1]) - 1)


@pytest.mark.parametrize("way", SETTINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers_however_they_are_batched(
    make_engine: EngineFactory, variant: str, way: str
) -> None:
    engine = make_engine(variant, **SETTINGS[way])
    if way == "preempted":
        engine = make_engine(variant, **SETTINGS[way], kv_cache_memory_bytes=_pool_of(engine, 88))
    engine._sequences.eos_token_ids = frozenset(
        [VOCAB_SIZE + EOS_TOKEN_ID]
    )  # could stop, so admission dares more; never does
    expect_short_outputs(engine.scheduler)
    for _ in range(2 if way == "prefix cached" else 1):
        completions = run(engine, _requests())
        assert_transformers_tokens(variant, completions)
    assert (engine.stats().num_preemptions > 0) == (way == "preempted")
    assert (engine.stats().num_cached_tokens > 0) == (way in ("prefix cached", "preempted"))


@pytest.mark.parametrize("variant", ["ministral3", "glm4", "hunyuan", "ernie4_5_moe", "falcon_h1", "llama4"])
def test_deterministic_runs_give_them_too(make_engine: EngineFactory, variant: str) -> None:
    engine = make_engine(variant, max_num_batched_tokens=40, deterministic=True)
    engine._sequences.eos_token_ids = frozenset()
    completions = run(engine, _requests())
    assert_transformers_tokens(variant, completions)


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 33, "max_num_seqs": 20}], ids=str
)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("variant", ["qwen3_5", "lfm2", "granite_h"])
def test_sequences_that_begin_with_a_kept_state_are_the_same(
    make_engine: EngineFactory, variant: str, ahead: bool, settings: dict[str, int]
) -> None:
    long = [3 + 13 * n % (VOCAB_SIZE - 3) for n in range(70)]
    prompts = [[*long, *[20 + group] * 50, *range(5, 7 + 3 * k)] for group in range(3) for k in range(3)]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate([*prompts, prompts[-1]])]
    alone = run(make_engine(variant, enable_prefix_caching=False), requests)
    engine = make_engine(variant, async_scheduling=ahead, **settings)
    shared = run(engine, requests)
    assert {name: one.token_ids for name, one in shared.items()} == {name: one.token_ids for name, one in alone.items()}
    assert engine.stats().num_cached_tokens > 600


def test_dummy_weights_run_from_config_json_alone(make_engine: EngineFactory, model_dir, tmp_path) -> None:
    (tmp_path / "config.json").write_text((model_dir("llama") / "config.json").read_text())
    engine = LLMEngine.from_model_dir(tmp_path, device="cpu", kv_cache_memory_bytes=2**20, load_format="dummy")
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    assert run(engine, [Request("r", PROMPTS[0], params)])["r"].num_output_tokens == 5

"""int8 weights on a CPU: the tokens of transformers over a model that was rounded the same way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.decoder.invariant import InvariantModel
from bulkrun.models.decoder.quantized_layers import Int8ExpertLinear, Int8Weights
from bulkrun.models.loading.quantization import refuse_quantization
from bulkrun.ops.cpu.int8_linear import ROW_MULTIPLE, can_pack_int8
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, run
from tests.models.fake_quantized import assert_best, with_fake_quantized_projections
from tests.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.ops.int8_oracle import fake_quantized

WHOLE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = [
    "llama_biases",
    "mistral_sliding",
    "qwen3",
    "qwen3_5",
    "lfm2",
    "granite_h",
    "nemotron_h",
    "jamba_dense",
    "mamba",
    "olmo_hybrid",
    "phi3",
    "gemma2",
    "gemma3n",
    "gemma4",
    "olmo2",
    "granite",
]
MIXTURES = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 6},
    "gemma4_moe": {"moe_intermediate_size": 64, "global_head_dim": 32},
}
OP_BY_OP = ("gemma3n",)  # whatever the sizes are
SIZES = {**MIXTURES, "gemma4": {"hidden_size_per_layer_input": 64}}
NUM_QUANTIZED = {"qwen3_moe": (12, 4), "gemma4_moe": (30, 10)}  # of them of experts
MAX_TOKENS = 17


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(4)
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 7, 16, 33, 61)]
    return [Request(str(i), prompt, greedy) for i, prompt in enumerate(prompts)]


def tokens(engine: LLMEngine) -> list[list[int]]:
    completions = run(engine, requests())
    return [list(completions[request.request_id].token_ids) for request in requests()]


def engine_over(folder: Path, variant: str, **settings: Any) -> LLMEngine:
    """Over a model whose rows and columns fill panels, so that all layers are one call where they are compiled."""
    path = save_tiny_model(folder / variant, variant, **WHOLE, head_dim=16, **SIZES.get(variant, {}))
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 8 * 2**20, "block_size": 4}
    return LLMEngine.from_model_dir(path, quantization="int8", **(defaults | settings))


def quantized_of(engine: LLMEngine) -> list[Int8Weights]:
    model = engine.model_runner.model
    model = model.model if isinstance(model, InvariantModel) else model
    return [module for module in model.modules() if isinstance(module, Int8Weights)]


@pytest.mark.parametrize("variant", FAMILIES)
def test_tokens_are_those_of_a_model_quantized_by_hand(tmp_path: Path, variant: str) -> None:
    model = with_fake_quantized_projections(variant, fake_quantized, **WHOLE, head_dim=16, **SIZES.get(variant, {}))
    engine = engine_over(tmp_path, variant, max_num_batched_tokens=29, max_num_seqs=4)
    is_in_panels = all(one.zeros is not None for one in quantized_of(engine))
    has_stack = engine.model_runner.model.layer_stack is not None
    assert has_stack == (is_in_panels and variant not in OP_BY_OP)
    for request, output in zip(requests(), tokens(engine), strict=True):
        assert_best(model, request.prompt_token_ids, output)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("variant", MIXTURES)
def test_experts_have_the_tokens_of_a_model_quantized_by_hand(
    tmp_path: Path, variant: str, deterministic: bool
) -> None:
    model = with_fake_quantized_projections(variant, fake_quantized, **WHOLE, head_dim=16, **MIXTURES[variant])
    sizes = {"max_num_batched_tokens": 29, "max_num_seqs": 4}
    engine = engine_over(tmp_path, variant, deterministic=deterministic, **sizes)
    experts = [one for one in quantized_of(engine) if isinstance(one, Int8ExpertLinear)]
    assert (len(quantized_of(engine)), len(experts)) == NUM_QUANTIZED.get(variant, (12, 6))
    assert all((one.zeros is not None) == can_pack_int8(32, 64) for one in quantized_of(engine))
    for request, output in zip(requests(), tokens(engine), strict=True):
        assert_best(model, request.prompt_token_ids, output)


@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_without_gates_have_those_tokens_though_they_fill_no_panels(
    tmp_path: Path, deterministic: bool
) -> None:
    variant = "nemotron_h_moe"
    model = with_fake_quantized_projections(variant, fake_quantized, **WHOLE, head_dim=16)
    engine = engine_over(tmp_path, variant, deterministic=deterministic, max_num_seqs=4)
    experts = [one for one in quantized_of(engine) if isinstance(one, Int8ExpertLinear)]
    assert len(experts) == 4 and all(one.zeros is None for one in experts)
    for request, output in zip(requests(), tokens(engine), strict=True):
        assert_best(model, request.prompt_token_ids, output)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "variant",
    [
        "llama_biases",
        "qwen3",
        "qwen3_moe",
        "qwen3_5",
        "qwen3_next",
        "mixtral",
        "gpt_oss",
        "minicpm3",
        "cohere2",
        "apertus",
        "gpt_neox",
    ],
)
def test_sizes_that_fill_no_panels_have_those_tokens_too_and_the_log_says_why_they_are_slow(
    make_engine: EngineFactory, variant: str, deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_fake_quantized_projections(variant, fake_quantized)
    sizes = {"max_num_batched_tokens": 29, "max_num_seqs": 4}
    with caplog.at_level(logging.WARNING):
        engine = make_engine(variant, quantization="int8", deterministic=deterministic, **sizes)
    num_products = {"qwen3_5": 16, "qwen3_next": 22, "minicpm3": 15}.get(variant, 12)
    assert f"int8: {num_products} of the products run in plain torch, slowly" in caplog.text
    assert f"multiples of {ROW_MULTIPLE}" in caplog.text
    for request, output in zip(requests(), tokens(engine), strict=True):
        assert_best(model, request.prompt_token_ids, output)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("variant", "deterministic"),
    [("qwen3", False), ("qwen3_5", False), ("qwen3", True), ("qwen3_moe", True), ("qwen3_5", True), ("gpt_oss", True)],
)
def test_a_row_alone_has_the_tokens_that_it_has_in_a_crowd(
    tmp_path: Path, variant: str, dtype: str, deterministic: bool
) -> None:
    """Of mixtures where it is promised: the products of routers are torch's, whose last bits depend on the batch."""
    if not deterministic and not can_pack_int8(32, 64):
        pytest.skip("no compiled int8 products on this machine: torch's, of heads, depend on the batch")
    engine = engine_over(tmp_path, variant, dtype=dtype, max_num_seqs=4, deterministic=deterministic)
    alone = engine_over(tmp_path, variant, dtype=dtype, max_num_seqs=1, deterministic=deterministic)
    assert tokens(engine) == tokens(alone)


@pytest.mark.usefixtures("two_threads")
def test_two_threads_and_steps_of_many_tokens_change_nothing(tmp_path: Path) -> None:
    prompt = torch.randint(3, VOCAB_SIZE, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    asked = [Request(str(i), prompt[i:], greedy) for i in range(3)]
    wide = run(engine_over(tmp_path, "llama", max_num_batched_tokens=1200), asked)
    narrow = run(engine_over(tmp_path, "llama", max_num_batched_tokens=17, max_num_seqs=2), asked)
    model = with_fake_quantized_projections("llama", fake_quantized, **WHOLE, head_dim=16)
    for request in asked:
        output = wide[request.request_id].token_ids
        assert output == narrow[request.request_id].token_ids
        assert_best(model, request.prompt_token_ids, output)


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe"])
def test_dummy_weights_are_quantized_too(tmp_path: Path, variant: str) -> None:
    found = quantized_of(engine_over(tmp_path, variant, load_format="dummy"))
    assert len(found) == 12
    assert all(linear.weight.dtype == torch.int8 and linear.weight.data.float().std() > 20 for linear in found)


def test_models_that_cannot_have_it_are_refused(make_engine: EngineFactory) -> None:
    with pytest.raises(ModelError, match=r"engine\.quantization: int8 .*GPT2LMHeadModel"):
        make_engine("gpt2", quantization="int8")


def test_a_gpu_is_told_to_take_fp8(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save_tiny_model(tmp_path, "llama"))
    with pytest.raises(UsageError, match=r"engine\.quantization: int8 is for CPUs, and this runs on cuda; set fp8"):
        refuse_quantization(config, torch.device("cuda"), "int8")

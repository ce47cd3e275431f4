"""Checkpoints in 8 bits: the tokens that transformers generates in float32 from the same weights, dequantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.ops.cpu.int8_linear import can_pack_int8
from bulkrun.ops.matmul.fp8_linear import quantize_rows
from bulkrun.ops.triton import fp8_experts
from bulkrun.request import Request, SamplingParams
from tests.benchmarks.quantized_checkpoint import write_quantized_checkpoint
from tests.engine.conftest import run
from tests.engine.gpu_stand_in import gpu_stand_in
from tests.models.fake_quantized import KEPT, are_experts, assert_best, generate, round_inputs_of_experts
from tests.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.models.tiny_quantized import FORMATS, WHOLE, save_tiny_quantized
from tests.ops import fp8_oracle, int8_oracle

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
SMALL = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "block_size": 4, "max_num_seqs": 4, "max_model_len": 64,
         "max_num_batched_tokens": 36, "enforce_eager": True}  # fmt: skip
VARIANTS = {"ct_channel": "qwen2", "ct_tensor_static": "phi3", "block": "qwen3_tied", "autofp8": "gemma2"}

needs_int8 = pytest.mark.skipif(not can_pack_int8(32, 64), reason="no compiled int8 products on this machine")


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 7, 33)]
    return [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]


def tokens(path: Path, **settings: Any) -> list[list[int]]:
    completions = run(LLMEngine.from_model_dir(path, **(SMALL | {"device": "cpu"} | settings)), requests())
    return [list(completions[request.request_id].token_ids) for request in requests()]


def reference(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def of_transformers(model: transformers.PreTrainedModel) -> list[list[int]]:
    return [generate(model, request.prompt_token_ids, 9) for request in requests()]


def round_inputs(
    model: transformers.PreTrainedModel, left_out: str, rounding: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Make the products with weights of 8 bits see their inputs as ours do: each token rounded by its own scale."""
    for name, module in model.model.layers.named_modules():
        is_quantized = isinstance(module, nn.Linear) and not name.endswith(KEPT)
        if is_quantized and left_out not in f"model.layers.{name}":
            module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))
        elif are_experts(module):
            round_inputs_of_experts(module, rounding)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cpu_computes_with_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_quantized(tmp_path, VARIANTS.get(name, "llama_biases"), name)
    assert tokens(stored) == of_transformers(reference(plain))


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("block", "qwen3_moe"),
        ("ct_channel", "mixtral"),
        ("int8_channel", "mixtral"),
        ("block", "qwen3_5_moe"),
        ("ct_channel", "qwen3_next"),
        ("ct_channel", "lfm2_moe"),
        ("int8_channel", "granite_h"),
        ("ct_channel", "nemotron_h_moe"),
        ("ct_channel", "glm4"),
        ("block", "glm4_moe"),
        ("ct_channel", "gemma3n"),
        ("ct_channel", "gemma4"),
        ("block", "deepseek_v3"),
        ("int8_channel", "deepseek_v2_lite"),
        ("block", "minimax_m2"),
        ("ct_channel", "afmoe"),
        ("int8_channel", "hunyuan_moe"),
        ("ct_channel", "cohere2"),
        ("block", "apertus"),
        ("ct_channel", "kimi_linear"),
        ("int8_channel", "gpt_neox"),
        ("ct_channel", "codegen"),
        ("block", "cohere2_moe"),
        ("ct_channel", "nanochat"),
    ],
)
def test_experts_states_and_rows_in_another_order_are_dequantized_too(name: str, variant: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_quantized(tmp_path, variant, name)
    assert tokens(stored) == of_transformers(reference(plain))


def test_deterministic_runs_compute_with_the_dequantized_weights(tmp_path: Path) -> None:
    stored, plain = save_tiny_quantized(tmp_path, "llama_whole_panels", "ct_channel")
    assert tokens(stored, deterministic=True) == of_transformers(reference(plain))


@pytest.mark.usefixtures("watched_kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted")
@pytest.mark.filterwarnings("ignore:divide by zero encountered")  # NaN is everywhere
def test_a_gpu_multiplies_the_stored_bytes(tmp_path: Path) -> None:
    """What the checkpoint leaves out stays as it is, its inputs too."""
    odd = {"hidden_size": 72}  # no multiple of 16: float32 sums
    stored, plain = save_tiny_quantized(tmp_path, "qwen2", "ct_channel", **odd)
    model = reference(plain)
    round_inputs(model, FORMATS["ct_channel"].left_out, fp8_oracle.fake_quantized)
    with gpu_stand_in():
        engine = LLMEngine.from_model_dir(stored, **SMALL, device="cuda")
        completions = run(engine, requests())
    assert [list(completions[one.request_id].token_ids) for one in requests()] == of_transformers(model)


@pytest.mark.usefixtures("watched_kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted")
@pytest.mark.filterwarnings("ignore:divide by zero encountered")
@pytest.mark.parametrize("variant", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_gpu_multiplies_the_stored_bytes_of_experts(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_experts, "quantize_rows", quantize_rows)  # the interpreter rounds wrong
    odd = {"hidden_size": 72, "num_hidden_layers": 1}  # dense products are the references' then
    stored, plain = save_tiny_quantized(tmp_path, variant, "ct_channel", **odd)
    model = reference(plain)
    round_inputs(model, FORMATS["ct_channel"].left_out, fp8_oracle.fake_quantized)
    with gpu_stand_in():
        engine = LLMEngine.from_model_dir(stored, **SMALL, device="cuda")
        completions = run(engine, requests())
    for request in requests():
        assert_best(model, request.prompt_token_ids, completions[request.request_id].token_ids)


@needs_int8
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("int8_channel", "qwen2"),
        ("int8_tensor_static", "gemma2"),
        ("int8_channel", "phi3"),
        ("int8_channel", "qwen3_5"),
        ("int8_channel", "mixtral"),
        ("int8_tensor_static", "qwen3_moe"),
    ],
)
def test_a_cpu_multiplies_the_stored_bytes(name: str, variant: str, deterministic: bool, tmp_path: Path) -> None:
    sizes = WHOLE | ({"moe_intermediate_size": 64} if variant == "qwen3_moe" else {})
    stored, plain = save_tiny_quantized(tmp_path, variant, name, **sizes)
    model = reference(plain)
    round_inputs(model, FORMATS[name].left_out, int8_oracle.fake_quantized)
    for request, output in zip(requests(), tokens(stored, deterministic=deterministic), strict=True):
        assert_best(model, request.prompt_token_ids, output)


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_quantized_as_ours_is_has_the_tokens_of_quantizing_it_here(dtype: str, tmp_path: Path) -> None:
    plain = save_tiny_model(tmp_path / "plain", "llama_biases", dtype=torch.bfloat16, **WHOLE)
    stored = write_quantized_checkpoint(plain, tmp_path / "stored", "int8")
    assert tokens(stored, dtype=dtype) == tokens(plain, dtype=dtype, quantization="int8")

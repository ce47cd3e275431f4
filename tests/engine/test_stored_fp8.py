"""Checkpoints in fp8: the tokens that transformers generates in float32 from the same weights, dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import run
from tests.engine.gpu_stand_in import gpu_stand_in
from tests.models.fake_quantized import generate
from tests.models.tiny_fp8 import FORMATS, save_tiny_fp8
from tests.models.tiny_models import VOCAB_SIZE
from tests.ops.fp8_oracle import fake_quantized

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
SMALL = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "block_size": 4, "max_num_seqs": 4, "max_model_len": 64,
         "max_num_batched_tokens": 36, "enforce_eager": True}  # fmt: skip
VARIANTS = {"ct_channel": "qwen2", "ct_tensor_static": "phi3", "block": "qwen3_tied", "autofp8": "gemma2"}


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


def round_inputs(model: transformers.PreTrainedModel, left_out: str) -> None:
    """Make the products with fp8 weights see their inputs as ours do: each token rounded to fp8 by its own scale."""
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear) and left_out not in f"model.layers.{name}":
            module.register_forward_pre_hook(lambda _, inputs: (fake_quantized(inputs[0]),))


@pytest.mark.parametrize("name", FORMATS)
def test_a_cpu_computes_with_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_fp8(tmp_path, VARIANTS.get(name, "llama_biases"), name)
    assert tokens(stored) == of_transformers(reference(plain))


@pytest.mark.parametrize(("name", "variant"), [("block", "qwen3_moe"), ("ct_channel", "mixtral")])
def test_experts_are_dequantized_too(name: str, variant: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_fp8(tmp_path, variant, name)
    assert tokens(stored) == of_transformers(reference(plain))


def test_deterministic_runs_compute_with_the_dequantized_weights(tmp_path: Path) -> None:
    stored, plain = save_tiny_fp8(tmp_path, "llama_whole_panels", "ct_channel")
    assert tokens(stored, deterministic=True) == of_transformers(reference(plain))


@pytest.mark.usefixtures("watched_kernels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted")
@pytest.mark.filterwarnings("ignore:divide by zero encountered")  # NaN is everywhere
def test_a_gpu_multiplies_the_stored_bytes(tmp_path: Path) -> None:
    """What the checkpoint leaves out stays as it is, its inputs too."""
    stored, plain = save_tiny_fp8(tmp_path, "qwen2", "ct_channel", hidden_size=72)  # no multiple of 16: float32 sums
    model = reference(plain)
    round_inputs(model, FORMATS["ct_channel"].left_out)
    with gpu_stand_in():
        engine = LLMEngine.from_model_dir(stored, **SMALL, device="cuda")
        completions = run(engine, requests())
    assert [list(completions[one.request_id].token_ids) for one in requests()] == of_transformers(model)

"""Checkpoints in GPTQ, AWQ and pack-quantized: the tokens that transformers generates in float32 from what they mean.

`tests.models.tiny_packed` rounds and packs number by number, and writes the same weights as an ordinary checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bulkrun.ops.cpu.int8_linear import can_pack_int8
from tests.engine.test_stored_quantized import of_transformers, reference, requests, round_inputs, tokens
from tests.models.fake_quantized import assert_best
from tests.models.tiny_packed import PACKED, save_tiny_packed
from tests.models.tiny_quantized import WHOLE
from tests.ops import int8_oracle

VARIANTS = {"gptq": "qwen2", "gptq_act_order": "phi3", "awq": "qwen3_tied", "ct_group": "gemma2", "awq_whole": "olmo2"}


@pytest.mark.parametrize("name", PACKED)
def test_tokens_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_packed(tmp_path, VARIANTS.get(name, "llama_biases"), name)
    assert tokens(stored) == of_transformers(reference(plain))


@pytest.mark.parametrize(
    ("name", "variant"),
    [("gptq", "qwen3_moe"), ("awq", "mixtral"), ("ct_zeros", "qwen3_moe"), ("gptq", "qwen3_5"), ("awq", "qwen3_next"),
     ("gptq", "lfm2"), ("ct_zeros", "granite_h"), ("awq", "nemotron_h"), ("gptq", "nemotron_h_moe"),
     ("gptq", "ernie4_5_biases"), ("ct_group", "ernie4_5_moe"), ("gptq", "falcon_h1"),
     ("ct_group", "gemma3n"), ("ct_group", "gemma4"), ("gptq", "gemma4_moe"), ("awq", "olmo_hybrid"),
     ("gptq", "deepseek_v2"), ("awq", "minicpm3"), ("awq", "cohere"), ("gptq", "afmoe"), ("ct_group", "hy_v3"),
     ("gptq", "kimi_linear"), ("gptq", "gpt_neox"), ("awq", "stablelm")],
)  # fmt: skip
def test_experts_states_and_rows_in_another_order_are_dequantized_too(name: str, variant: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_packed(tmp_path, variant, name)
    assert tokens(stored) == of_transformers(reference(plain))


@pytest.mark.parametrize("name", ["gptq_act_order", "awq"])
def test_deterministic_runs_too(name: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_packed(tmp_path, "llama_whole_panels", name, intermediate_size=96)
    assert tokens(stored, deterministic=True) == of_transformers(reference(plain))


@pytest.mark.skipif(not can_pack_int8(32, 64), reason="no compiled int8 products on this machine")
@pytest.mark.parametrize("name", ["gptq", "awq", "ct_group"])
def test_they_can_be_multiplied_in_int8(name: str, tmp_path: Path) -> None:
    sizes = WHOLE | {"hidden_size": 192, "head_dim": 48, "intermediate_size": 192}
    stored, plain = save_tiny_packed(tmp_path, "llama", name, **sizes)
    assert tokens(stored, quantization="int8") == tokens(plain, quantization="int8")
    model = reference(plain)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = int8_oracle.fake_quantized(module.weight.data)
    round_inputs(model, "nothing", int8_oracle.fake_quantized)
    for request, output in zip(requests(), tokens(stored, quantization="int8"), strict=True):
        assert_best(model, request.prompt_token_ids, output)

"""A checkpoint of bf16 computed in float32 on a CPU: half the memory, and the bits of float32 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.loading import loader, narrow_weights
from bulkrun.models.loading.adapter import Adapter
from bulkrun.ops.cpu.panel_linear import compiles_panels
from tests.models.load import load_model
from tests.models.paged_driver import assert_same_tokens, forced_logits, tolerance_of
from tests.models.tiny_adapters import save_adapter
from tests.models.tiny_models import save_tiny_model
from tests.models.tiny_quantized import save_tiny_quantized

pytestmark = pytest.mark.skipif(not compiles_panels(torch.float32), reason="panels of float32 need a compiler and AVX2")

WHOLE_PANELS = {"hidden_size": 96, "intermediate_size": 64, "vocab_size": 160}
# Chunks of it have more rows than are multiplied at once.
LONG = [(7 * i * i + 3 * i + 11) % 127 + 1 for i in range(90)]
TEXTS = [[*LONG, 3, 17, 99, 4], [5, 9, 13, 60, 61, 62]]


def load(path: Path, **options: Any) -> Any:
    return load_model(path, dtype=torch.float32, device="cpu", **options)


def logits(model: Any) -> list[torch.Tensor]:
    return forced_logits(model, TEXTS, [len(LONG), 3])


def of_transformers(path: Path) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0] for text in TEXTS]


def products(model: torch.nn.Module) -> list[Linear | ExpertLinear]:
    return [module for module in model.modules() if isinstance(module, Linear | ExpertLinear)]


@pytest.mark.parametrize(
    "variant",
    ["llama_tied", "llama_biases", "qwen3", "gemma2", "granite_biases_tied", "phi3", "qwen3_moe", "mixtral", "gpt_oss",
     "qwen3_5", "nemotron_h", "lfm2", "gemma3n_whole_panels", "gemma4_whole_panels", "minicpm3", "cohere2", "apertus",
     "afmoe", "gpt_neox_whole", "stablelm"],
)  # fmt: skip
def test_numbers_are_those_of_float32_weights(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path / variant, variant, dtype=torch.bfloat16, **WHOLE_PANELS)
    model = load(path)
    assert model.dtype == torch.float32 and model.embed_weight.dtype == torch.bfloat16
    assert any(product.weight.dtype == torch.bfloat16 for product in products(model))
    narrow, theirs = logits(model), of_transformers(path)
    for ours, other in zip(narrow, theirs, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, other, atol=tolerance_of(variant), rtol=0)
        assert_same_tokens(ours, other)
    monkeypatch.setattr(loader, "hold_in_bfloat16", lambda *_args: None)
    wide = load(path)
    assert not any(product.weight.dtype == torch.bfloat16 for product in products(wide))
    assert all(map(torch.equal, narrow, logits(wide)))


def test_deterministic_models_too(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama_tied", dtype=torch.bfloat16, **WHOLE_PANELS)
    invariant = load(path, deterministic=True)
    assert all(panel.dtype == torch.bfloat16 for panel in invariant.model.lm_head.panels)
    for ours, other in zip(logits(invariant), of_transformers(path), strict=True):
        torch.testing.assert_close(ours, other, atol=tolerance_of("llama"), rtol=0)


def test_what_is_no_bf16_or_has_no_panels_stays_float32(tmp_path: Path) -> None:
    sizes = WHOLE_PANELS | {"vocab_size": 131, "intermediate_size": 72}
    model = load(save_tiny_model(tmp_path / "odd", "llama_tied", dtype=torch.bfloat16, **sizes))
    layer = model.layers[0]
    assert model.embed_weight.dtype == model.lm_head.weight.dtype == torch.float32  # tied to a head of odd columns
    assert layer.mlp.down_proj.weight.dtype == torch.float32 and layer.attention.o_proj.weight.dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float16):
        model = load(save_tiny_model(tmp_path / str(dtype), "llama", dtype=dtype, **WHOLE_PANELS))
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_an_untied_embedding_needs_no_panels(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", dtype=torch.bfloat16, **WHOLE_PANELS | {"vocab_size": 131})
    model = load(path)
    assert model.embed_weight.dtype == torch.bfloat16 and model.lm_head.weight.dtype == torch.float32
    for ours, other in zip(logits(model), of_transformers(path), strict=True):
        torch.testing.assert_close(ours, other, atol=tolerance_of("llama"), rtol=0)


def test_what_an_adapter_is_added_to_is_no_bf16_any_more(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "llama", dtype=torch.bfloat16, **WHOLE_PANELS)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    adapter = tmp_path / "adapter"
    adapted = save_adapter(adapter, base, target_modules=["down_proj", "q_proj"])
    model = load(path, adapter=Adapter.of(adapter))
    layer = model.layers[0]
    assert layer.mlp.down_proj.weight.dtype == layer.attention.qkv_proj.weight.dtype == torch.float32
    assert layer.mlp.gate_up_proj.weight.dtype == layer.attention.o_proj.weight.dtype == torch.bfloat16
    with torch.inference_mode():
        for text, ours in zip(TEXTS, logits(model), strict=True):
            theirs = adapted(input_ids=torch.tensor([text])).logits[0]
            torch.testing.assert_close(ours, theirs, atol=tolerance_of("llama"), rtol=0)


def test_random_weights_are_what_the_config_says(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", dtype=torch.bfloat16, **WHOLE_PANELS)
    model = load(path, load_format="dummy")
    assert {product.weight.dtype for product in products(model)} == {torch.bfloat16}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert {product.weight.dtype for product in products(load(path, load_format="dummy"))} == {torch.float32}


@pytest.mark.parametrize("name", ["ct_channel", "block_bfloat16", "int8_channel"])
def test_random_weights_are_float32_where_stored_ones_would_be_dequantized(name: str, tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama_tied", name, dtype=torch.bfloat16, **WHOLE_PANELS)
    stored, random = (
        {name: (weight.dtype, weight.shape) for name, weight in load(path, load_format=load_format).named_parameters()}
        for load_format in ("auto", "dummy")
    )
    assert stored == random, "else it would be measured in half the memory"
    assert stored["embed_weight"][0] == torch.bfloat16 and stored["layers.0.mlp.down_proj.weight"][0] != torch.bfloat16


def test_models_of_other_dtypes_are_left_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", dtype=torch.bfloat16, **WHOLE_PANELS)
    model = load_model(path, dtype=torch.bfloat16, device="cpu")
    assert isinstance(model, Decoder) and model.embeds_in is None
    assert all(product.rows_dtype is None for product in products(model))


def test_without_the_product_there_are_float32_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "llama", dtype=torch.bfloat16, **WHOLE_PANELS)
    monkeypatch.setattr(narrow_weights, "compiles_panels", lambda _dtype: False)
    assert {weight.dtype for weight in load(path).parameters()} == {torch.float32}

"""Checkpoints in int8 on a CPU: their own bytes where products of such are compiled, else the model's dtype."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.decoder_layer import DecoderLayer
from bulkrun.models.decoder.invariant import InvariantModel
from bulkrun.models.decoder.quantized_layers import Int8Linear, Int8Weights
from bulkrun.ops.cpu import int8_linear
from bulkrun.ops.cpu.int8_linear import can_pack_int8, pack_int8_
from bulkrun.ops.matmul.int8_linear import Int8Weight
from tests.models.load import load_model
from tests.models.loading.test_stored_quantized import DOWN, QKV, edit_quantization, tensors_of
from tests.models.paged_driver import forced_logits
from tests.models.tiny_quantized import FORMATS, WHOLE, save_tiny_quantized

INPUTS = FORMATS["int8_channel"].config["config_groups"]["group_0"]["input_activations"]
needs_int8 = pytest.mark.skipif(not can_pack_int8(32, 64), reason="no compiled int8 products on this machine")


def load(path: Path, **options: Any) -> Decoder:
    model = load_model(path, dtype=torch.float32, device="cpu", **options)
    decoder = model.model if isinstance(model, InvariantModel) else model
    assert isinstance(decoder, Decoder)
    return decoder


def in_int8(model: Decoder) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Int8Weights)}


@needs_int8
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["int8_channel", "int8_tensor_static"])
def test_bytes_and_scales_are_those_of_the_file(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama_biases", name, **WHOLE)
    model, stored = load(path, **options), tensors_of(path)
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer)
    for ours, parts in ((layer.attention.qkv_proj, QKV), (layer.mlp.down_proj, [DOWN])):
        weights = [stored[f"{part}.weight"] for part in parts]
        scales = [stored[f"{part}.weight_scale"].float().reshape(-1, 1) for part in parts]
        rows = [scale.expand(len(weight), 1) for weight, scale in zip(weights, scales, strict=True)]
        expected = pack_int8_(Int8Weight(torch.cat(weights), torch.cat(rows)))
        assert isinstance(ours, Int8Linear)
        for mine, theirs in zip(ours.int8_weight, expected, strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(ours.bias, torch.cat([stored[f"{part}.bias"] for part in parts]))
    assert model.layer_stack is not None
    is_left_out = "layers.1.attention.o_proj" not in in_int8(model)
    assert is_left_out == ("quantization" not in options)
    assert len(in_int8(model)) == 12 - is_left_out


@needs_int8
@pytest.mark.parametrize("changes", [{"inputs": None}, {"inputs": INPUTS | {"symmetric": False}}], ids=str)
def test_inputs_are_not_rounded_where_the_checkpoint_does_not_as_ours(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "int8_channel", **WHOLE)
    edit_quantization(path, **changes)
    assert not in_int8(load(path))
    assert "dequantized and take the memory of float32 (engine.quantization: int8 keeps 8 bits" in caplog.text
    assert len(in_int8(load(path, quantization="int8"))) == 12


@pytest.mark.parametrize("why", ["no such instruction", "no whole panels"])
def test_slow_products_are_for_those_who_ask_for_them(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(int8_linear, "_is_compiled", lambda: why == "no whole panels")
    path, _ = save_tiny_quantized(tmp_path, "llama", "int8_channel", **({} if why == "no whole panels" else WHOLE))
    assert not in_int8(load(path))
    assert caplog.text.endswith("they are dequantized and take the memory of float32\n")
    assert len(in_int8(load(path, quantization="int8"))) == 12
    assert "int8: 12 of the products run in plain torch, slowly" in caplog.text


@needs_int8
def test_the_log_says_that_bytes_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "int8_channel", **WHOLE)
    load(path)
    (said,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert said.endswith("stored in int8 (compressed-tensors); they are multiplied in 8 bits as they are")


@needs_int8
def test_random_weights_lie_as_the_checkpoints_would(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "int8_channel", **WHOLE)
    stored = in_int8(load(path))
    (path / "model.safetensors").unlink()
    model = load(path, load_format="dummy")
    assert in_int8(model) == stored
    (logits,) = forced_logits(model, [[5, 9, 30, 2, 77]], [3])
    assert logits.isfinite().all()

"""Experts in int8 as they lie in a loaded model: quantized from every layout of a checkpoint, or as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bulkrun.models.decoder.layers import ExpertLinear, SparseMLP
from bulkrun.models.decoder.quantized_layers import Int8ExpertLinear
from bulkrun.models.loading import quantization
from bulkrun.models.loading.loader import load_model
from bulkrun.ops.cpu.fused_experts import pack_int8_experts_
from bulkrun.ops.int8_linear import Int8Weight
from tests.models.loading.test_stored_int8 import in_int8, load, needs_int8
from tests.models.tiny_models import edit_weights, make_tiny_model, save_tiny_model
from tests.models.tiny_mxfp4 import save_tiny_mxfp4
from tests.models.tiny_quantized import WHOLE, save_tiny_quantized
from tests.ops import int8_oracle

Both = tuple[torch.Tensor, torch.Tensor]


def one_by_one(folder: Path) -> tuple[Path, Both]:
    theirs = make_tiny_model("mixtral").model.layers[2].mlp.experts
    return save_tiny_model(folder, "mixtral"), (theirs.gate_up_proj.data, theirs.down_proj.data)


def as_one_tensor(folder: Path) -> tuple[Path, Both]:
    theirs = make_tiny_model("mixtral")
    theirs.save_pretrained(folder, save_original_format=False)
    experts = theirs.model.layers[2].mlp.experts
    return folder, (experts.gate_up_proj.data, experts.down_proj.data)


def halves(gate_up_XE2I: torch.Tensor) -> torch.Tensor:
    """gpt-oss's, each gate followed by its up, as rows: gates, then ups."""
    return torch.cat((gate_up_XE2I[..., ::2], gate_up_XE2I[..., 1::2]), -1).transpose(1, 2)


def interleaved(folder: Path) -> tuple[Path, Both]:
    theirs = make_tiny_model("gpt_oss").model.layers[2].mlp.experts
    weights = halves(theirs.gate_up_proj.data), theirs.down_proj.data.transpose(1, 2)
    return save_tiny_model(folder, "gpt_oss"), weights


def in_mxfp4(folder: Path) -> tuple[Path, Both]:
    packed, plain = save_tiny_mxfp4(folder)
    stored, experts = load_file(plain / "model.safetensors"), "model.layers.2.mlp.experts."
    return packed, (halves(stored[f"{experts}gate_up_proj"]), stored[f"{experts}down_proj"].transpose(1, 2))


def experts_of(path: Path, layer: int = 2) -> tuple[torch.nn.Module, torch.nn.Module]:
    mlp = load_model(path, dtype=torch.bfloat16, device="cpu", quantization="int8").layers[layer].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp.gate_up_proj, mlp.down_proj


@pytest.mark.parametrize("piece", [1, 2**20])
@pytest.mark.parametrize("layout", [one_by_one, as_one_tensor, interleaved, in_mxfp4])
def test_rows_are_quantized_from_what_the_checkpoint_holds(
    layout: Callable[[Path], tuple[Path, Both]], piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_PIECE_NUMBERS", piece)
    path, weights = layout(tmp_path)
    for ours, theirs in zip(experts_of(path), weights, strict=True):
        assert isinstance(ours, Int8ExpertLinear)
        values, scale = int8_oracle.quantized(theirs)
        assert ours.weight.dtype == torch.int8 and torch.equal(ours.weight.long(), values)
        torch.testing.assert_close(ours.weight_scale.double(), scale, rtol=1e-6, atol=0)


def test_biases_and_router_keep_their_numbers(tmp_path: Path) -> None:
    path, _ = interleaved(tmp_path)
    mlp, theirs = load(path, quantization="int8").layers[2].mlp, make_tiny_model("gpt_oss").model.layers[2].mlp
    bias = theirs.experts.gate_up_proj_bias.data
    assert isinstance(mlp, SparseMLP)
    assert torch.equal(mlp.gate_up_proj.bias, torch.cat((bias[:, ::2], bias[:, 1::2]), -1))
    assert torch.equal(mlp.router.bias, theirs.router.bias)
    assert mlp.router.weight.dtype == torch.float32


@needs_int8
def test_bytes_and_scales_are_those_of_the_file(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "mixtral", "int8_channel", **WHOLE)
    model, stored = load(path), load_file(path / "model.safetensors")
    mlp = model.layers[1].mlp
    assert isinstance(mlp, SparseMLP)
    for ours, parts in ((mlp.gate_up_proj, ("w1", "w3")), (mlp.down_proj, ("w2",))):
        names = [[f"model.layers.1.block_sparse_moe.experts.{expert}.{part}" for part in parts] for expert in range(5)]
        values, scale = (
            torch.stack([torch.cat([stored[f"{name}.{key}"] for name in of_expert]) for of_expert in names])
            for key in ("weight", "weight_scale")
        )
        assert isinstance(ours, Int8ExpertLinear)
        for mine, theirs in zip(ours.int8_weight, pack_int8_experts_(Int8Weight(values, scale.float())), strict=True):
            assert torch.equal(mine, theirs)


@needs_int8
def test_experts_are_dequantized_where_one_of_them_is_not_in_int8(tmp_path: Path) -> None:
    path, plain = save_tiny_quantized(tmp_path, "mixtral", "int8_channel", **WHOLE)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    weight = load_file(plain / "model.safetensors")[name]
    edit_weights(path, **{name: weight, f"{name}_scale": None})
    model = load(path)
    assert {"layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj", "layers.1.attention.qkv_proj"} <= in_int8(model)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, SparseMLP)
    assert isinstance(mlp.gate_up_proj, ExpertLinear) and isinstance(mlp.down_proj, ExpertLinear)


@needs_int8
def test_random_weights_lie_as_the_checkpoints_would(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "qwen3_moe", "int8_channel", **WHOLE | {"moe_intermediate_size": 64})
    stored = in_int8(load(path))
    (path / "model.safetensors").unlink()
    assert in_int8(load(path, load_format="dummy")) == stored
    assert {"layers.0.mlp.down_proj", "layers.1.mlp.down_proj"} < stored


def test_sizes_that_fill_no_panels_are_dequantized_where_nobody_asks(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "qwen3_moe", "int8_channel", **WHOLE | {"moe_intermediate_size": 40})
    assert not in_int8(load(path))

"""Experts in 8 bits as they lie in a loaded model: quantized from every layout of a checkpoint, or as stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bulkrun.models.decoder.layers import ExpertLinear
from bulkrun.models.decoder.quantized_layers import Fp8ExpertLinear, Int8ExpertLinear
from bulkrun.models.decoder.sparse_mlp import SparseMLP
from bulkrun.models.loading import quantization
from bulkrun.ops.cpu.fused_experts import pack_int8_experts_
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.matmul.int8_linear import Int8Weight
from tests.models.load import load_model
from tests.models.loading.test_stored_int8 import in_int8, load, needs_int8
from tests.models.loading.test_stored_quantized import as_bytes, weights_on_a_gpu
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import edit_weights, make_tiny_model, save_tiny_model, split_llama4_experts
from tests.models.tiny_mxfp4 import save_tiny_mxfp4
from tests.models.tiny_quantized import WHOLE, quantized_copy, save_tiny_quantized
from tests.ops import fp8_oracle, int8_oracle

Both = tuple[torch.Tensor, torch.Tensor]


def one_by_one(folder: Path) -> tuple[Path, Both]:
    theirs = make_tiny_model("mixtral").model.layers[2].mlp.experts
    return save_tiny_model(folder, "mixtral"), (theirs.gate_up_proj.data, theirs.down_proj.data)


def as_one_tensor(folder: Path) -> tuple[Path, Both]:
    theirs = make_tiny_model("mixtral")
    theirs.save_pretrained(folder, save_original_format=False)
    experts = theirs.model.layers[2].mlp.experts
    return folder, (experts.gate_up_proj.data, experts.down_proj.data)


def by_columns(folder: Path) -> tuple[Path, Both]:
    """As wide as the model, so that sizes do not tell which way they lie."""
    theirs = make_tiny_model("llama4", intermediate_size=48).model.layers[2].feed_forward.experts
    weights = theirs.gate_up_proj.data.transpose(1, 2), theirs.down_proj.data.transpose(1, 2)
    return save_tiny_model(folder, "llama4", intermediate_size=48), weights


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


def experts_of(path: Path, quantization: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    mlp = load_model(path, dtype=torch.bfloat16, device="cpu", quantization=quantization).layers[2].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp.gate_up_proj, mlp.down_proj


each_layout = pytest.mark.parametrize("layout", [one_by_one, as_one_tensor, by_columns, interleaved, in_mxfp4])


@pytest.mark.parametrize("piece", [1, 2**20])
@each_layout
def test_rows_are_quantized_from_what_the_checkpoint_holds(
    layout: Callable[[Path], tuple[Path, Both]], piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_PIECE_NUMBERS", piece)
    path, weights = layout(tmp_path)
    for ours, theirs in zip(experts_of(path, "int8"), weights, strict=True):
        assert isinstance(ours, Int8ExpertLinear)
        values, scale = int8_oracle.quantized(theirs)
        assert ours.weight.dtype == torch.int8 and torch.equal(ours.weight.long(), values)
        torch.testing.assert_close(ours.weight_scale.double(), scale, rtol=1e-6, atol=0)


@each_layout
def test_so_they_are_in_fp8(layout: Callable[[Path], tuple[Path, Both]], tmp_path: Path) -> None:
    path, weights = layout(tmp_path)
    for ours, theirs in zip(experts_of(path, "fp8"), weights, strict=True):
        assert isinstance(ours, Fp8ExpertLinear)
        assert ours.weight.dtype == FP8 and ours.weight.shape == theirs.shape
        back, expected = ours.weight.float() * ours.weight_scale, fp8_oracle.fake_quantized(theirs.float())
        torch.testing.assert_close(back, expected, rtol=1e-6, atol=0)


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


MIXTRAL_EXPERTS = {f"layers.{i}.mlp.{name}_proj.weight" for i in range(3) for name in ("gate_up", "down")}


@pytest.mark.parametrize("name", ["ct_channel", "autofp8", "fbgemm"])
def test_a_gpu_keeps_experts_that_are_stored_in_fp8(name: str, tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "mixtral", name)
    ours, stored = weights_on_a_gpu(path), load_file(path / "model.safetensors")
    assert {key for key, weight in ours.items() if weight.dtype == FP8} >= MIXTRAL_EXPERTS
    experts = "model.layers.1.block_sparse_moe.experts"
    gate_up = [[as_bytes(stored[f"{experts}.{i}.{part}.weight"]) for part in ("w1", "w3")] for i in range(5)]
    assert as_bytes(ours["layers.1.mlp.gate_up_proj.weight"]) == [gates + ups for gates, ups in gate_up]
    downs = [as_bytes(stored[f"{experts}.{i}.w2.weight"]) for i in range(5)]
    assert as_bytes(ours["layers.1.mlp.down_proj.weight"]) == downs
    (path / "model.safetensors").unlink()
    random = weights_on_a_gpu(path, load_format="dummy")
    assert {key: one.dtype for key, one in random.items()} == {key: one.dtype for key, one in ours.items()}


def test_llama4s_files_of_8_bits_have_each_expert_by_itself(tmp_path: Path) -> None:
    plain, tokens = save_tiny_model(tmp_path / "plain", "llama4"), list(range(3, 40))
    (expected,) = forced_logits(load(plain), [tokens], [30])
    split_llama4_experts(plain)
    (found,) = forced_logits(load(plain), [tokens], [30])
    assert torch.equal(found, expected)
    stored = quantized_copy(plain, tmp_path / "stored", "ct_channel")
    (found,), (expected,) = (forced_logits(load(path), [tokens], [30]) for path in (stored, plain))
    assert torch.equal(found, expected), "what is stored in 8 bits is what it stands for"
    kept = {key for key, weight in weights_on_a_gpu(stored).items() if weight.dtype == FP8}
    parts = ("gate_up_proj", "down_proj", "shared.mlp.gate_up_proj", "shared.mlp.down_proj")
    assert kept >= {f"layers.{i}.mlp.{part}.weight" for i in range(4) for part in parts}


@pytest.mark.parametrize("options", [{"has_fp8": False}, {"name": "block"}, {"name": "int8_channel"}], ids=str)
def test_a_gpu_dequantizes_experts_that_it_could_not_multiply_as_stored(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path, plain = save_tiny_quantized(tmp_path, "mixtral", options.pop("name", "ct_channel"))
    ours, theirs = weights_on_a_gpu(path, **options), load_file(plain / "model.safetensors")
    downs = [theirs[f"model.layers.1.block_sparse_moe.experts.{i}.w2.weight"] for i in range(5)]
    assert torch.equal(ours["layers.1.mlp.down_proj.weight"], torch.stack(downs))


@pytest.mark.parametrize("name", ["block", "int8_channel"])
def test_experts_in_blocks_and_in_the_other_type_are_quantized_anew_by_row(name: str, tmp_path: Path) -> None:
    path, plain = save_tiny_quantized(tmp_path, "mixtral", name)
    _, ours = experts_of(path, "fp8")
    theirs = load_file(plain / "model.safetensors")
    downs = torch.stack([theirs[f"model.layers.2.block_sparse_moe.experts.{i}.w2.weight"] for i in range(5)])
    back = ours.weight.float() * ours.weight_scale
    torch.testing.assert_close(back, fp8_oracle.fake_quantized(downs), rtol=1e-6, atol=0)


def test_the_log_says_of_experts_what_it_says_of_other_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, _ = save_tiny_quantized(tmp_path / "rows", "mixtral", "ct_channel")
    blocks, _ = save_tiny_quantized(tmp_path / "blocks", "qwen3_moe", "block")
    weights_on_a_gpu(rows)
    assert "they are multiplied in 8 bits as they are" in caplog.text
    weights_on_a_gpu(blocks)
    assert "dequantized and take the memory of float32 (engine.quantization: fp8 keeps 8 bits" in caplog.text
    caplog.clear()
    weights_on_a_gpu(blocks, quantization="fp8")
    assert "they are quantized anew, to fp8 with a scale per output channel" in caplog.text


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

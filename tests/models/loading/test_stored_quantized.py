"""Checkpoints in 8 bits as they lie in a loaded model: the same bytes, or the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bulkrun import ops
from bulkrun.errors import ModelError
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.quantized_layers import Fp8Linear, QuantizedLinear
from bulkrun.models.loading import loader, stored_quantized
from bulkrun.models.loading.target import Target
from bulkrun.ops.matmul.fp8_linear import quantize_rows
from tests.engine.gpu_stand_in import gpu_stand_in
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import edit_names, edit_weights, save_tiny_model
from tests.models.tiny_quantized import FORMATS, FP8, in_blocks, per_row, save_tiny_quantized
from tests.ops import int8_oracle
from tests.ops.fp8_oracle import fake_quantized

QKV = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
DOWN = "model.layers.0.mlp.down_proj"


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    model = load_model(path, dtype=dtype, device=options.pop("device", "cpu"), **options)
    assert isinstance(model, Decoder)
    return model


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def as_bytes(weight: torch.Tensor) -> list[list[int]]:
    return weight.as_subclass(torch.Tensor).view(torch.uint8).tolist()


def weights_on_a_gpu(path: Path, *, has_fp8: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """The weights of a model as they lie there, which on a CPU are packed.

    Rows are quantized by the reference: its kernel, a program for each row, would be interpreted for half a minute.
    """
    generator = torch.Generator()  # the stand-in has none
    with gpu_stand_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "quantize_rows", quantize_rows)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0) if has_fp8 else (8, 6))
        patch.setattr(torch, "Generator", lambda device: generator)
        model = load(path, device="cuda", **options)
        return {name: one.data.as_subclass(torch.Tensor) for name, one in model.named_parameters()}


def kind_of(name: str) -> str:
    return "int8" if name.startswith("int8") else "fp8"


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.block is None])
def test_bytes_and_scales_are_kept_where_a_row_has_one_scale(name: str, tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama_biases", name)
    stored, scale_name = tensors_of(path), FORMATS[name].scale_name
    layer = load(path, quantization=kind_of(name)).layers[0]
    for ours, parts in ((layer.attention.qkv_proj, QKV), (layer.mlp.down_proj, [DOWN])):
        weights = [stored[f"{part}.weight"] for part in parts]
        scales = [stored[f"{part}.{scale_name}"].float().reshape(-1, 1) for part in parts]
        rows = [scale.expand(len(weight), 1) for weight, scale in zip(weights, scales, strict=True)]
        assert isinstance(ours, QuantizedLinear)
        assert ours.weight.dtype == weights[0].dtype
        assert as_bytes(ours.weight) == [row for weight in weights for row in as_bytes(weight)]
        assert ours.weight_scale.tolist() == torch.cat(rows).tolist()
        assert torch.equal(ours.bias, torch.cat([stored[f"{part}.bias"] for part in parts]))
    assert len(set(layer.attention.qkv_proj.weight_scale.flatten().tolist())) >= 3  # each part has its own


def test_rows_in_another_order_are_kept_in_fp8_on_a_gpu_too(tmp_path: Path) -> None:
    """Of queries and keys whose neighbouring dimensions turn together: CUDA picks no rows of fp8."""
    path, _ = save_tiny_quantized(tmp_path, "ernie4_5", "ct_channel")
    there, here = weights_on_a_gpu(path), dict(load(path, quantization="fp8").named_parameters())
    name = "layers.0.attention.qkv_proj.weight"
    assert there[name].dtype == FP8 and as_bytes(there[name]) == as_bytes(here[name].data)


def test_weights_that_the_checkpoint_left_alone_are_quantized_where_that_is_asked_for(tmp_path: Path) -> None:
    path, plain = save_tiny_quantized(tmp_path, "llama", "ct_channel")
    ours = load(path, quantization="fp8").layers[1].attention.o_proj
    theirs = tensors_of(plain)["model.layers.1.self_attn.o_proj.weight"]
    torch.testing.assert_close(ours.weight.float() * ours.weight_scale, fake_quantized(theirs), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("block", "fp8"), ("ct_block", "fp8"), ("int8_channel", "fp8"), ("block", "int8"), ("ct_channel", "int8")],
)
@pytest.mark.parametrize("piece", [1, 2**22])
def test_blocks_and_the_other_type_are_quantized_anew_by_row(
    name: str, kind: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_quantized, "_PIECE_NUMBERS", piece)
    path, plain = save_tiny_quantized(tmp_path, "qwen2", name)
    ours = load(path, quantization=kind).layers[0].attention.qkv_proj
    theirs = torch.cat([tensors_of(plain)[f"{part}.weight"] for part in QKV])
    expected = fake_quantized(theirs) if kind == "fp8" else int8_oracle.fake_quantized(theirs)
    torch.testing.assert_close(ours.weight.float() * ours.weight_scale, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", [pytest.param(1, marks=pytest.mark.slow), 1700, 2**22])
def test_dequantized_weights_are_rounded_once(
    name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_quantized, "_PIECE_NUMBERS", piece)
    path, plain = save_tiny_quantized(tmp_path, "llama_tied", name)
    ours, theirs = weights_on_a_gpu(path, has_fp8=False, dtype=torch.float16), tensors_of(plain)
    assert torch.equal(ours["layers.0.mlp.down_proj.weight"], theirs[f"{DOWN}.weight"].half())
    qkv = torch.cat([theirs[f"{part}.weight"].half() for part in QKV])
    assert torch.equal(ours["layers.0.attention.qkv_proj.weight"], qkv)


@pytest.mark.parametrize("name", ["block", "ct_channel"])
def test_blocks_are_what_transformers_makes_of_them(name: str) -> None:
    """Where they divide the matrix: others it does not read."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(48, 72, generator=torch.Generator().manual_seed(7))
    block = (16, 36) if name == "block" else None
    quantized, scale = in_blocks(16, 36)(weight) if block else per_row(weight)
    found = Fp8Dequantize(None).convert({"weight": quantized, "weight_scale_inv": scale.float()})
    ours = torch.empty(48, 72)
    stored_quantized.StoredScale(scale.float(), block).store(quantized, Target(ours, (48, 72)))
    assert torch.equal(ours, found["weight"])


def test_a_gpu_keeps_what_is_stored_in_fp8_and_no_more(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "qwen2", "ct_channel")
    ours = weights_on_a_gpu(path)
    in_fp8 = {name for name, weight in ours.items() if weight.dtype == FP8}
    names = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert in_fp8 == {f"layers.{i}.{name}.weight" for i in range(3) for name in names} - {
        "layers.1.attention.o_proj.weight"
    }
    assert as_bytes(ours["layers.0.mlp.down_proj.weight"]) == as_bytes(tensors_of(path)[f"{DOWN}.weight"])


def test_a_fused_projection_is_dequantized_where_one_part_is_not_in_fp8(tmp_path: Path) -> None:
    path, plain = save_tiny_quantized(tmp_path, "llama", "ct_channel")
    weight = tensors_of(plain)[f"{QKV[1]}.weight"]
    edit_weights(path, **{f"{QKV[1]}.weight": weight, f"{QKV[1]}.weight_scale": None})
    ours = weights_on_a_gpu(path)
    qkv = torch.cat([tensors_of(plain)[f"{part}.weight"] for part in QKV])
    assert torch.equal(ours["layers.0.attention.qkv_proj.weight"], qkv)
    assert ours["layers.0.mlp.down_proj.weight"].dtype == ours["layers.1.attention.qkv_proj.weight"].dtype == FP8


@pytest.mark.parametrize(
    ("name", "options"),
    [("block", {}), ("ct_channel", {"has_fp8": False}), ("weights_alone", {}), ("int8_channel", {})],
)
def test_a_gpu_dequantizes_what_it_could_not_multiply_as_stored(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path, plain = save_tiny_quantized(tmp_path, "llama", name.replace("weights_alone", "ct_channel"))
    if name == "weights_alone":
        edit_quantization(path, inputs=None)
    ours = weights_on_a_gpu(path, **options)
    assert torch.equal(ours["layers.0.mlp.down_proj.weight"], tensors_of(plain)[f"{DOWN}.weight"])


def test_a_deterministic_run_on_a_gpu_dequantizes(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "ct_channel")
    with gpu_stand_in():
        model = load(path, device="cuda", deterministic=True)
    assert not [module for module in model.modules() if isinstance(module, Fp8Linear)]


@pytest.mark.parametrize("name", ["ct_channel", "fbgemm", "block", "int8_channel"])
def test_random_weights_lie_as_the_checkpoints_would(name: str, tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", name)
    stored = {key: weight.dtype for key, weight in weights_on_a_gpu(path).items()}
    (path / "model.safetensors").unlink()
    ours = weights_on_a_gpu(path, load_format="dummy")
    assert {key: weight.dtype for key, weight in ours.items()} == stored
    (logits,) = forced_logits(load(path, load_format="dummy"), [[5, 9, 30, 2, 77]], [3])
    assert logits.isfinite().all()


def test_a_head_in_fp8_is_dequantized(tmp_path: Path) -> None:
    path, plain = save_tiny_quantized(tmp_path, "llama", "ct_channel")
    quantized, scale = per_row(tensors_of(plain)["lm_head.weight"])
    edit_weights(path, lm_head__weight=quantized, lm_head__weight_scale=scale)
    edit_weights(plain, lm_head__weight=quantized.float() * scale.float())
    assert torch.equal(weights_on_a_gpu(path)["lm_head.weight"], tensors_of(plain)["lm_head.weight"])


def test_names_beside_a_vision_tower_are_understood(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "block")
    expected = weights_on_a_gpu(path)
    edit_names(path, lambda name: "language_model." + name)
    ours = weights_on_a_gpu(path)
    assert all(torch.equal(ours[name], weight) for name, weight in expected.items())


def said(path: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    weights_on_a_gpu(path, **options)
    return [record.getMessage() for record in caplog.records if record.name.startswith("bulkrun")]


def test_the_log_says_once_what_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = save_tiny_quantized(tmp_path / "rows", "llama", "ct_channel")
    blocks, _ = save_tiny_quantized(tmp_path / "blocks", "llama", "block")
    (kept,) = said(rows, caplog)
    assert kept.endswith("stored in fp8 (compressed-tensors); they are multiplied in 8 bits as they are")
    assert said(rows, caplog, quantization="fp8") == [kept]
    (old_gpu,) = said(rows, caplog, has_fp8=False)
    assert old_gpu.endswith("they are dequantized and take the memory of float32")
    (in_blocks,) = said(blocks, caplog)
    assert "fp8 (fp8, in blocks); they are dequantized and take" in in_blocks
    assert "engine.quantization: fp8 keeps 8 bits" in in_blocks
    whole_numbers, _ = save_tiny_quantized(tmp_path / "int8", "llama", "int8_channel")
    (in_int8,) = said(whole_numbers, caplog)
    assert "in int8 (compressed-tensors); they are dequantized and take" in in_int8
    assert "engine.quantization: fp8 keeps 8 bits" in in_int8
    (anew,) = said(blocks, caplog, quantization="fp8")
    assert anew.endswith("quantized anew, to fp8 with a scale per output channel")
    assert said(save_tiny_model(tmp_path / "plain"), caplog) == []


def test_scales_of_keys_and_values_are_left_out_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "ct_channel")
    names = ("k_scale", "v_scale", "k_proj.output_scale")
    edit_weights(path, **{f"model.layers.0.self_attn.{name}": torch.tensor(0.1) for name in names})
    _, about_scales = said(path, caplog)
    assert "k_scale, v_scale) are not used" in about_scales


def edit_quantization(path: Path, **changes: Any) -> None:
    """Change keys of the quantization_config; `inputs` is that of a compressed-tensors group."""
    raw = json.loads((path / "config.json").read_text())
    if "inputs" in changes:
        raw["quantization_config"]["config_groups"]["group_0"]["input_activations"] = changes.pop("inputs")
    raw["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{DOWN}.weight_scale": None}, r"down_proj\.weight holds fp8, and its .*\.weight_scale or .*missing"),
        (
            {f"{DOWN}.weight_scale": torch.ones(48, 2)},
            r"down_proj\.weight_scale is torch\.float32 \[48, 2\], but the scales .*\[48, 72\] are \[48, 1\] or \[48\]",
        ),
        ({f"{DOWN}.weight_scale": torch.ones(48, 1, dtype=torch.uint8)}, r"weight_scale is torch\.uint8 \[48, 1\]"),
        ({f"{DOWN}.weight": torch.ones(48, 72)}, r"weight holds torch\.float32, and there is a scale for it"),
        ({f"{DOWN}.weight": torch.ones(48, 72).to(torch.float8_e5m2)}, r"down_proj\.weight holds torch\.float8_e5m2"),
        ({f"{DOWN}.weight": torch.ones(3, 48, 72).to(FP8)}, r"e4m3fn \[3, 48, 72\], and what is read .*matrices"),
        ({f"{DOWN}.weight": torch.ones(48, 70).to(FP8)}, r"down_proj\.weight is \[48, 70\], but config.json makes it"),
        ({f"{DOWN}.weight_zero_point": torch.ones(48, 1)}, r"weight_zero_point is of quantized weights"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_together_are_named(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    refuses(save_tiny_quantized(tmp_path, "llama", "ct_channel")[0], changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{DOWN}.weight_scale": None}, r"down_proj\.weight holds int8, and its .*\.weight_scale or .*missing"),
        ({f"{DOWN}.weight_scale": torch.ones(48, 9)}, r"weight_scale is .* \[48, 9\], but the scales of .*\[48, 1\]"),
        ({f"{DOWN}.weight": torch.ones(48, 72).to(FP8)}, r"holds torch\.float8_e4m3fn .* matrices of torch\.int8"),
        ({f"{DOWN}.weight": torch.ones(48, 72, dtype=torch.uint8)}, r"holds torch\.uint8 \[48, 72\], .* torch\.int8"),
        ({f"{DOWN}.weight": torch.ones(48, 70, dtype=torch.int8)}, r"is \[48, 70\], but config.json makes it"),
        ({f"{DOWN}.weight_zero_point": torch.ones(48, 1, dtype=torch.int8)}, r"weight_zero_point is of quantized"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, r"norm\.weight holds torch\.int8 \[48\], .*matrices"),
    ],
)  # fmt: skip
def test_so_are_those_of_a_checkpoint_in_int8(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    refuses(save_tiny_quantized(tmp_path, "llama", "int8_channel")[0], changes, message)


def refuses(path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    edit_weights(path, **changes)
    with pytest.raises(ModelError, match=message) as error:
        load(path)
    assert str(error.value).startswith(str(path))


def test_scales_of_another_block_size_are_named(tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "block")
    edit_quantization(path, weight_block_size=[128, 128])
    with pytest.raises(
        ModelError, match=r"weight_scale_inv is torch.float32 \[\d, \d\], but .* are \[1, 1\], by config"
    ):
        load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("autofp8", r"holds torch\.float8_e4m3fn, and config\.json has no quantization_config"),
        ("int8_channel", r"holds torch\.int8: quantized weights, which are not supported"),
    ],
)
def test_8_bits_without_a_word_of_it_in_the_config_are_named(name: str, message: str, tmp_path: Path) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", name)
    raw = json.loads((path / "config.json").read_text())
    del raw["quantization_config"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        load(path)


def test_a_config_that_says_fp8_over_other_tensors_is_named(tmp_path: Path) -> None:
    path, plain = save_tiny_quantized(tmp_path, "llama", "fbgemm")
    save_file(tensors_of(plain), path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"fbgemm_fp8, but no tensor holds fp8 \(.*_proj\.weight holds torch\.float32"):
        load(path)


def test_memory_is_asked_for_by_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = save_tiny_quantized(tmp_path, "llama", "block")
    asked: list[int] = []
    monkeypatch.setattr(loader, "refuse_beyond_ram", lambda num_bytes, device, **_: asked.append(num_bytes))
    load(path)
    load(path, quantization="fp8")
    weights = sum(weight.numel() for key, weight in tensors_of(path).items() if weight.dtype == FP8)
    assert 3 * weights > asked[0] - asked[1] > 2.7 * weights  # four bytes a number, and one with its scale

"""Packed checkpoints as they lie in a loaded model, and what is said of those whose tensors do not fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bulkrun.errors import ModelError
from bulkrun.models.loading import packed_scale
from tests.models.loading.test_stored_quantized import DOWN, QKV, load, said, tensors_of, weights_on_a_gpu
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import edit_names, edit_weights
from tests.models.tiny_packed import PACKED, save_tiny_packed
from tests.ops import int8_oracle
from tests.ops.fp8_oracle import fake_quantized


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("piece", [pytest.param(1, marks=pytest.mark.slow), 1700, 2**20])
def test_weights_are_the_numbers_that_they_stand_for_rounded_once(
    name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_scale, "_PIECE_NUMBERS", piece)
    path, plain = save_tiny_packed(tmp_path, "llama_tied", name)
    ours, theirs = weights_on_a_gpu(path, dtype=torch.float16), tensors_of(plain)
    assert torch.equal(ours["layers.0.mlp.down_proj.weight"], theirs[f"{DOWN}.weight"].half())
    qkv = torch.cat([theirs[f"{part}.weight"].half() for part in QKV])
    assert torch.equal(ours["layers.0.attention.qkv_proj.weight"], qkv)


@pytest.mark.parametrize("name", ["ct_8_bits_zeros", "ct_one_scale", "ct_zeros", "ct_2_bits"])
def test_last_words_may_be_padded(name: str, tmp_path: Path) -> None:
    path, plain = save_tiny_packed(tmp_path, "llama", name, intermediate_size=75)
    ours, theirs = weights_on_a_gpu(path), tensors_of(plain)
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        assert torch.equal(ours[f"layers.{layer}.mlp.down_proj.weight"], theirs[f"{mlp}.down_proj.weight"])
        gate_up = torch.cat([theirs[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(ours[f"layers.{layer}.mlp.gate_up_proj.weight"], gate_up)


@pytest.mark.parametrize("name", ["gptq", "awq", "ct_zeros"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_they_are_quantized_anew_where_that_is_asked_for(name: str, kind: str, tmp_path: Path) -> None:
    path, plain = save_tiny_packed(tmp_path, "qwen2", name)
    ours = load(path, quantization=kind).layers[0].attention.qkv_proj
    theirs = torch.cat([tensors_of(plain)[f"{part}.weight"] for part in QKV])
    expected = fake_quantized(theirs) if kind == "fp8" else int8_oracle.fake_quantized(theirs)
    torch.testing.assert_close(ours.weight.float() * ours.weight_scale, expected, rtol=1e-6, atol=0)


def test_groups_of_minus_one_are_none(tmp_path: Path) -> None:
    """What compressed-tensors leaves there where inputs are in order."""
    path, plain = save_tiny_packed(tmp_path, "llama", "ct_zeros")
    edit_weights(path, **{f"{DOWN}.weight_g_idx": torch.full((72,), -1, dtype=torch.int32)})
    assert torch.equal(weights_on_a_gpu(path)["layers.0.mlp.down_proj.weight"], tensors_of(plain)[f"{DOWN}.weight"])


def test_zero_points_of_nothing_wrap_around_in_the_first_format(tmp_path: Path) -> None:
    """It stores them minus one: 15 stands for 0."""
    path, _ = save_tiny_packed(tmp_path, "llama", "gptq")
    stored = tensors_of(path)
    edit_weights(path, **{f"{DOWN}.qzeros": torch.full_like(stored[f"{DOWN}.qzeros"], -1)})
    ours = weights_on_a_gpu(path)["layers.0.mlp.down_proj.weight"]
    numbers = (ours / stored[f"{DOWN}.scales"].float().T.repeat_interleave(24, 1)).round()
    assert (numbers.min(), numbers.max()) == (0, 15)


def test_zero_points_that_are_no_number_of_the_weight_are_named(tmp_path: Path) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", "ct_old_zeros")
    zeros = tensors_of(path)[f"{DOWN}.weight_zero_point"]
    edit_weights(path, **{f"{DOWN}.weight_zero_point": zeros.fill_(8)})
    with pytest.raises(
        ModelError, match=r"down_proj\.weight_zero_point holds zero points 8 to 8, but .*4 bits are -8 to 7"
    ):
        load(path)


def test_a_packed_head_counts_though_config_calls_it_tied(tmp_path: Path) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama_tied", "gptq")
    head = {"qweight": (6, 136), "qzeros": (2, 17), "g_idx": (48,)}
    parts = {key: torch.ones(size, dtype=torch.int32) for key, size in head.items()}
    edit_weights(path, **{f"lm_head.{key}": value for key, value in parts.items()}, lm_head__scales=torch.ones(2, 136))
    with pytest.raises(ModelError, match=r"lm_head\.weight is \[136, 48\], but config.json makes it \[131, 48\]"):
        load(path)


def test_biases_of_zeros_that_the_model_has_not_are_left_out(tmp_path: Path) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", "gptq")
    edit_weights(path, **{f"{DOWN}.bias": torch.zeros(48)})
    load(path)
    edit_weights(path, **{f"{DOWN}.bias": torch.ones(48)})
    with pytest.raises(ModelError, match=r"has no place for 1 of the tensors: .*down_proj\.bias"):
        load(path)


def test_names_beside_a_vision_tower_are_understood(tmp_path: Path) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", "ct_group")
    expected = weights_on_a_gpu(path)
    edit_names(path, lambda name: "language_model." + name)
    ours = weights_on_a_gpu(path)
    assert all(torch.equal(ours[name], weight) for name, weight in expected.items())


def test_random_weights_need_no_tensors(tmp_path: Path) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", "awq")
    (path / "model.safetensors").unlink()
    (logits,) = forced_logits(load(path, load_format="dummy"), [[5, 9, 30, 2, 77]], [3])
    assert logits.isfinite().all()


def test_the_log_says_what_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", "gptq")
    edit_weights(path, **{"model.layers.0.self_attn.k_scale": torch.tensor(0.1)})
    line, about_cache = said(path, caplog)
    assert "weights are stored in 4 bits (gptq, groups of 24); they are dequantized and take the memory of" in line
    assert "engine.quantization: fp8 keeps 8 bits" in line
    assert "k_scale, v_scale) are not used" in about_cache
    assert "quantized anew, to fp8" in said(path, caplog, quantization="fp8")[0]


I32 = torch.int32


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"scales": None}, r"packed weight of .*down_proj has no .*down_proj\.scales"),
        ("gptq", {"qzeros": None}, r"has no .*down_proj\.qzeros"),
        ("gptq", {"scales": torch.ones(2, 48)}, r"scales is torch\.float32 \[2, 48\], but .* is \[3, 48\] of float16"),
        ("gptq", {"scales": torch.ones(3, 48, dtype=I32)}, r"scales is torch\.int32 \[3, 48\]"),
        ("gptq", {"qzeros": torch.ones(3, 5, dtype=I32)}, r"qzeros is torch\.int32 \[3, 5\], .* \[3, 6\] of int32"),
        ("gptq", {"g_idx": torch.ones(9, dtype=I32)}, r"g_idx is torch\.int32 \[9\], .* \[72\] of int32 or int64"),
        ("gptq", {"g_idx": torch.full((72,), 3, dtype=I32)}, r"g_idx names group 3 to 3, but the groups are 0 to 2"),
        ("gptq", {"g_idx": torch.arange(72, dtype=I32) - 5}, r"g_idx names group -5 to 66"),
        ("gptq", {"g_idx": torch.arange(72, dtype=I32) // 36 - 1}, r"g_idx names group -1 to 0"),
        ("gptq", {"qweight": torch.ones(9, 48)}, r"qweight is torch\.float32 \[9, 48\], not words of int32"),
        ("gptq", {"qweight": torch.ones(0, 48, dtype=I32)}, r"qweight is torch\.int32 \[0, 48\], not words of int32"),
        ("gptq", {"weight": torch.ones(48, 72)}, r"both .*down_proj\.weight and .*down_proj\.qweight"),
        ("gptq", {"weight_scale": torch.ones(48, 1)}, r"weight_scale is of quantized weights"),
        ("awq", {"qweight": torch.ones(72, 6, 1, dtype=I32)}, r"qweight is torch\.int32 \[72, 6, 1\], not words"),
        ("ct_group", {"weight_scale": None}, r"down_proj has no .*\.weight_scale"),
        ("ct_group", {"weight_shape": None}, r"down_proj has no .*\.weight_shape"),
        ("ct_group", {"weight_shape": torch.tensor([48, 99])}, r"\[48, 9\], which with 4 bits is no .* \[48, 99\]"),
        ("ct_zeros", {"weight_zero_point": None}, r"has no .*\.weight_zero_point"),
        ("ct_zeros", {"weight_zero_point": torch.ones(48, 5)}, r"zero_point is torch\.float32 .* \[6, 5\] of int32"),
        ("ct_group", {"weight_zero_point": torch.ones(48, 3)}, r"zero_point is torch\.float32 .* \[6, 3\] of int32"),
        ("ct_8_bits", {"weight_scale": torch.ones(48, 3)}, r"\[48, 3\], but .* \[48, 1\] or \[48\] or \[1\]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_together_are_named(
    name: str, changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", name)
    edit_weights(path, **{f"{DOWN}.{key}": value for key, value in changes.items()})
    with pytest.raises(ModelError, match=message) as error:
        load(path)
    assert str(error.value).startswith(str(path))


def without_quantization_config(path: Path) -> None:
    raw = json.loads((path / "config.json").read_text())
    del raw["quantization_config"]
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("name", "tensor"), [("gptq", "qweight"), ("awq", "qweight"), ("ct_group", "weight_packed")])
def test_packed_weights_without_a_word_of_it_in_the_config_are_named(name: str, tensor: str, tmp_path: Path) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", name)
    without_quantization_config(path)
    with pytest.raises(ModelError, match=r"tensor .* is of quantized weights, which .* unless config.json says how"):
        load(path)
    assert any(name.endswith(tensor) for name in tensors_of(path))


def test_a_config_that_speaks_of_them_over_plain_tensors_is_named(tmp_path: Path) -> None:
    path, plain = save_tiny_packed(tmp_path, "llama", "awq")
    save_file(load_file(plain / "model.safetensors"), path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"quantized with awq, but no tensor is called \*\.qweight; remove"):
        load(path)


def edit_config(path: Path, **changes: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(raw))


def test_a_config_of_other_bits_is_seen_by_the_shapes(tmp_path: Path) -> None:
    path, _ = save_tiny_packed(tmp_path, "llama", "gptq")
    edit_config(path, bits=8)
    with pytest.raises(ModelError, match=r"qzeros is torch\.int32|scales is torch\.float16"):
        load(path)

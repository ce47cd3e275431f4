"""gpt-oss's experts in MXFP4 as they lie in a loaded model, and what is said of tensors that do not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.mxfp4_quantization import BLOCK
from bulkrun.models.loading import mxfp4_weights
from bulkrun.models.loading.mxfp4_weights import Mxfp4Scale
from bulkrun.models.loading.target import Target
from tests.models.loading.test_stored_quantized import load, said, tensors_of, weights_on_a_gpu
from tests.models.tiny_models import edit_weights
from tests.models.tiny_mxfp4 import MAGNITUDES, save_tiny_mxfp4

EXPERTS = "model.layers.0.mlp.experts."


@pytest.mark.parametrize(("dtype", "piece"), [(torch.float32, 200), (torch.bfloat16, 1700), (torch.float16, 2**18)])
def test_weights_are_the_numbers_that_they_stand_for(
    dtype: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4_weights, "_PIECE_NUMBERS", piece)
    path, plain = save_tiny_mxfp4(tmp_path)
    ours, theirs = weights_on_a_gpu(path, dtype=dtype), tensors_of(plain)
    gate_up, bias = theirs[f"{EXPERTS}gate_up_proj"], theirs[f"{EXPERTS}gate_up_proj_bias"]
    halves = torch.cat((gate_up[..., ::2], gate_up[..., 1::2]), -1).transpose(1, 2)
    assert torch.equal(ours["layers.0.mlp.gate_up_proj.weight"], halves.to(dtype))
    assert torch.equal(ours["layers.0.mlp.down_proj.weight"], theirs[f"{EXPERTS}down_proj"].transpose(1, 2).to(dtype))
    assert torch.equal(ours["layers.0.mlp.gate_up_proj.bias"], torch.cat((bias[:, ::2], bias[:, 1::2]), -1).to(dtype))
    assert torch.equal(ours["layers.0.attention.sinks"], theirs["model.layers.0.self_attn.sinks"])


def test_every_byte_and_exponent_is_exact_in_bfloat16() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    for exponent in (0, 1, 100, 127, 140, 250):
        out = torch.empty(1, 16, BLOCK, dtype=torch.bfloat16)
        scale = Mxfp4Scale(torch.full((1, 16, 1), exponent, dtype=torch.uint8))
        scale.store(codes, Target(out, tuple(out.shape)))
        signed = [*MAGNITUDES, *(-number for number in MAGNITUDES)]
        pairs = [
            number * 2.0 ** (exponent - 127)
            for byte in range(256)
            for number in (signed[byte % 16], signed[byte // 16])
        ]
        assert out.double().flatten().tolist() == pairs


def test_the_log_and_the_model_list_say_what_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = save_tiny_mxfp4(tmp_path)
    (line,) = said(path, caplog)
    assert "stored in 4 bits (mxfp4, blocks of 32); they are dequantized and take the memory of float32" in line


def test_without_a_dtype_in_config_json_it_is_that_of_the_other_weights(tmp_path: Path) -> None:
    """As gpt-oss was published."""
    path, _ = save_tiny_mxfp4(tmp_path)
    file = path / "config.json"
    raw = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("dtype", "torch_dtype")}
    file.write_text(json.dumps(raw))
    halved = {
        name.replace(".", "__"): one.bfloat16() for name, one in tensors_of(path).items() if one.is_floating_point()
    }
    edit_weights(path, **halved)
    assert load(path).config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gate_up_proj_scales", None, r"gate_up_proj_blocks has no .*gate_up_proj_scales beside it; download"),
        (
            "down_proj_scales",
            torch.zeros(5, 64, 2, dtype=torch.uint8),
            r"is torch.uint8 \[5, 64, 2\], but .* \[5, 64, 3\]",
        ),
        ("down_proj_blocks", torch.zeros(5, 64, 3, 8, dtype=torch.uint8), r"\[5, 64, 3, 8\], not blocks of 16 bytes"),
        ("down_proj_blocks", None, r"down_proj_scales is of quantized weights"),
        ("down_proj_bias", None, r"1 of 54 tensors are missing: .*down_proj_bias"),
        ("down_proj", torch.zeros(5, 96, 64), r"has no place for 1 of the tensors: .*experts\.down_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    path, _ = save_tiny_mxfp4(tmp_path)
    edit_weights(path, **{(EXPERTS + name).replace(".", "__"): tensor})
    with pytest.raises(ModelError, match=message):
        load(path)


def test_a_dequantized_checkpoint_that_still_says_mxfp4(tmp_path: Path) -> None:
    path, plain = save_tiny_mxfp4(tmp_path)
    (plain / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ModelError, match=r"quantized with mxfp4, but no tensor is called \*_blocks; remove"):
        load(plain)

"""Tiny gpt-oss checkpoints as they are published, experts in MXFP4, and what they stand for.

Rounded and packed here from the format's description (OCP Microscaling Formats 1.0); no code of bulkrun's is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny_models import save_tiny_model

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def save_tiny_mxfp4(path: Path, variant: str = "gpt_oss_whole_panels", **overrides: Any) -> tuple[Path, Path]:
    """Write a variant with its experts in MXFP4 and, dequantized in float32, as an ordinary one: (packed, ordinary)."""
    plain = save_tiny_model(path / "plain", variant, **overrides)
    stored, back = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, numbers = pack(tensor.transpose(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            back[name] = numbers.transpose(1, 2).contiguous()
        else:
            stored[name] = back[name] = tensor
    folder = path / "packed"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(back, plain / "model.safetensors", {"format": "pt"})
    return folder, plain


def pack(weight_XOI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks uint8 [X, O, I / 32, 16], exponents uint8 [X, O, I / 32], and the numbers float32 [X, O, I]."""
    blocks_BN = weight_XOI.reshape(-1, 32).double()
    exponent_B1 = blocks_BN.abs().amax(1, keepdim=True).log2().floor() - 2
    scaled_BN, magnitudes = blocks_BN / 2**exponent_B1, torch.tensor(MAGNITUDES, dtype=torch.float64)
    nearest_BN = (scaled_BN.abs()[:, :, None] - magnitudes).abs().argmin(2)  # of eight, and a sign above their bits
    codes_BN = nearest_BN + 8 * (scaled_BN < 0)
    numbers_BN = torch.where(codes_BN > 7, -1, 1) * magnitudes[nearest_BN] * 2**exponent_B1
    *outputs, size = weight_XOI.shape
    packed = (codes_BN[:, ::2] + 16 * codes_BN[:, 1::2]).to(torch.uint8)
    scales = (exponent_B1 + 127).to(torch.uint8)
    shape = (*outputs, size // 32)
    return packed.view(*shape, 16), scales.view(shape), numbers_BN.float().view(weight_XOI.shape)

"""A checkpoint's projections in int8 or in 4 bits, as llm-compressor writes its `w8a8` and `W4A16` without calibration.

In int8 a scale per output channel, with the roundings of our own, and activations quantized per token when they come.
In 4 bits a scale for each group of 128 inputs, without zero points; activations stay as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bulkrun.ops.matmul.int8_linear import quantize_int8
from tests.benchmarks.cpu_peers.environments import GROUP_SIZE

_CODES = 8  # to a word
_PLAIN = (".x_proj.weight", ".dt_proj.weight")  # small, and of few inputs (Mamba)


def write_quantized_checkpoint(plain: Path, folder: Path, kind: str) -> Path:
    """Write into `folder` what `plain` holds, a checkpoint in one file, but projections of int8 or int4; returns it."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _config(kind)}), encoding="utf-8")
    quantize = _in_int8 if kind == "int8" else _in_4_bits
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_quantized = name.endswith("_proj.weight") and not name.endswith(_PLAIN)
        tensors |= quantize(name, tensor) if is_quantized else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(kind: str) -> dict[str, Any]:
    numbers = {"type": "int", "symmetric": True, "dynamic": False}
    if kind == "int8":
        weights = numbers | {"num_bits": 8, "strategy": "channel"}
        inputs = numbers | {"num_bits": 8, "strategy": "token", "dynamic": True}
    else:
        weights, inputs = numbers | {"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE}, None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", "re:.*[.](x|dt)_proj$"],
    }


def _in_int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values, scale = quantize_int8(weight)
    return {name: values, f"{name}_scale": scale}


def _in_4_bits(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The largest of a group becomes 7.5 steps: 15 numbers around zero, and one more below."""
    grouped = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    scale = (grouped.abs().amax(-1, keepdim=True) / 7.5).bfloat16()
    codes = (grouped / scale.float()).round().clamp(-8, 7).flatten(-2).long() + 8
    words = (codes.unflatten(-1, (-1, _CODES)) << 4 * torch.arange(_CODES)).sum(-1)
    return {
        f"{name}_packed": torch.where(words >= 2**31, words - 2**32, words).int(),
        f"{name}_scale": scale.squeeze(-1),
        f"{name}_shape": torch.tensor(weight.shape),
    }

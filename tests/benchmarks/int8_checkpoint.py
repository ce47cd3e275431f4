"""A checkpoint's projections in int8, as llm-compressor writes its `w8a8` ones without calibration: for vLLM.

A scale per output channel, with the roundings of our own; activations are quantized per token when they come.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bulkrun.ops.int8_linear import quantize_int8

_NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _NUMBERS | {"strategy": "channel", "dynamic": False},
            "input_activations": _NUMBERS | {"strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def write_int8_checkpoint(plain: Path, folder: Path) -> Path:
    """Write into `folder` what `plain` holds, a checkpoint in one file; returns it."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _QUANTIZATION}), encoding="utf-8")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensor, tensors[f"{name}_scale"] = quantize_int8(tensor)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

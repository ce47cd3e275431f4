"""Tiny checkpoints as the hub has them in 8 bits, and the same weights dequantized: the oracle.

Quantized and dequantized with plain torch, from the weights of `tiny_models`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.models.tiny_models import save_tiny_model

FP8 = torch.float8_e4m3fn
# sizes whose products in int8 are compiled, where any are
WHOLE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_LINEAR = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
           "w1", "w2", "w3", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj",
           "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
           "query_key_value", "dense", "dense_h_to_4h")  # fmt: skip


class Format(NamedTuple):
    """A way to store weights in 8 bits: what config.json says, and what one weight becomes."""

    config: dict[str, Any]
    quantize: Quantize
    scale_name: str = "weight_scale"
    block: tuple[int, int] | None = None
    extras: Mapping[str, torch.Tensor] = MappingProxyType({})  # beside each weight
    left_out: str = "lm_head"  # modules with this in their names stay as they are, beside the head


def per_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale per output channel, bf16 [O, 1], as compressed-tensors has it."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return (weight / scale.float()).clamp(-448, 448).to(FP8), scale


def whole_numbers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale per output channel, bf16 [O, 1], as llm-compressor finds it: down to -128."""
    scale = (weight.abs().amax(1, keepdim=True) / 127.5).bfloat16()
    return (weight / scale.float()).round().clamp(-128, 127).to(torch.int8), scale


def whole_numbers_of_all(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale, float16 []."""
    scale = (weight.abs().max() / 127).half()
    return (weight / scale.float()).round().clamp(-128, 127).to(torch.int8), scale


def per_row_flat(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scale = per_row(weight)
    return quantized, scale.float().flatten()


def whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale, float32 []."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(FP8), scale


def whole_in_a_list(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scale = whole(weight.half().float())
    return quantized, scale.half()[None]


def in_blocks(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Quantize:
    """A scale per block, those at the edges smaller."""

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high, wide = math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns)
        padded = F.pad(weight, (0, wide * columns - weight.shape[1], 0, high * rows - weight.shape[0]))
        scale = (padded.abs().view(high, rows, wide, columns).amax((1, 3)) / 448).to(dtype)
        return (weight / spread(scale, weight, (rows, columns))).clamp(-448, 448).to(FP8), scale

    return quantize


def spread(scale: torch.Tensor, weight: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """The scale of each number, float32 [O, I]."""
    if block is None:
        return scale.float().reshape(-1, 1).expand(weight.shape)
    rows, columns = (torch.arange(size) // step for size, step in zip(weight.shape, block, strict=True))
    return scale.float()[rows][:, columns]


def _compressed(strategy: str, *, dynamic: bool = True, **keys: Any) -> dict[str, Any]:
    number_type = keys.pop("type", "float")
    eight = {"num_bits": 8, "type": number_type, "symmetric": True}
    inputs = eight | {"dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    weights = eight | {"dynamic": False, "strategy": strategy, "block_structure": keys.pop("block", None)}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{number_type}-quantized",
        "config_groups": {"group_0": group | keys},
        "ignore": ["lm_head", "re:.*layers[.]1.self_attn.o_proj$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_BLOCKWISE = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
}
_O, _ATTENTION = "layers.1.self_attn.o_proj", "model.layers.1.self_attn"
_STATIC = {"input_scale": torch.tensor(0.5)}
_STATIC_INT8 = _STATIC | {"input_zero_point": torch.tensor(0, dtype=torch.int8)}
FORMATS: dict[str, Format] = {
    "ct_channel": Format(_compressed("channel"), per_row, left_out=_O),
    "ct_channel_flat": Format(_compressed("channel"), per_row_flat, left_out=_O),
    "ct_tensor_static": Format(_compressed("tensor", dynamic=False), whole_in_a_list, extras=_STATIC, left_out=_O),
    "ct_block": Format(_compressed("block", block=[16, 32]), in_blocks(16, 32), block=(16, 32), left_out=_O),
    "block": Format(
        _BLOCKWISE | {"weight_block_size": [20, 36]}, in_blocks(20, 36), scale_name="weight_scale_inv", block=(20, 36)
    ),
    "block_bfloat16": Format(
        _BLOCKWISE | {"weight_block_size": [128, 128]},
        in_blocks(128, 128, torch.bfloat16),
        scale_name="weight_scale_inv",
        block=(128, 128),
    ),
    "int8_channel": Format(_compressed("channel", type="int"), whole_numbers, left_out=_O),
    "int8_tensor_static": Format(
        _compressed("tensor", dynamic=False, type="int"), whole_numbers_of_all, extras=_STATIC_INT8, left_out=_O
    ),
    "autofp8": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, whole, extras=_STATIC
    ),
    "scale_inv_of_all": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        whole,
        scale_name="weight_scale_inv",
        extras={"activation_scale": torch.tensor(0.5)},
    ),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": [_ATTENTION]},
        per_row,
        left_out=_ATTENTION,
    ),
}  # fmt: skip


def save_tiny_quantized(path: Path, variant: str, name: str, **overrides: Any) -> tuple[Path, Path]:
    """Write a variant in one of FORMATS and, dequantized in float32, as an ordinary checkpoint: (8 bits, ordinary).

    What the format's config.json leaves out is not quantized: a layer's o_proj or attention in some, the head in all.
    """
    plain = save_tiny_model(path / "plain", variant, **overrides)
    return quantized_copy(plain, path / "stored", name), plain


def quantized_copy(plain: Path, folder: Path, name: str) -> Path:
    """Write a copy of a checkpoint in one of FORMATS, and in `plain` what it stands for."""
    form = FORMATS[name]

    def convert(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        quantized, scale = form.quantize(weight)
        extras = {extra: value.clone() for extra, value in form.extras.items()}
        back = quantized.float() * spread(scale, weight, form.block)
        return {"weight": quantized, form.scale_name: scale.clone()} | extras, back

    return save_converted(plain, folder, form.config, convert, form.left_out)


def save_converted(
    plain: Path,
    folder: Path,
    quantization: dict[str, Any],
    convert: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
    left_out: str,
) -> Path:
    """Write a copy of a checkpoint with its linear layers' weights converted, and in `plain` what they stand for.

    `convert` makes a weight [O, I] into tensors by the last part of their names, and what they stand for.
    """
    stored, back = {}, {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        module = key.removesuffix(".weight")
        stored[key] = back[key] = tensor
        if module.split(".")[-1] in _LINEAR and key.endswith(".weight") and left_out not in module:
            del stored[key]
            parts, back[key] = convert(tensor)
            stored |= {f"{module}.{part}": value for part, value in parts.items()}
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(back, plain / "model.safetensors", {"format": "pt"})
    return folder

"""fp8 and int8 weights: which matrices of a decoder are quantized, how they are stored, and where that cannot work.

Quantized are the projections of attention, MLP and experts, where nearly all weights of a model are; embedding, norms,
routers and lm_head keep the model's dtype, as in vLLM. Each matrix is quantized when its tensor is read, so loading
never holds more than the quantized model, one tensor and what is read ahead. Knows no files and no product
(`bulkrun.ops.matmul.fp8_linear`, `bulkrun.ops.matmul.int8_linear`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bulkrun import ops
from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.decoder.quantized_layers import (
    Fp8ExpertLinear,
    Fp8Linear,
    Int8ExpertLinear,
    Int8Linear,
    Int8Weights,
    QuantizedLinear,
)
from bulkrun.ops.cpu.int8_linear import ROW_MULTIPLE
from bulkrun.ops.matmul.fp8 import MIN_CAPABILITY, can_multiply_fp8
from bulkrun.ops.matmul.int8_linear import quantize_int8
from bulkrun.settings import Quantization

_LAYERS: Mapping[tuple[Quantization, type], Callable[..., QuantizedLinear]] = {
    ("fp8", Linear): Fp8Linear,
    ("fp8", ExpertLinear): Fp8ExpertLinear,
    ("int8", Linear): Int8Linear,
    ("int8", ExpertLinear): Int8ExpertLinear,
}
_PIECE_NUMBERS = 2**20  # quantized at a time on a CPU: what stays in its cache
_PROJECTIONS = (  # of a layer; none has all
    "attention.qkv_proj", "attention.qkvz_proj", "attention.q_b_proj", "attention.in_proj", "attention.o_proj",
    "mlp.gate_up_proj", "mlp.up_proj", "mlp.down_proj",
    "mlp.shared.mlp.gate_up_proj", "mlp.shared.mlp.up_proj", "mlp.shared.mlp.down_proj",
    "mlp.dense.gate_up_proj", "mlp.dense.down_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
)  # fmt: skip


def quantize_projections(
    model: Decoder, quantization: Quantization, is_chosen: Callable[[int, str], bool] | None
) -> None:
    """Exchange the plain projections of every layer for quantized ones; no weight may have been loaded yet.

    `is_chosen` is asked for each by the layer's number and its name there, such as mlp.down_proj; None: all are.
    """
    for i, layer in enumerate(model.layers):
        for name, plain in projections(layer):
            is_wanted = is_chosen is None or is_chosen(i, name)
            if is_wanted and not isinstance(plain, QuantizedLinear):
                layer.set_submodule(name, _LAYERS[quantization, type(plain)](plain))


def projections(layer: nn.Module) -> list[tuple[str, Any]]:
    """A layer's projections by their names there, quantized or not: where nearly all weights of a model are."""
    modules = dict(layer.named_modules())
    return [(name, modules[name]) for name in _PROJECTIONS if name in modules]


def warn_of_slow_products(model: nn.Module) -> None:
    """Say it where int8 products are not compiled: such a model is for checks, not for speed."""
    plain = [m for m in model.modules() if isinstance(m, Int8Weights) and m.zeros is None]
    if plain:
        logging.getLogger(__name__).warning(
            "engine.quantization int8: %d of the products run in plain torch, slowly; compiled ones need a processor "
            "with AVX2, g++, and sizes that are multiples of %d; leave the key out for speed",
            len(plain),
            ROW_MULTIPLE,
        )


def store_quantized(tensor: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantize a tensor [O, I] of any float dtype into (part of) a weight, fp8 or int8 [O, I], and its scale [O, 1].

    All may have further dimensions; that of a row's numbers, which the scale has not, is any but the first.
    """
    step = max(1, _PIECE_NUMBERS // weight[0].numel()) if weight.is_cpu else len(weight)
    for parts in zip(*(one.split(step) for one in (tensor, weight, scale)), strict=True):
        _store_piece(*parts)


def _store_piece(tensor: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    quantize = quantize_int8 if weight.dtype == torch.int8 else ops.quantize_rows
    sizes = enumerate(zip(weight.shape, scale.shape, strict=True))
    along = next((i for i, (ours, theirs) in sizes if ours != theirs), -1)
    rows = tensor.to(weight.device).movedim(along, -1)
    quantized, row_scale = quantize(rows.flatten(0, -2))
    weight.movedim(along, -1).copy_(quantized.view(rows.shape))
    scale.movedim(along, -1).copy_(row_scale.view(*rows.shape[:-1], 1))


def refuse_quantization(config: ModelConfig, device: torch.device, quantization: Quantization) -> None:
    """Raise ModelError for a model, UsageError for a device, that cannot have such weights."""
    refuse_quantization_on(device, quantization)
    if not isinstance(config, DecoderConfig):
        raise ModelError(
            f"engine.quantization: {quantization} is for the architectures that `bulkrun models` calls fast, and "
            f"{config.architecture} runs through transformers' own code; leave the key out"
        )


def refuse_quantization_on(device: torch.device, quantization: Quantization) -> None:
    """Raise UsageError for a device that cannot multiply such weights."""
    if quantization == "fp8":
        refuse_without_fp8(device, "engine.quantization")
    elif device.type != "cpu":
        raise UsageError(f"engine.quantization: int8 is for CPUs, and this runs on {device.type}; set fp8")


def refuse_without_fp8(device: torch.device, key: str) -> None:
    """Raise UsageError, naming the key, for a device that knows no fp8."""
    if not can_multiply_fp8(device):
        needed, there = (".".join(map(str, c)) for c in (MIN_CAPABILITY, torch.cuda.get_device_capability(device)))
        raise UsageError(
            f"{key}: fp8 needs a GPU of compute capability {needed} or above (Ada, Hopper, Blackwell), and "
            f"{torch.cuda.get_device_name(device)} has {there}; leave the key out"
        )

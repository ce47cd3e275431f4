"""fp8 weights: which matrices of a decoder are quantized, how they are stored, and where that cannot work.

Quantized are the projections of attention and MLP, where nearly all weights of a model are; embedding, norms and
lm_head keep the model's dtype, as in vLLM. Each matrix is quantized when its tensor is read, so loading never holds
more than the quantized model, one tensor and what is read ahead. Knows no files and no product
(`bulkrun.ops.fp8_linear`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bulkrun import ops
from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import Linear
from bulkrun.ops.fp8 import FP8, MIN_CAPABILITY, can_multiply_fp8

_PROJECTIONS = {"attention": ("qkv_proj", "o_proj"), "mlp": ("gate_up_proj", "down_proj")}


class Fp8Linear(nn.Module):
    """Stands where a `Linear` was: a weight fp8 [O, I], a float32 scale per output channel [O, 1], perhaps a bias [O].

    Weight and scale are uninitialized.
    """

    weight_scale: torch.Tensor

    def __init__(self, plain: Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(plain.weight, dtype=FP8), requires_grad=False)
        self.register_buffer("weight_scale", plain.weight.new_empty(plain.weight.shape[0], 1, dtype=torch.float32))
        self.bias = plain.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], in x's dtype."""
        return ops.fp8_linear(x, self.weight, self.weight_scale, self.bias)


def quantize_projections(model: Decoder, is_chosen: Callable[[int, str], bool] = lambda layer, name: True) -> None:
    """Exchange the projections of every layer for `Fp8Linear`; no weight may have been loaded yet.

    `is_chosen` is asked for each by the layer's number and its name there, such as mlp.down_proj.
    """
    for i, layer in enumerate(model.layers):
        for part, names in _PROJECTIONS.items():
            module = getattr(layer, part)
            for name in (name for name in names if is_chosen(i, f"{part}.{name}")):
                setattr(module, name, Fp8Linear(getattr(module, name)))


def store_quantized(tensor: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantize a tensor [O, I] of any float dtype into (part of) a weight, fp8 [O, I], and its scale [O, 1]."""
    quantized, row_scale = ops.quantize_rows(tensor.to(weight.device))
    weight.copy_(quantized)
    scale.copy_(row_scale)


def refuse_quantization(config: ModelConfig, device: torch.device) -> None:
    """Raise ModelError for a model, UsageError for a device, that cannot have fp8 weights."""
    refuse_without_fp8(device, "engine.quantization")
    if not isinstance(config, DecoderConfig):
        raise ModelError(
            f"engine.quantization: fp8 is for the architectures that `bulkrun models` calls fast, and "
            f"{config.architecture} runs through transformers' own code; leave the key out"
        )
    if config.moe is not None:
        raise ModelError(
            f"engine.quantization: fp8 is not there for mixtures of experts ({config.architecture}); leave the key out"
        )


def refuse_without_fp8(device: torch.device, key: str) -> None:
    """Raise UsageError, naming the key, for a device that knows no fp8."""
    if not can_multiply_fp8(device):
        needed, there = (".".join(map(str, c)) for c in (MIN_CAPABILITY, torch.cuda.get_device_capability(device)))
        raise UsageError(
            f"{key}: fp8 needs a GPU of compute capability {needed} or above (Ada, Hopper, Blackwell), and "
            f"{torch.cuda.get_device_name(device)} has {there}; leave the key out"
        )

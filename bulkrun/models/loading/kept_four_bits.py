"""Weights of four bits that stay so: on a CPU, where their product is compiled.

Then the model takes the memory of the checkpoint, and its numbers are those that it would have dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bulkrun.models.config.four_bits import FourBits
from bulkrun.models.config.mxfp4_quantization import Mxfp4Quantization
from bulkrun.models.config.packed_quantization import PackedQuantization
from bulkrun.models.config.stored_quantization import Quantized
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.decoder.quantized_layers import FourBitExpertLinear, FourBitLinear
from bulkrun.models.host_memory import available_ram_bytes
from bulkrun.models.loading.any_weights import AnyScale
from bulkrun.models.loading.packed_weights import PackedScale
from bulkrun.ops.cpu.four_bit_linear import can_pack_four_bits
from bulkrun.settings import Quantization


def four_bits_to_keep(
    stored: Quantized | None, scales: Mapping[str, AnyScale], device: torch.device, quantization: Quantization | None
) -> FourBits | None:
    """How a checkpoint's weights are meant that may stay in four bits; None: none may.

    `scales`: what all of them are dequantized with. They stay where every group is of inputs one after the other.
    """
    if device.type != "cpu" or quantization == "fp8":
        return None
    if not isinstance(stored, PackedQuantization | Mxfp4Quantization):
        return None
    are_in_order = all(not isinstance(scale, PackedScale) or scale.groups is None for scale in scales.values())
    return stored.four_bits if are_in_order else None


def fits_in_int8(model: Decoder) -> bool:
    """Whether weights of int8, which are multiplied sooner than codes, take no more than half of the memory left.

    The numbers are the same. The other half is for keys and values.
    """
    sizes = [one.numel() if name.endswith("_proj.weight") else one.nbytes for name, one in model.named_parameters()]
    return sum(sizes) <= available_ram_bytes() // 2


def keep_four_bits(
    model: Decoder, meant: FourBits, is_stored_so: Callable[[int, str], bool], dtype: torch.dtype, *, in_int8: bool
) -> bool:
    """Exchange the projections that are stored so, and whose product is compiled; were there any?"""
    kept = False
    for name, module in [(name, module) for name, module in model.named_modules() if name.endswith("_proj")]:
        _, layer, part, projection = name.split(".")
        if is_stored_so(int(layer), f"{part}.{projection}") and _can_keep(module, meant, dtype, in_int8=in_int8):
            kind = FourBitLinear if isinstance(module, Linear) else FourBitExpertLinear
            setattr(model.get_submodule(f"layers.{layer}.{part}"), projection, kind(module, meant, in_int8=in_int8))
            kept = True
    return kept


def _can_keep(module: Linear | ExpertLinear, meant: FourBits, dtype: torch.dtype, *, in_int8: bool) -> bool:
    """Of experts both matrices can be kept, or none."""
    shapes = [tuple(module.weight.shape)]
    if isinstance(module, ExpertLinear):
        hidden, inner = module.mlp_sizes
        shapes = [(2 * inner, hidden), (hidden, inner)]
    return all(
        can_pack_four_bits(columns, size, meant.size_of_group(size), dtype, int8=in_int8) for columns, size in shapes
    )

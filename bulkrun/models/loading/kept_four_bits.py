"""Weights of four bits that stay so: the model takes the memory of the checkpoint, its numbers are the same.

On a CPU they do where their product is compiled, unless int8 is asked for and fits. On a GPU large steps are faster
with numbers that are unpacked once: there only a model stays so that would leave too little memory for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bulkrun.models.config.four_bits import FourBitScheme
from bulkrun.models.config.mxfp4_quantization import Mxfp4Quantization
from bulkrun.models.config.packed_quantization import PackedQuantization
from bulkrun.models.config.stored_quantization import Quantized
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.decoder.quantized_layers import FourBitExpertLinear, FourBitLinear, FourBitWeights
from bulkrun.models.host_memory import available_ram_bytes
from bulkrun.models.loading.any_weights import AnyScale
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.packed_scale import PackedScale
from bulkrun.models.loading.quantization import projections
from bulkrun.models.loading.row_orders import reordered_projections
from bulkrun.ops.cpu.four_bit_linear import can_pack_four_bits
from bulkrun.ops.matmul.unpack_codes import CODES_PER_BYTE


def four_bits_to_keep(stored: Quantized | None, scales: Mapping[str, AnyScale]) -> FourBitScheme | None:
    """What the codes of weights that may stay in four bits stand for; None: none may stay.

    `scales`: what all of them are dequantized with. They stay where every group is of inputs one after the other.
    """
    if not isinstance(stored, PackedQuantization | Mxfp4Quantization):
        return None
    are_in_order = all(not isinstance(scale, PackedScale) or scale.groups is None for scale in scales.values())
    return stored.four_bits if are_in_order else None


def keeping_pays(model: Decoder, options: LoadOptions) -> bool:
    """Whether weights of four bits are better kept than made into what is asked for.

    On a GPU any other form is multiplied faster, on a CPU int8 alone is. There it is a question of memory, half of
    which is for keys and values.
    """
    device, quantization = options.device, options.quantization
    if device.type == "cpu" and quantization is None:
        return True
    if quantization == "fp8":
        return False
    itemsize = 1 if quantization == "int8" else options.dtype.itemsize
    num_bytes = 0
    for name, weight in model.named_parameters():
        num_bytes += weight.numel() * itemsize if name.endswith("_proj.weight") else weight.nbytes
    return num_bytes > _free_bytes(device) // 2


def keep_four_bits(
    model: Decoder, scheme: FourBitScheme, is_stored_so: Callable[[int, str], bool], options: LoadOptions
) -> bool:
    """Exchange the projections that are stored so and can be multiplied so. Returns whether there were any.

    `is_stored_so`: of a layer's projection, such as mlp.down_proj.
    """
    kept, in_int8, on_cpu = False, options.quantization == "int8", options.device.type == "cpu"
    for i, layer in enumerate(model.layers):
        for name, module in projections(layer):
            can_keep = not on_cpu or _are_compiled(module, scheme, options.dtype, in_int8=in_int8)
            is_as_stored = is_stored_so(i, name) and name not in reordered_projections(model.config)
            if can_keep and _have_whole_groups(module, scheme) and is_as_stored:
                kind: type[FourBitWeights] = FourBitLinear if isinstance(module, Linear) else FourBitExpertLinear
                layer.set_submodule(name, kind(module, scheme, in_int8=in_int8))
                kept = True
    return kept


def _shapes(module: Linear | ExpertLinear) -> list[tuple[int, int]]:
    """Outputs and inputs; of experts both matrices', for both are kept, or none."""
    if isinstance(module, Linear):
        columns, size = module.weight.shape
        return [(columns, size)]
    return module.mlp_sizes.shapes


def _have_whole_groups(module: Linear | ExpertLinear, scheme: FourBitScheme) -> bool:
    groups = [(size, scheme.size_of_group(size)) for _, size in _shapes(module)]
    return not any(size % group or group % CODES_PER_BYTE for size, group in groups)


def _are_compiled(module: Linear | ExpertLinear, scheme: FourBitScheme, dtype: torch.dtype, *, in_int8: bool) -> bool:
    has_product = isinstance(module, Linear) or module.mlp_sizes.has_gates
    return has_product and all(
        can_pack_four_bits(columns, size, scheme.size_of_group(size), dtype, int8=in_int8)
        for columns, size in _shapes(module)
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return available_ram_bytes()
    torch.cuda.empty_cache()  # of the engine with another adapter that was here before
    return torch.cuda.mem_get_info(device)[0]

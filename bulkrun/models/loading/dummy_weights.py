"""Random weights of the right shapes, so that any model can be measured without its checkpoint."""

from __future__ import annotations

import torch

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.decoder_layer import DecoderLayer
from bulkrun.models.decoder.norms import fill_norms
from bulkrun.models.decoder.quantized_layers import FourBitWeights, QuantizedLinear
from bulkrun.models.loading.quantization import store_quantized

_STD = 0.02  # small enough that activations stay finite through any number of layers


@torch.no_grad()
def fill_with_random_weights(model: Decoder) -> None:
    """Fill every parameter where it lies: norms and scales of layers with ones, the rest with the same normal noise on
    every run."""
    generator = torch.Generator(model.device).manual_seed(0)
    for module in model.modules():
        if isinstance(module, FourBitWeights):
            _fill_codes(module, generator)
    scales = {module.weight: module.weight_scale for module in model.modules() if isinstance(module, QuantizedLinear)}
    for parameter in model.parameters():
        if parameter.dtype == torch.uint8:
            continue
        if parameter in scales:
            noise = torch.empty_like(parameter, dtype=model.dtype).normal_(std=_STD, generator=generator)
            store_quantized(noise, parameter.data, scales[parameter])
        else:
            parameter.normal_(std=_STD, generator=generator)
    fill_norms(model)
    for module in model.modules():
        if isinstance(module, DecoderLayer) and module.scale is not None:
            module.scale.fill_(1.0)


def _fill_codes(module: FourBitWeights, generator: torch.Generator) -> None:
    """Any codes, around zero and scaled to the noise of the others."""
    module.weight.random_(0, 256, generator=generator)
    codebook = torch.tensor(module.scheme.codebook)
    module.weight_scale.fill_(_STD / codebook.std())
    if module.weight_zero is not None:
        module.weight_zero.fill_(len(codebook) // 2)

"""Matrices of a model computed in float32 that are stored in bf16 stay so on a CPU: the numbers are the same.

Their product reads half the memory and gives the bits that float32 weights would (`cpu.panel_linear`). So a processor
that does not multiply bf16 takes for such a checkpoint the memory that one takes which does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.loading.any_weights import AnyWeights
from bulkrun.models.loading.kept_quantized import kept_projections
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.quantization import projections
from bulkrun.models.loading.tensor_names import targets
from bulkrun.ops.cpu.fused_experts import fit_panels
from bulkrun.ops.cpu.panel_linear import compiles_panels, fills_panels


def hold_in_bfloat16(model: Decoder, weights: AnyWeights, changed: Collection[str], options: LoadOptions) -> None:
    """Make the plain matrices and embeddings of a float32 model that can be bf16 so; they have no memory yet.

    changed: tensors that do not become weights as they are stored. Without tensors config.json tells what they are.
    """
    if options.dtype != torch.float32 or options.device.type != "cpu" or not compiles_panels(torch.float32):
        return
    stored = weights.tensors
    is_bf16 = {name: one.dtype == torch.bfloat16 for name, one in stored.items()}
    as_configured = not stored and model.config.dtype == "bfloat16"
    wide = {
        _storage(target.view)
        for name, target in targets(model, stored)
        if name in changed or not is_bf16.get(name, as_configured)
    }
    if not stored:
        wide |= {_storage(module.weight) for module in _dequantized(model, weights)}
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear) and _has_product(module) and _storage(module.weight) not in wide:
            module.rows_dtype, module.weight = options.dtype, _in_bfloat16(module.weight)
    head = model.lm_head
    is_wide_head = isinstance(head, Linear) and head.is_tied and head.rows_dtype is None
    if not is_wide_head and _storage(model.embed_weight) not in wide:
        model.embeds_in, model.embed_weight = options.dtype, _in_bfloat16(model.embed_weight)
        model.tie_weights()
    inputs = model.layer_inputs
    if inputs is not None and _storage(inputs.weight) not in wide:
        inputs.weight = _in_bfloat16(inputs.weight)


def _dequantized(model: Decoder, weights: AnyWeights) -> Iterator[Linear | ExpertLinear]:
    """The plain projections whose weights config.json says are stored in fewer bits: from those, float32 is made."""
    if model.config.stored_quantization is None:
        return
    is_stored_so = kept_projections(model.config, weights)
    for i, layer in enumerate(model.layers):
        for name, module in projections(layer):
            if isinstance(module, Linear | ExpertLinear) and is_stored_so(i, name):
                yield module


def _has_product(module: Linear | ExpertLinear) -> bool:
    if module.weight.dtype != torch.float32 or "weight" in getattr(module, "in_float32", ()):
        return False
    if isinstance(module, Linear):
        return fills_panels(*module.weight.shape)
    return fit_panels(module.mlp_sizes)


def _in_bfloat16(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.data.bfloat16(), requires_grad=False)


def _storage(tensor: torch.Tensor) -> int:
    """What the parts of a fused matrix share, as a key, where it has no memory yet."""
    return tensor.untyped_storage()._cdata

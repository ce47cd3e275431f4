"""The products of a model that transformers runs, exchanged for the engine's: in panels of this processor, or 8 bits.

What is exchanged are its `nn.Linear` modules, which hold nearly all weights of an encoder and nearly all of its work.
Everything between them stays the model's own code. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bulkrun.errors import ModelError
from bulkrun.models.decoder.layers import Linear
from bulkrun.models.decoder.quantized_layers import Fp8Linear, Int8Linear
from bulkrun.models.embedding.packed_transformer import PackedTransformer
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.two_texts import hidden_states
from bulkrun.models.general.comparison import distance, tolerance
from bulkrun.models.loading.quantization import store_quantized, warn_of_slow_products
from bulkrun.ops.cpu.stack_memory import Matrix
from bulkrun.ops.matmul.linear import is_packed, pack_linear_weight
from bulkrun.settings import Quantization

Product = Linear | Fp8Linear | Int8Linear


class OwnProduct(nn.Module):
    """A product of the engine's where the model's code calls an `nn.Linear`."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O], in x's dtype."""
        rows_TI = x.reshape(-1, x.shape[-1]).contiguous()
        out: torch.Tensor = self.product(rows_TI)
        return out.view(*x.shape[:-1], out.shape[-1])


def use_own_products(encoder: PaddedEncoder | PackedTransformer, quantization: Quantization | None) -> None:
    """Exchange what gains by it: for 8 bits all products, else those for which this device has a faster layout.

    A model whose code does more with an `nn.Linear` than call it keeps its own; with 8 bits that code fails. Raises
    ModelError for 8 bits of a model without such modules.
    """
    expected = hidden_states(encoder)
    exchanged = _exchange(encoder.model, quantization)
    if quantization is not None:
        if not exchanged:
            raise ModelError("engine.quantization: none of its products is an nn.Linear; leave the key out")
        warn_of_slow_products(encoder.model)
        hidden_states(encoder)
        return
    try:
        is_same = distance(hidden_states(encoder), expected) < tolerance(encoder.dtype)
    except (AttributeError, TypeError):
        is_same = False
    if not is_same:
        for name, plain in exchanged.items():
            encoder.model.set_submodule(name, plain)


def _exchange(model: nn.Module, quantization: Quantization | None) -> Mapping[str, nn.Linear]:
    """What was there, by name."""
    plain = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    made = {name: own_product(module.weight.data, module.bias, quantization) for name, module in plain.items()}
    for name, product in made.items():
        if product is not None:
            model.set_submodule(name, OwnProduct(product))
    return {name: plain[name] for name, product in made.items() if product is not None}


def own_product(weight: torch.Tensor, bias: torch.Tensor | None, quantization: Quantization | None) -> Product | None:
    """The product with a weight [O, I] and perhaps a bias [O]; None where the engine has no faster one."""
    linear = Linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    if quantization is None:
        packed = pack_linear_weight(weight)
        if not is_packed(packed):
            return None
        linear.weight = nn.Parameter(packed, requires_grad=False)
        return linear
    quantized = Int8Linear(linear) if quantization == "int8" else Fp8Linear(linear)
    store_quantized(weight, quantized.weight.data, quantized.weight_scale)
    quantized.pack()
    return quantized


def own_matrix(weight: torch.Tensor, bias: torch.Tensor | None, quantization: Quantization | None) -> Matrix:
    """The same in panels, for compiled layers; there must be such, in float32, bf16 or int8."""
    product = own_product(weight, bias, quantization)
    own_bias = None if bias is None else bias.data
    if isinstance(product, Int8Linear):
        return Matrix(product.int8_weight, own_bias)
    assert isinstance(product, Linear), "whoever compiles layers asks for them before"
    return Matrix(product.weight.data, own_bias)

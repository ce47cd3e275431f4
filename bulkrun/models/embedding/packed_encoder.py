"""An encoder of BERT's kind on a GPU: op by op over packed texts, so nothing is padded and no mask is looked at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bulkrun.models.embedding.encoder_modules import find_layers
from bulkrun.models.embedding.own_products import own_product
from bulkrun.models.embedding.packed_layers import are_the_models, embedded
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.ops.dispatch import uses_triton
from bulkrun.ops.encoder_layers import EncoderLayer, EncoderSizes, PlainMatrix, Product, encode, encode_layer
from bulkrun.settings import Quantization


class PackedEncoder:
    """Implements `TextEncoder`."""

    def __init__(
        self,
        encoder: PaddedEncoder,
        embeddings: nn.Module,
        layers: Sequence[EncoderLayer[Product]],
        sizes: EncoderSizes,
    ) -> None:
        self.config, self.dtype, self.device = encoder.config, encoder.dtype, encoder.device
        self.pair_separator = encoder.pair_separator
        self._embeddings, self._layers, self._sizes = embeddings, layers, sizes

    def __call__(self, texts: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, E], or [S, E] of `kept`: in the last layer no more than their part is computed."""
        lens, x_TE = texts.layout(), embedded(self._embeddings, texts, self.pair_separator)
        x_TE = encode(x_TE, lens, self._layers[:-1], self._sizes)
        return encode_layer(x_TE, lens, self._layers[-1], self._sizes, kept)

    def free_scratch(self) -> None:
        """Nothing is kept between steps."""


def pack_encoder(encoder: PaddedEncoder, quantization: Quantization | None) -> PackedEncoder | None:
    """The same model over packed texts; None where it is of another kind, or its device has no kernels.

    The model given has nothing but its embeddings afterwards.
    """
    weights = next(encoder.model.parameters())
    if not uses_triton(weights):
        return None
    found = find_layers(encoder.model, encoder.config)
    if found is None or not are_the_models(found, encoder):
        return None

    def product(matrix: PlainMatrix) -> Product:
        return own_product(matrix.weight, matrix.bias, quantization) or matrix

    embeddings, layers = encoder.model.get_submodule("embeddings"), []
    encoder.model = None  # type: ignore[assignment]  # so that each layer's plain weights go once it has others
    while found.layers:
        layers.append(found.layers.pop(0).map(product))
    return PackedEncoder(encoder, embeddings, layers, found.sizes)

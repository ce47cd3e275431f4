"""An encoder of BERT's kind over packed texts: transformers' own embeddings, and the layers that were found in it.

What was found is believed once it makes the same hidden states as transformers does.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import torch
from torch import nn

from bulkrun.models.embedding.encoder_modules import EncoderModules
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder, typed
from bulkrun.models.embedding.two_texts import hidden_states, two_texts
from bulkrun.models.general.comparison import distance, tolerance
from bulkrun.models.general.in_float32 import in_float32
from bulkrun.ops.encoder_layers import EncoderLayer, Norm, PlainMatrix, Product, encode


def embedded(embeddings: nn.Module, texts: PackedTexts, pair_separator: int | None = None) -> torch.Tensor:
    """[T, E]: what goes into the first layer; `pair_separator` as in `TextEncoder`.

    transformers' code is asked for one row of tokens with their positions.
    """
    text_T, ids = texts.text_of_token(), texts.token_ids_T
    positions = texts.positions(text_T)
    padding = getattr(embeddings, "padding_idx", None)
    if padding is not None:  # RoBERTa counts from there on, and does not count it, also where a text contains it
        counts = ids != padding
        counted = counts.cumsum(0)
        before_S = counted[texts.ends_S - texts.lens_S] - counts[texts.ends_S - texts.lens_S].long()
        positions = (counted - before_S[text_T]) * counts + padding
    types = {name: types_T[None] for name, types_T in typed(texts, pair_separator).items()}
    out: torch.Tensor = embeddings(input_ids=ids[None], position_ids=positions[None], **types)
    return out[0]


@torch.inference_mode()
def are_the_models(found: EncoderModules, encoder: PaddedEncoder) -> bool:
    """Whether the layers make transformers' hidden states, in float32. What fails does not: kernels that cannot be
    compiled or launched, and embeddings of no more tokens than there are positions, too."""
    texts, embeddings = PackedTexts.of(two_texts(encoder), encoder.device), encoder.model.get_submodule("embeddings")
    many = PackedTexts.of([[0]] * (encoder.config.max_position_embeddings + 1), encoder.device)
    with suppress(Exception), in_float32(encoder.model):
        embedded(embeddings, many, encoder.pair_separator)
        expected_TE, x_TE = hidden_states(encoder), embedded(embeddings, texts, encoder.pair_separator)
        layers = [_in_float32(layer) for layer in found.layers]
        ours_TE = encode(x_TE, texts.layout(), layers, found.sizes)
        return distance(ours_TE, expected_TE) < tolerance(torch.float32)
    return False


def _in_float32(layer: EncoderLayer[PlainMatrix]) -> EncoderLayer[Product]:
    def widened(norm: Norm) -> Norm:
        return Norm(norm.weight.float(), norm.bias.float())

    wide: EncoderLayer[Product] = layer.map(lambda plain: PlainMatrix(plain.weight.float(), plain.bias.float()))
    return dataclasses.replace(wide, attention_norm=widened(layer.attention_norm), mlp_norm=widened(layer.mlp_norm))

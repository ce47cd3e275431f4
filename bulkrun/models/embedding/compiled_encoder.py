"""An encoder of BERT's kind on a CPU: its layers over packed texts in one compiled call, in this processor's panels.

Embeddings are made by transformers' own code, which is asked for one row of tokens with their positions. What was found
in a model is believed once the reference makes the same hidden states of it as transformers does.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import torch
from torch import nn

from bulkrun.models.embedding.encoder_modules import EncoderModules, find_layers
from bulkrun.models.embedding.own_products import own_matrix
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder, typed
from bulkrun.models.embedding.step_cache import StepCache
from bulkrun.models.embedding.two_texts import distance, hidden_states, tolerance, two_texts
from bulkrun.models.general.in_float32 import in_float32
from bulkrun.ops.cpu.encoder_stack import EncoderStack, can_stack_encoder
from bulkrun.ops.cpu.int8_linear import can_pack_int8
from bulkrun.ops.encoder_layers import EncoderLayer, Norm, PlainMatrix, encode
from bulkrun.settings import DEFAULT_BLOCK_SIZE, Quantization


class CompiledEncoder:
    """Implements `TextEncoder`. A text's hidden states have the same bits whatever else is in the step."""

    def __init__(self, encoder: PaddedEncoder, embeddings: nn.Module, stack: EncoderStack) -> None:
        self.config, self.dtype, self.device = encoder.config, encoder.dtype, encoder.device
        self.pair_separator = encoder.pair_separator
        self._embeddings, self._stack = embeddings, stack
        self._cache = StepCache(self.config, DEFAULT_BLOCK_SIZE, self.dtype, self.device)

    def __call__(self, texts: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, E], or [S, E] of `kept`: in the last layer no more than their part is computed."""
        step = self._cache.lay_out(texts)
        x_TE = self._stack.room(len(texts.token_ids_T))
        x_TE.copy_(embedded(self._embeddings, texts, self.pair_separator))
        return self._stack(x_TE, step.k, step.v, step.meta, kept)

    def free_scratch(self) -> None:
        """Give the cache back."""
        self._cache.free()


def compile_encoder(encoder: PaddedEncoder, quantization: Quantization | None) -> CompiledEncoder | None:
    """The same model, compiled; None where it is of another kind or this processor or these sizes have no such call.

    The model given has nothing but its embeddings afterwards.
    """
    if quantization == "fp8" or encoder.device.type != "cpu":
        return None
    found = find_layers(encoder.model, encoder.config)
    if found is None or not _can_stack(found, encoder, quantization) or not _is_same(found, encoder):
        return None
    embeddings, layers = encoder.model.get_submodule("embeddings"), []
    encoder.model = None  # type: ignore[assignment]  # so that each layer's plain weights go once it is in panels
    while found.layers:
        layers.append(found.layers.pop(0).map(lambda matrix: own_matrix(*matrix, quantization)))
    return CompiledEncoder(encoder, embeddings, EncoderStack(layers, found.sizes, encoder.dtype))


def embedded(embeddings: nn.Module, texts: PackedTexts, pair_separator: int | None = None) -> torch.Tensor:
    """[T, E]: what goes into the first layer; `pair_separator` as in `TextEncoder`."""
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


def _can_stack(found: EncoderModules, encoder: PaddedEncoder, quantization: Quantization | None) -> bool:
    inner, width = found.layers[0].up.weight.shape
    if quantization == "int8" and not (can_pack_int8(inner, width) and can_pack_int8(width, inner)):
        return False
    return can_stack_encoder(encoder.dtype, width, inner, found.sizes.head_dim)


@torch.inference_mode()
def _is_same(found: EncoderModules, encoder: PaddedEncoder) -> bool:
    """Whether the layers as they were found make transformers' hidden states, in float32. What fails does not."""
    texts, embeddings = PackedTexts.of(two_texts(encoder), encoder.device), encoder.model.get_submodule("embeddings")
    with suppress(RuntimeError, TypeError, AttributeError), in_float32(encoder.model):
        expected_TE, x_TE = hidden_states(encoder), embedded(embeddings, texts, encoder.pair_separator)
        ours_TE = encode(x_TE, texts.lens, map(_in_float32, found.layers), found.sizes)
        return distance(ours_TE, expected_TE) < tolerance(torch.float32)
    return False


def _in_float32(layer: EncoderLayer[PlainMatrix]) -> EncoderLayer[PlainMatrix]:
    wide = layer.map(lambda matrix: PlainMatrix(*(part.float() for part in matrix)))
    norms = {name: Norm(*(part.float() for part in getattr(layer, name))) for name in ("attention_norm", "mlp_norm")}
    return dataclasses.replace(wide, **norms)

"""An encoder of BERT's kind on a CPU: its layers over packed texts in one compiled call, in this processor's panels."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun.models.embedding.encoder_modules import EncoderModules, find_layers
from bulkrun.models.embedding.own_products import own_matrix
from bulkrun.models.embedding.packed_layers import are_the_models, embedded
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.step_cache import StepCache
from bulkrun.ops.cpu.encoder_stack import EncoderStack, can_stack_encoder
from bulkrun.ops.cpu.int8_linear import can_pack_int8
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
        return self._stack(x_TE, step.cache.k[0], step.cache.v[0], step.meta, kept)

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
    if found is None or not _can_stack(found, encoder, quantization) or not are_the_models(found, encoder):
        return None
    embeddings, layers = encoder.model.get_submodule("embeddings"), []
    encoder.model = None  # type: ignore[assignment]  # so that each layer's plain weights go once it is in panels
    while found.layers:
        layers.append(found.layers.pop(0).map(lambda matrix: own_matrix(matrix.weight, matrix.bias, quantization)))
    return CompiledEncoder(encoder, embeddings, EncoderStack(layers, found.sizes, encoder.dtype))


def _can_stack(found: EncoderModules, encoder: PaddedEncoder, quantization: Quantization | None) -> bool:
    inner, width = found.layers[0].up.weight.shape
    if quantization == "int8" and not (can_pack_int8(inner, width) and can_pack_int8(width, inner)):
        return False
    return can_stack_encoder(encoder.dtype, width, inner, found.sizes.head_dim)

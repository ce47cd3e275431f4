"""Any other encoder on a GPU: transformers' own code over packed texts as one row, its attention exchanged for ours.

Nothing is padded, and no mask is made that somebody waits for. Ours is believed once it gives the hidden states that
the model's own attention gives, of a text that is longer than its windows too. Knows no architecture.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from bulkrun import ops
from bulkrun.errors import ModelError, described
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder, typed
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.embedding.two_texts import two_texts
from bulkrun.models.general.attention_interface import STEP, Asked, register_attention
from bulkrun.models.general.comparison import distance, tolerance
from bulkrun.models.general.in_float32 import in_float32
from bulkrun.ops.dispatch import uses_triton

ATTENTION_NAME = "bulkrun_packed"
_BEYOND_WINDOW = 20  # tokens of the text that shows where a window ends
_LONGEST_CHECK = 8192  # tokens


@dataclass(slots=True)
class _Step:
    """What attention layers must know of the texts that run; all of them hold this one object."""

    texts: ops.TextLens | None = None
    widest_window: int = 0


class PackedTransformer:
    """Implements `TextEncoder`."""

    def __init__(self, encoder: PaddedEncoder) -> None:
        self.model, self.config, self.pair_separator = encoder.model, encoder.config, encoder.pair_separator
        self.dtype, self.device = encoder.dtype, encoder.device
        self.step = _Step()
        for module in self.model.modules():
            setattr(module, STEP, self.step)

    def __call__(self, texts: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, E], or [S, E] of `kept`."""
        inputs = {"input_ids": texts.token_ids_T, "position_ids": texts.positions(texts.text_of_token())}
        as_rows = {name: of_T[None] for name, of_T in (inputs | typed(texts, self.pair_separator)).items()}
        self.step.texts = texts.layout()
        hidden_TE: torch.Tensor = self.model(**as_rows).last_hidden_state[0]
        return hidden_TE if kept is None else hidden_TE[kept]

    def free_scratch(self) -> None:
        """Nothing is kept between steps."""


def pack_transformer(encoder: PaddedEncoder) -> PackedTransformer | None:
    """The same model over packed texts; None where its attention cannot be exchanged, or its device has no kernels.

    The model given has this attention afterwards.
    """
    if not uses_triton(next(encoder.model.parameters())):
        return None
    register_attention(ATTENTION_NAME, _packed_attention)
    own = encoder.model.config._attn_implementation
    try:
        packed = PackedTransformer(encoder)
        if _is_same(packed, encoder):
            return packed
    except Exception as error:  # whatever its code does without a mask, it is then no model that runs so
        logging.getLogger(__name__).warning(
            "%s runs in padded batches, slower: over packed texts it failed (%s)",
            encoder.config.architecture,
            described(error),
        )
    encoder.model.set_attn_implementation(own)
    return None


@torch.inference_mode()
def _is_same(packed: PackedTransformer, encoder: PaddedEncoder) -> bool:
    texts = _texts_to_check(encoder)
    with in_float32(encoder.model):
        expected_TE = _states(encoder, texts)
        encoder.model.set_attn_implementation(ATTENTION_NAME)
        ours_TE = _states(packed, texts)
    longest = len(texts[-1])
    has_shown = packed.step.widest_window < longest or longest >= encoder.config.max_position_embeddings
    return has_shown and distance(ours_TE, expected_TE) < tolerance(torch.float32)


def _texts_to_check(encoder: PaddedEncoder) -> list[list[int]]:
    """Two short texts, and where the model has a window one that is longer, as far as it takes such texts."""
    texts, window = two_texts(encoder), getattr(encoder.model.config, "sliding_window", None)
    if window:
        length = min(window + _BEYOND_WINDOW, encoder.config.max_position_embeddings, _LONGEST_CHECK)
        texts.append([(3 + 11 * place) % min(encoder.config.vocab_size, 1000) for place in range(length)])
    return sorted(texts, key=len)


def _states(encoder: TextEncoder, texts: list[list[int]]) -> torch.Tensor:
    return encoder(PackedTexts.of(texts, encoder.device)).float()


def _packed_attention(module: nn.Module, asked: Asked) -> torch.Tensor:
    """A window is what transformers' flash attention takes it for: keys less than so many tokens away.

    Raises ModelError for what the op cannot do.
    """
    asked.refuse_more()
    if asked.has_mask or asked.soft_cap is not None or asked.sinks_H is not None:
        raise ModelError("its attention wants a mask, a soft cap or sinks")
    step: _Step = getattr(module, STEP)
    assert step.texts is not None, "`PackedTransformer` says which texts run"
    step.widest_window = max(step.widest_window, asked.sliding_window or 0)
    states = asked.q_THD, asked.k_TKD, asked.v_TKV
    return ops.packed_attention(*states, step.texts, scale=asked.scale, sliding_window=asked.sliding_window)

"""Two short texts through an encoder: whether it does what it should is found out by what becomes of them."""

from __future__ import annotations

from contextlib import suppress

import torch

from bulkrun.errors import ModelError
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.general.comparison import distance, tolerance
from bulkrun.models.general.in_float32 import in_float32

_LENS = (5, 12)


def moved_by_padding(encoder: PaddedEncoder) -> tuple[float, float]:
    """How far padding moves hidden states, and how far it may: in float32, where rounding hides nothing."""
    if encoder.dtype != torch.float32:
        # code that casts to a dtype of its own choice, and memory too small for a layer in float32, leave the other way
        with suppress(RuntimeError), in_float32(encoder.model):
            return _moved_by_padding(encoder), tolerance(torch.float32)
    return _moved_by_padding(encoder), tolerance(encoder.dtype)


def _moved_by_padding(encoder: PaddedEncoder) -> float:
    short, long = two_texts(encoder)
    alone_TE = _states(encoder, short)
    refuse_not_finite(alone_TE)
    return distance(_states(encoder, short, long)[: len(short)], alone_TE)


def refuse_not_finite(numbers: torch.Tensor) -> None:
    """Raise ModelError for numbers made of a text that are none: they differ from any others, whoever made them."""
    if not numbers.isfinite().all():
        raise ModelError(
            "what it makes of a short text is not finite: its weights are damaged, or too large for their dtype; "
            "download it again, or set engine.dtype to float32"
        )


def hidden_states(encoder: TextEncoder) -> torch.Tensor:
    """float32 [T, E] of both texts, side by side."""
    return _states(encoder, *two_texts(encoder))


def two_texts(encoder: TextEncoder) -> list[list[int]]:
    """Token ids of both, which the model has: a short one and a longer one; pairs where it has types for them."""
    limit, separator = min(encoder.config.vocab_size, 1000), encoder.pair_separator
    texts = [[(7 + 13 * place) % limit for place in range(length)] for length in _LENS]
    if separator is not None:
        texts = [[*text[: len(text) // 2], separator, *text[len(text) // 2 + 1 :]] for text in texts]
    return texts


@torch.inference_mode()
def _states(encoder: TextEncoder, *texts: list[int]) -> torch.Tensor:
    return encoder(PackedTexts.of(texts, encoder.device)).float()

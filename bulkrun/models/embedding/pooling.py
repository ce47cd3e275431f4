"""How the hidden states of a text's tokens become one vector. Knows an encoder as a function alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.settings import Pooling


def text_states(
    encoder: TextEncoder, texts: Sequence[Sequence[int]], pooling: Pooling, *, padding_id: int | None = None
) -> torch.Tensor:
    """One state of each text, of texts of ascending lengths: float32 [S, E].

    padding_id: the last token is the last one but for these, where a text ends in some.
    """
    packed = PackedTexts.of(texts, encoder.device)
    kept = kept_tokens(packed, pooling)
    if pooling == "last" and padding_id is not None:
        kept = last_but_padding(packed, padding_id)
    hidden = encoder(packed, kept)
    return mean_pooled(hidden, packed.lens_S) if kept is None else hidden.float()


def kept_tokens(texts: PackedTexts, pooling: Pooling) -> torch.Tensor | None:
    """int64 [S]: the one token of each text whose hidden state is its vector; None: all of them count."""
    if pooling == "mean":
        return None
    return texts.ends_S - 1 if pooling == "last" else texts.ends_S - texts.lens_S


def last_but_padding(texts: PackedTexts, padding_id: int) -> torch.Tensor:
    """int64 [S]: each text's last token that is not of this id; of a text of nothing else, its first."""
    tokens_T = torch.arange(texts.token_ids_T.numel(), device=texts.token_ids_T.device)
    counted_T = torch.where(texts.token_ids_T == padding_id, 0, tokens_T)
    return (texts.ends_S - texts.lens_S).scatter_reduce(0, texts.text_of_token(), counted_T, "amax")


def mean_pooled(hidden_TE: torch.Tensor, lens_S: torch.Tensor) -> torch.Tensor:
    """Mean over each text's tokens: float32 [S, E].

    hidden_TE: any float dtype. Each text's are added up in order, so that its neighbours change no bit.
    """
    return torch.segment_reduce(hidden_TE.float(), "mean", lengths=lens_S, axis=0, unsafe=True)


def finished(vectors_SE: torch.Tensor, dimensions: int, *, normalize: bool) -> torch.Tensor:
    """The first `dimensions` numbers of each vector, then scaled to a length of 1: float32 [S, dimensions].

    A vector of zeros stays one.
    """
    cut_SD = vectors_SE[:, :dimensions]
    return F.normalize(cut_SD, dim=-1) if normalize else cut_SD.contiguous()

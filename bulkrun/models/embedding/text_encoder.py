"""What a model of texts needs of its transformer: the hidden states of texts' tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.embedding.packed_texts import PackedTexts


class TextEncoder(Protocol):
    """A transformer on its device, weights loaded. The caller holds `torch.inference_mode()`."""

    config: ModelConfig

    @property
    def pair_separator(self) -> int | None:
        """Behind a text's first token of this id its tokens are of the second type; None: all are of the first."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def __call__(self, texts: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, E] after the last norm, as if each text were alone.

        kept: int64 [S], ascending: of these tokens only, [S, E].
        """

    def free_scratch(self) -> None:
        """Give back what is kept between steps, after memory ran out."""

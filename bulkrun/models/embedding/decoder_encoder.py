"""A decoder of the engine's own families as an encoder: texts packed, attention over a cache of one step.

One that looks both ways does so in its one compiled call alone (`embedding_model_loader`).
"""

from __future__ import annotations

import torch

from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.step_cache import StepCache
from bulkrun.models.language_model import LanguageModel


class DecoderEncoder:
    """Implements `TextEncoder`."""

    pair_separator: int | None = None  # its tokens have no types

    def __init__(self, model: LanguageModel, *, block_size: int) -> None:
        self.model, self.config = model, model.config
        self.dtype, self.device = model.dtype, model.device
        self._cache = StepCache(model.config, block_size, model.dtype, model.device)

    def __call__(self, texts: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, E], or [S, E] of `kept`: in the last layer no more than their part is computed."""
        step = self._cache.lay_out(texts)
        return self.model(texts.token_ids_T.int(), step.positions_T, step.cache, step.meta, kept)

    def free_scratch(self) -> None:
        """Give the cache back."""
        self._cache.free()

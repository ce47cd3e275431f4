"""Token ids in, vectors out: an encoder, its pooling and what comes behind it. Knows no requests and no queues."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bulkrun.models.embedding.dense import Dense
from bulkrun.models.embedding.pooling import finished, text_states
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.settings import Pooling


class EmbeddingModel:
    """An encoder and the way from its hidden states to a vector."""

    def __init__(
        self, encoder: TextEncoder, *, pooling: Pooling, dense: Sequence[Dense], dimensions: int, normalize: bool
    ) -> None:
        self.encoder = encoder
        self.dimensions = dimensions
        self._pooling: Pooling = pooling
        self._dense = tuple(dense)
        self._normalize = normalize

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Vectors float32 [S, dimensions] on the device; nothing waits for them.

        texts: token ids of the model, the shortest text first, each of at least one token and no more than the model
        has positions.
        """
        vectors_SE = text_states(self.encoder, texts, self._pooling)
        for dense in self._dense:
            vectors_SE = dense(vectors_SE)
        return finished(vectors_SE, self.dimensions, normalize=self._normalize)
